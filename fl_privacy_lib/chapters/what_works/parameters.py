"""Parameters of the chapter on what works."""

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from fl_privacy_lib._checks import refuse
from fl_privacy_lib.reproduction.settings import Device, Seed, Settings


class WhatWorks(Settings):
    """Parameters of notebook 10, `what_works`."""

    notebook: ClassVar[str] = "10_what_works"
    auto_datasets: ClassVar[tuple[str, ...]] = ("mnist", "digits")
    needs_images: ClassVar[bool] = True
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {"iterations": 4, "batch_size": 100},
        "full": {"iterations": 400, "batch_size": 2048, "epsilon": 0.82, "seeds": 3},
    }
    dataset: str = Field(
        "auto", description="data that train; auto: mnist where its files are, else digits"
    )
    epsilon: float = Field(2.0, gt=0, le=20, description="ε that has to be proved, of an example")
    iterations: int = Field(80, ge=1, le=5000, description="iterations of a training, T")
    batch_size: int = Field(
        1024, ge=1, le=20_000, description="examples in a batch, B, on average; at most N/4 used"
    )
    clip_norm: float = Field(
        0.1, gt=0, le=1e6, description="clipping bound C of the whole gradient"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum γ of the server")
    local_lr: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="learning rate η; 0: the one recorded on MNIST for C of 0.1, times 0.1/C",
    )
    clients: int = Field(1000, ge=2, le=1_000_000, description="clients behind a sum, K")
    margin: int = Field(
        100, ge=0, le=1_000_000, description="clients that may drop out or collude, planned for"
    )
    seeds: int = Field(
        1, ge=1, le=100, description="repetitions with new weights, batches and noise"
    )
    seed: Seed = 0
    device: Device = "auto"

    @model_validator(mode="after")
    def _check_margin(self) -> Self:
        """Refuse a margin that leaves nobody who adds noise."""
        refuse({f"margin = {self.margin} leaves none of clients = {self.clients} to add noise: "
                "lower margin.": self.margin >= self.clients})  # fmt: skip
        return self
