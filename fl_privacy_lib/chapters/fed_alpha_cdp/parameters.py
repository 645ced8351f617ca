"""Parameters of the chapter on Fed-αCDP."""

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from fl_privacy_lib.reproduction.settings import ClipNorm, Device, Seed, Settings


class FedAlphaCdp(Settings):
    """Parameters of notebook 07, `fed_alpha_cdp`."""

    notebook: ClassVar[str] = "07_fed_alpha_cdp"
    auto_datasets: ClassVar[tuple[str, ...]] = ("mnist", "digits")
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {"participants": 2, "rounds": 2, "local_iterations": 2, "seeds": 1},
        "full": {
            "participants": 20,
            "rounds": 100,
            "local_iterations": 100,
            "noise_scale": 6.0,
            "seeds": 3,
        },
    }
    dataset: str = Field(
        "auto", description="data of the clients; auto: mnist where its files are, else digits"
    )
    clients: int = Field(100, ge=1, le=10_000, description="clients in all, K")
    participants: int = Field(5, ge=1, le=10_000, description="clients in a round, K_t")
    rounds: int = Field(10, ge=1, le=10_000, description="rounds, T")
    local_iterations: int = Field(
        50, ge=1, le=10_000, description="local iterations in a participation, L"
    )
    clip_norm: ClipNorm = 4.0
    noise_scale: float = Field(
        1.0, ge=1e-3, le=1e6, description="noise scale σ, in units of C; where it falls, its level"
    )
    local_lr: float = Field(
        0.0,
        ge=0,
        le=100,
        description="the clients' learning rate η, of every arm; 0: Fed-CDP's best of five",
    )
    seeds: int = Field(
        1, ge=1, le=100, description="repetitions with new clients' data, weights and noise"
    )
    seed: Seed = 0
    device: Device = "auto"

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        """Refuse numbers that contradict each other; the message names the parameter to change."""
        self.check_order(participants="clients")
        return self
