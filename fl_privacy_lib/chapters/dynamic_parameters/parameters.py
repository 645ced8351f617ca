"""Parameters of the chapter on dynamic parameters."""

from typing import Any, ClassVar

from pydantic import Field

from fl_privacy_lib.reproduction.settings import Device, Seed, Settings


class DynamicParameters(Settings):
    """Parameters of notebook 06, `dynamic_parameters`."""

    notebook: ClassVar[str] = "06_dynamic_parameters"
    auto_datasets: ClassVar[tuple[str, ...]] = ("mnist", "digits")
    needs_images: ClassVar[bool] = True
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {"iterations": 4, "batch_size": 50, "batches": 2, "games": 40, "seeds": 1},
        "full": {
            "iterations": 10_000,
            "noise_scale": 6.0,
            "batches": 40,
            "games": 2000,
            "seeds": 3,
        },
    }
    dataset: str = Field(
        "auto", description="data that train; auto: mnist where its files are, else digits"
    )
    iterations: int = Field(
        200,
        ge=1,
        le=100_000,
        description="iterations of a training, T; below 100 the attacks are cut short, too",
    )
    batch_size: int = Field(
        0, ge=0, le=5000, description="examples in a batch, B, on average; 0: the paper's, or 100"
    )
    clip_norm: float = Field(
        4.0, gt=0, le=1e6, description="clipping bound C of the first iteration"
    )
    noise_scale: float = Field(2.0, ge=1e-3, le=1e6, description="noise scale σ, in units of C")
    local_lr: float = Field(
        0.0,
        ge=0,
        le=100,
        description="learning rate η; 0: MNIST's best times 4/C; elsewhere the best of five",
    )
    batches: int = Field(
        8, ge=1, le=10_000, description="batches whose largest gradient norm is read, a stage"
    )
    games: int = Field(200, ge=10, le=100_000, description="releases that have to be told apart")
    seeds: int = Field(
        1, ge=1, le=100, description="repetitions with new weights, batches and noise"
    )
    seed: Seed = 0
    device: Device = "auto"
