"""Parameters of the chapter on fast private training."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from fl_privacy_lib.reproduction.settings import Device, NoiseScale, Settings


class FastTraining(Settings):
    """Parameters of notebook 04, `fast_private_training`."""

    notebook: ClassVar[str] = "04_fast_private_training"
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {"participants": 4, "local_iterations": 2, "repetitions": 1, "rounds": 1},
        "full": {"participants": 20, "local_iterations": 10, "repetitions": 21, "rounds": 5},
    }
    workload: Literal["mnist", "cifar10", "lfw", "adult", "cancer"] = Field(
        "mnist",
        description="shape of the examples, network and classes; the examples are random",
    )
    participants: int = Field(10, ge=1, le=100_000, description="clients in a round, K_t")
    local_iterations: int = Field(
        5, ge=1, le=10_000, description="local iterations in a participation, L"
    )
    batch_size: int = Field(5, ge=1, le=10_000, description="examples in a local batch, B")
    clip_norm: float = Field(
        0.5,
        gt=0,
        le=1e6,
        description="clipping bound C, per tensor; the papers' 4 would clip few of these",
    )
    noise_scale: NoiseScale = 6.0
    clients_per_chunk: int = Field(
        4, ge=1, le=10_000, description="clients that the fast engine stacks"
    )
    workers: int = Field(2, ge=1, le=64, description="processes that share a round's clients")
    rounds: int = Field(3, ge=1, le=1000, description="rounds over which the workers are timed")
    repetitions: int = Field(
        3, ge=1, le=1000, description="times that every engine is measured, interleaved"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of weights, examples and noise")
    device: Device = Field(
        "auto", description="without effect: the engines are timed on the CPU alone"
    )
