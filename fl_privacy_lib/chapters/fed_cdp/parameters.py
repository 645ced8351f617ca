"""Parameters of the chapter on Fed-CDP."""

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from fl_privacy_lib.reproduction.settings import ClipNorm, Device, NoiseScale, Seed, Settings


class FedCdp(Settings):
    """Parameters of notebook 05, `fed_cdp`."""

    notebook: ClassVar[str] = "05_fed_cdp"
    auto_datasets: ClassVar[tuple[str, ...]] = ("mnist", "digits")
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "participants": 2,
            "rounds": 1,
            "local_iterations": 2,
            "examples": 20,
            "seeds": 1,
        },
        "full": {
            "clients": 1000,
            "participants": 100,
            "rounds": 100,
            "local_iterations": 100,
            "examples": 500,
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
        100, ge=1, le=10_000, description="local iterations in a participation, L"
    )
    batch_size: int = Field(
        0, ge=0, le=200, description="examples in a local batch, B; 0: the paper's for these data"
    )
    clip_norm: ClipNorm = 4.0
    decay_from: float = Field(
        6.0, gt=0, le=1e6, description="bound of the first round where it decays"
    )
    decay_to: float = Field(2.0, gt=0, le=1e6, description="where that bound ends after T rounds")
    noise_scale: NoiseScale = 6.0
    local_lr: float = Field(
        0.0,
        ge=0,
        le=100,
        description="the clients' learning rate η; 0: each arm's best recorded on these data",
    )
    examples: int = Field(
        200, ge=1, le=10_000, description="examples whose utility bound is computed"
    )
    seeds: int = Field(
        3, ge=1, le=100, description="repetitions with new clients' data, weights and noise"
    )
    seed: Seed = 0
    device: Device = "auto"

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        """Refuse numbers that contradict each other; the message names the parameter to change."""
        self.check_order(participants="clients", decay_to="decay_from")
        return self
