"""A chapter's parameters: checked before anything heavy is imported.

Every chapter has one settings class. Its defaults are the `quick` profile and stand, with the same comments, in the
parameters cell of its notebook; a test keeps the two equal. A profile only chooses values.
"""

import math
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fl_privacy_lib._checks import InputError, nearest, one_of

PROFILES = ("smoke", "quick", "full")


class Settings(BaseModel):
    """Base of a chapter's settings: frozen, no unknown names, one clear sentence for what is wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    chapter: ClassVar[str]
    profiles: ClassVar[dict[str, dict[str, Any]]] = {}

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Return the settings with these values over the defaults.

        Raises
        ------
        InputError
            One sentence that names the parameter, its value and what would be right.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise InputError(cls._sentence(error)) from None

    @classmethod
    def of_profile(cls, profile: str, **overrides: Any) -> Self:
        """Return a profile's settings with overrides on top."""
        one_of(PROFILES, profile=profile)
        return cls.checked(**(cls.profiles.get(profile, {}) | overrides))

    @property
    def profile(self) -> str:
        """The profile whose values these are, whatever the data, device and seed; else 'custom'."""
        free = {"dataset", "batch_dataset", "device", "seed"}
        for name in PROFILES:
            if self.model_dump(exclude=free) == type(self)(**self.profiles.get(name, {})).model_dump(exclude=free):
                return name
        return "custom"

    @classmethod
    def _sentence(cls, error: ValidationError) -> str:
        first = error.errors()[0]
        name, value = str(first["loc"][0]) if first["loc"] else cls.chapter, first.get("input")
        if first["type"] == "extra_forbidden":
            known = sorted(cls.model_fields)
            return f"notebook {cls.chapter} has no parameter {name!r}{nearest(name, known)}; it has {', '.join(known)}."
        if first["type"] == "value_error" and not first["loc"]:  # a check of several parameters: a whole sentence
            return str(first["ctx"]["error"])
        if first["type"] == "value_error":
            return f"{name} = {value!r}: {str(first['ctx']['error']).rstrip('.')}."
        return f"{name} = {value!r} is not allowed: {first['msg'][0].lower()}{first['msg'][1:].rstrip('.')}."


Device = Literal["auto", "cpu", "cuda"]
Positive = Field(gt=0, lt=math.inf)


class ThreatTypes(Settings):
    """Parameters of notebook 01, `threat_types`."""

    chapter: ClassVar[str] = "01"
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {"victims": 2, "batch_victims": 1, "max_iterations": 12, "batch_iterations": 12, "long_iterations": 3},
        "full": {
            "victims": 20, "batch_victims": 20, "max_iterations": 300, "batch_iterations": 300, "long_iterations": 20,
            "seeds": 5,
        },
    }
    dataset: str = Field("auto", description="images to attack; auto: mnist where its files are, else digits")
    batch_dataset: str = Field("auto", description="images of the batch attack; auto: lfw where it is, else the same")
    victims: int = Field(16, ge=1, le=1000, description="clients attacked, one image each")
    batch_victims: int = Field(4, ge=1, le=1000, description="clients attacked, a whole batch each")
    batch_size: int = Field(3, ge=1, le=50, description="examples behind a batch gradient, B")
    local_lr: float = Field(0.05, gt=0, le=100, description="the client's learning rate, η")
    long_iterations: int = Field(5, ge=2, le=1000, description="local iterations L of the longest participation")
    clip_norm: float = Field(4.0, gt=0, le=1e6, description="clipping bound C, per tensor")
    noise_scale: float = Field(6.0, ge=0, le=1e6, description="noise scale σ, in units of C")
    batch_iterations: int = Field(60, ge=1, le=10_000, description="attack iterations of the batch attack's pictures")
    start: Literal["patterned", "uniform", "normal"] = Field("patterned", description="the attack's first dummy image")
    optimiser: Literal["lbfgs", "adam"] = Field("lbfgs", description="the attack's optimiser")
    max_iterations: int = Field(30, ge=1, le=10_000, description="attack iterations of 20 steps; the papers use 300")
    seeds: int = Field(1, ge=1, le=100, description="repetitions with new weights, victims and noise")
    seed: int = Field(0, ge=0, lt=2**31, description="the first of those seeds")
    device: Device = Field("auto", description="auto: a CUDA device where there is one, else the CPU")


class CountingPrivacy(Settings):
    """Parameters of notebook 03, `counting_privacy`: a training of the reader's own, whose ε is stated twice."""

    chapter: ClassVar[str] = "03"
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {"curve_points": 8, "second_library": False},
        "full": {"curve_points": 200},
    }
    method: Literal["fed_cdp_example", "fed_cdp_batch", "fed_sdp_client", "fed_sdp_server", "non_private"] = Field(
        "fed_cdp_batch", description="what is run; the word after the last underscore says where noise enters"
    )
    clients: int = Field(1000, ge=1, le=10**7, description="clients in all, K")
    participants: int = Field(100, ge=1, le=10**7, description="clients in a round, K_t")
    rounds: int = Field(100, ge=1, le=10**6, description="rounds, T")
    local_iterations: int = Field(100, ge=1, le=10**6, description="local iterations in a participation, L")
    batch_size: int = Field(5, ge=1, le=10**6, description="examples in a local batch, B")
    client_size: int = Field(500, ge=1, le=10**8, description="examples of a client, repeats counted, n")
    examples: int = Field(50_000, ge=1, le=10**10, description="different examples in all, N")
    holders: int = Field(10, ge=1, le=10_000, description="clients that hold a given example")
    repeats: int = Field(1, ge=1, le=10_000, description="times that one client holds a given example")
    client_sampling: Literal["fixed", "poisson"] = Field("fixed", description="how the clients of a round are drawn")
    batch_sampling: Literal["one_pass_fixed", "one_pass_shuffled", "with_replacement", "poisson"] = Field(
        "one_pass_fixed", description="how a client draws its batches"
    )
    clip_norm: float = Field(4.0, gt=0, le=1e6, description="clipping bound C")
    clip_scope: Literal["layer", "all"] = Field("layer", description="what is clipped to C: each tensor, or the whole")
    tensors: int = Field(3, ge=1, le=10_000, description="tensors of the model, M")
    noise_scale: float = Field(6.0, ge=0, le=1e6, description="noise scale σ, in units of C")
    divide_by: Literal["as_method", "sqrt_batch", "batch", "none"] = Field(
        "as_method", description="what divides σC on the batch mean; as_method: the method's own"
    )
    sensitivity: Literal["bound", "l2_max"] = Field(
        "bound", description="what the noise is scaled with: C, or the batch's own largest norm"
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="δ")
    unit: Literal["example", "client"] = Field("example", description="whom the proved statement protects")
    relation: Literal["add_remove", "replace_one"] = Field("add_remove", description="what neighbouring data differ by")
    tap: Literal["example", "batch", "update", "received", "aggregate"] = Field(
        "update", description="where the adversary of the proved statement reads"
    )
    curve_points: int = Field(60, ge=4, le=10_000, description="points on each curve of the figures")
    second_library: bool = Field(True, description="compare with TensorFlow Privacy where it is installed")
    device: Device = Field("auto", description="named in the records; accounting uses the CPU alone")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Refuse numbers that contradict each other; the message names the parameter to change."""
        for small, large in (("participants", "clients"), ("holders", "clients"), ("batch_size", "client_size"),
                             ("repeats", "client_size")):  # fmt: skip
            if getattr(self, small) > getattr(self, large):
                raise InputError(
                    f"{small} = {getattr(self, small)} is more than {large} = {getattr(self, large)}: lower {small}."
                )
        if self.clip_scope == "all" and self.method.startswith("fed_sdp"):
            raise InputError("clip_scope = 'all' is not a form of Fed-SDP in the papers: use clip_scope = 'layer'.")
        return self


CHAPTERS: dict[str, tuple[str, type[Settings]]] = {
    "01": ("01_threat_types", ThreatTypes),
    "03": ("03_counting_privacy", CountingPrivacy),
}
"""Chapter number → notebook name and settings class."""


def chapter(name: str) -> tuple[str, type[Settings]]:
    """Return (notebook, settings class) of a chapter given as '01', '1', 'threat_types' or '01_threat_types'.

    >>> chapter("threat_types")[0]
    '01_threat_types'
    """
    for number, (notebook, settings) in CHAPTERS.items():
        if name in (number, number.lstrip("0"), notebook, notebook.partition("_")[2]):
            return notebook, settings
    words = [word for number, (notebook, _) in CHAPTERS.items() for word in (number, notebook)]
    raise InputError(f"there is no notebook {name!r}{nearest(name, words)}; there are {', '.join(words)}.")


def parse_assignments(words: list[str]) -> dict[str, str]:
    """Return {name: value} of words like ``noise_scale=1e-2``; the settings class turns text into numbers.

    >>> parse_assignments(["noise_scale=1e-2"])
    {'noise_scale': '1e-2'}
    """
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise InputError(f"{word!r} is not a parameter: write name=value, for example noise_scale=1e-2.")
        if name in values:
            raise InputError(f"{name} is given twice ({values[name]} and {value}): give it once.")
        values[name] = value
    return values
