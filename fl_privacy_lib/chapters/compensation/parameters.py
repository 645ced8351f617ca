"""Parameters of the chapter on compensation."""

from typing import Any, ClassVar

from pydantic import Field

from fl_privacy_lib.reproduction.settings import Device, Seed, Settings


class Compensation(Settings):
    """Parameters of notebook 09, `compensation`."""

    notebook: ClassVar[str] = "09_compensation"
    auto_datasets: ClassVar[tuple[str, ...]] = ("mnist", "digits")
    needs_images: ClassVar[bool] = True
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {"victims": 1, "root_images": 10, "max_iterations": 3, "draws": 2},
        "full": {"victims": 4, "root_images": 100, "max_iterations": 500, "draws": 100, "seeds": 4},
    }
    dataset: str = Field(
        "auto", description="images to attack; auto: mnist where its files are, else digits"
    )
    victims: int = Field(2, ge=1, le=1000, description="images attacked on each network")
    slices: int = Field(10, ge=1, le=1000, description="slices of a gradient, s")
    share: float = Field(0.2, gt=0, le=1, description="share of the slices that get noise, γ")
    noise: float = Field(
        0.1, gt=0, le=1e6, description="standard deviation σ of that noise, on a gradient"
    )
    ratio: float = Field(6.0, ge=1, le=100, description="rows by column of the folded matrix, Q")
    root_images: int = Field(
        50, ge=1, le=10_000, description="public images that the leakage risk is measured on"
    )
    max_iterations: int = Field(
        60, ge=1, le=10_000, description="attack iterations of 20 steps; the paper has 500"
    )
    draws: int = Field(10, ge=1, le=10_000, description="draws of noise on an aggregate")
    seeds: int = Field(
        1, ge=1, le=100, description="networks, each with images and noise of its own"
    )
    seed: Seed = 0
    device: Device = "auto"
