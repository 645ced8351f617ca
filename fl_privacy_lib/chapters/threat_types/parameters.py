"""Parameters of the chapter on threat types."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from fl_privacy_lib.reproduction.settings import ClipNorm, Device, NoiseScale, Seed, Settings


class ThreatTypes(Settings):
    """Parameters of notebook 01, `threat_types`."""

    notebook: ClassVar[str] = "01_threat_types"
    auto_datasets: ClassVar[tuple[str, ...]] = ("mnist", "digits")
    needs_images: ClassVar[bool] = True
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "victims": 2,
            "batch_victims": 1,
            "max_iterations": 12,
            "batch_iterations": 12,
            "long_iterations": 3,
        },
        "full": {
            "victims": 20,
            "batch_victims": 20,
            "max_iterations": 300,
            "batch_iterations": 300,
            "long_iterations": 20,
            "seeds": 5,
        },
    }
    dataset: str = Field(
        "auto", description="images to attack; auto: mnist where its files are, else digits"
    )
    batch_dataset: str = Field(
        "auto", description="images of the batch attack; auto: lfw where it is, else the same"
    )
    victims: int = Field(16, ge=1, le=1000, description="clients attacked, one image each")
    batch_victims: int = Field(4, ge=1, le=1000, description="clients attacked, a whole batch each")
    batch_size: int = Field(3, ge=1, le=50, description="examples behind a batch gradient, B")
    local_lr: float = Field(0.05, gt=0, le=100, description="the client's learning rate, η")
    long_iterations: int = Field(
        5, ge=2, le=1000, description="local iterations L of the longest participation"
    )
    clip_norm: ClipNorm = 4.0
    noise_scale: NoiseScale = 6.0
    batch_iterations: int = Field(
        60, ge=1, le=10_000, description="attack iterations of the batch attack's pictures"
    )
    start: Literal["patterned", "normal"] = Field(
        "patterned", description="the attack's first dummy image"
    )
    optimiser: Literal["lbfgs", "adam"] = Field("lbfgs", description="the attack's optimiser")
    max_iterations: int = Field(
        30, ge=1, le=10_000, description="attack iterations of 20 steps; the papers use 300"
    )
    seeds: int = Field(
        1, ge=1, le=100, description="repetitions with new weights, victims and noise"
    )
    seed: Seed = 0
    device: Device = "auto"
