"""Parameters of the chapter on adaptive attacks."""

from typing import Any, ClassVar

from pydantic import Field

from fl_privacy_lib.reproduction.settings import ClipNorm, Device, Seed, Settings


class AdaptiveAttacks(Settings):
    """Parameters of notebook 02, `adaptive_attacks`."""

    notebook: ClassVar[str] = "02_adaptive_attacks"
    auto_datasets: ClassVar[tuple[str, ...]] = ("mnist", "digits")
    needs_images: ClassVar[bool] = True
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "victims": 2,
            "max_iterations": 6,
            "noise_levels": 2,
            "public_images": 200,
            "projection": 64,
        },
        "full": {
            "victims": 20,
            "max_iterations": 300,
            "noise_levels": 8,
            "seeds": 5,
            "public_images": 4000,
            "views": 8,
            "projection": 512,
        },
    }
    dataset: str = Field(
        "auto", description="images to attack; auto: mnist where its files are, else digits"
    )
    victims: int = Field(8, ge=1, le=1000, description="clients attacked, one image each")
    clip_norm: ClipNorm = 4.0
    pruned: float = Field(
        0.6, ge=0, lt=1, description="fraction of the gradient's coordinates that pruning drops"
    )
    noise: float = Field(
        0.01, ge=0, le=1e6, description="standard deviation per coordinate of the noise to attack"
    )
    noise_levels: int = Field(
        5, ge=2, le=50, description="noise levels of the live sweep, from 1e-4 to 1"
    )
    public_images: int = Field(
        1500, ge=20, le=60_000, description="public images that the learned attacker is taught with"
    )
    views: int = Field(2, ge=1, le=64, description="fresh draws of the noise for each of them")
    projection: int = Field(
        256, ge=1, le=10_000, description="numbers that the learned attacker reduces a gradient to"
    )
    observations: int = Field(
        8, ge=1, le=256, description="rounds in which the same image is seen, R"
    )
    max_iterations: int = Field(
        30, ge=1, le=10_000, description="attack iterations of 20 steps; the papers use 300"
    )
    seeds: int = Field(
        1, ge=1, le=100, description="repetitions with new weights, victims and noise"
    )
    seed: Seed = 0
    device: Device = "auto"
