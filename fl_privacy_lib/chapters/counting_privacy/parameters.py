"""Parameters of the chapter on counting privacy."""

import math
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.reproduction.settings import Device, NoiseScale, Settings


class CountingPrivacy(Settings):
    """Parameters of notebook 03, `counting_privacy`: a reader's training, its ε stated twice."""

    notebook: ClassVar[str] = "03_counting_privacy"
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {"curve_points": 8, "second_library": False},
        "full": {"curve_points": 200},
    }
    method: Literal[
        "fed_cdp_example", "fed_cdp_batch", "fed_sdp_client", "fed_sdp_server", "non_private"
    ] = Field(
        "fed_cdp_batch",
        description="what is run; its last word says where noise enters",
    )
    clients: int = Field(1000, ge=1, le=10**7, description="clients in all, K")
    participants: int = Field(100, ge=1, le=10**7, description="clients in a round, K_t")
    rounds: int = Field(100, ge=1, le=20_000, description="rounds, T")
    local_iterations: int = Field(
        100, ge=1, le=10**6, description="local iterations in a participation, L"
    )
    batch_size: int = Field(5, ge=1, le=10**6, description="examples in a local batch, B")
    client_size: int = Field(
        500, ge=1, le=10**8, description="examples of a client, repeats counted, n"
    )
    examples: int = Field(50_000, ge=1, le=10**10, description="different examples in all, N")
    holders: int = Field(
        0,
        ge=0,
        le=10_000,
        description="clients that hold a given example; 0: K·n/(N·repeats), rounded up",
    )
    repeats: int = Field(1, ge=1, le=10_000, description="times that each of them holds it")
    client_sampling: Literal["fixed", "poisson"] = Field(
        "fixed", description="how the clients of a round are drawn"
    )
    batch_sampling: Literal[
        "one_pass_fixed", "one_pass_shuffled", "with_replacement", "poisson"
    ] = Field("one_pass_fixed", description="how a client draws its batches")
    clip_norm: float = Field(4.0, gt=0, le=1e6, description="clipping bound C")
    clip_scope: Literal["layer", "all"] = Field(
        "layer", description="what is clipped to C: each tensor, or the whole"
    )
    tensors: int = Field(3, ge=1, le=10_000, description="tensors of the model, M")
    noise_scale: NoiseScale = 6.0
    divide_by: Literal["as_method", "sqrt_batch", "batch", "none"] = Field(
        "as_method", description="what divides σC on the batch mean; as_method: the method's own"
    )
    sensitivity: Literal["bound", "l2_max"] = Field(
        "bound", description="what the noise is scaled with: C, or the batch's own largest norm"
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="δ")
    unit: Literal["example", "client"] = Field(
        "example", description="whom the proved statement protects"
    )
    relation: Literal["add_remove", "replace_one"] = Field(
        "add_remove", description="what neighbouring data differ by"
    )
    tap: Literal["example", "batch", "update", "received", "aggregate"] = Field(
        "update", description="where the adversary of the proved statement reads"
    )
    curve_points: int = Field(
        60, ge=4, le=10_000, description="points on each curve of the figures"
    )
    second_library: bool = Field(
        True, description="compare with TensorFlow Privacy where it is installed"
    )
    device: Device = Field("auto", description="without effect: accounting uses the CPU alone")

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        """Refuse numbers that contradict each other; the message names the parameter to change."""
        self.check_order(
            participants="clients", holders="clients", batch_size="client_size",
            repeats="client_size",
        )  # fmt: skip
        self._check_shares()
        if self.clip_scope == "all" and self.method.startswith("fed_sdp"):
            raise InputError(
                "clip_scope = 'all' is not a form of Fed-SDP in the papers: "
                "use clip_scope = 'layer'."
            )
        return self

    @property
    def least_holders(self) -> int:
        """Clients that hold an example at the least: N examples fill K·n places."""
        return math.ceil(self.clients * self.client_size / (self.examples * self.repeats))

    def _check_shares(self) -> None:
        """Refuse a worst case that is better than the mean: N examples fill K·n places."""
        N, places = self.examples, self.clients * self.client_size
        if N > places:
            raise InputError(
                f"examples = {N} is more than clients × client_size = {places}: lower examples."
            )
        for name, mean in (
            ("repeats", self.client_size / N),
            ("holders", self.least_holders if self.holders else 0),
        ):
            if getattr(self, name) < mean:
                raise InputError(
                    f"{name} = {getattr(self, name)} is too low: {self.clients} clients of "
                    f"{self.client_size} examples have room for {places}, but only {N} differ: "
                    f"set {name} to {math.ceil(mean)} or more."
                )
