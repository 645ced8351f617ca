"""A chapter's parameters: checked before anything heavy is imported.

Every chapter has one settings class, in its `parameters`. Its defaults are the `quick` profile and
stand, with the same comments, in the parameters cell of its notebook; a test keeps the two equal. A
profile only chooses values.
"""

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_privacy_lib._checks import InputError, nearest, one_of, refuse

PROFILES = ("smoke", "quick", "full")
# parameters of several chapters
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    Field(description="auto: a CUDA device where there is one, else the CPU"),
]
Seed = Annotated[int, Field(ge=0, lt=2**31, description="the first of those seeds")]
ClipNorm = Annotated[float, Field(gt=0, le=1e6, description="clipping bound C, per tensor")]
NoiseScale = Annotated[float, Field(ge=0, le=1e6, description="noise scale σ, in units of C")]
FREE = {"dataset", "batch_dataset", "device", "seed"}  # in every profile


class Settings(BaseModel):
    """Base of a chapter's settings: frozen, no unknown names, one clear sentence for each fault."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    notebook: ClassVar[str]  # its number first
    profiles: ClassVar[dict[str, dict[str, Any]]] = {}
    # dataset = "auto" stands for the first of these that is there
    auto_datasets: ClassVar[tuple[str, ...]] = ()
    needs_images: ClassVar[bool] = False

    @classmethod
    def checked(cls, /, **values: Any) -> Self:
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
    def of_profile(cls, profile: str, /, **overrides: Any) -> Self:
        """Return a profile's settings with overrides on top."""
        one_of(PROFILES, profile=profile)
        return cls.checked(**(cls.profiles.get(profile, {}) | overrides))

    @property
    def profile(self) -> str:
        """The profile whose values these are, whatever the data, device and seed; else 'custom'."""
        for name in PROFILES:
            values = type(self)(**self.profiles.get(name, {})).model_dump(exclude=FREE)
            if values == self.model_dump(exclude=FREE):
                return name
        return "custom"

    def check_order(self, **pairs: str) -> None:
        """Check that no parameter is more than the one that bounds it.

        Parameters
        ----------
        pairs : the smaller parameter's name = the larger one's

        Raises
        ------
        InputError
            One sentence that names both parameters, their values and what to change.
        """
        for small, large in pairs.items():
            if getattr(self, small) > getattr(self, large):
                raise InputError(
                    f"{small} = {getattr(self, small)} is more than {large} = "
                    f"{getattr(self, large)}: lower {small} or raise {large}."
                )

    @classmethod
    def _sentence(cls, error: ValidationError) -> str:
        first = error.errors()[0]
        name, value = str(first["loc"][0]) if first["loc"] else cls.notebook[:2], first.get("input")
        if first["type"] == "extra_forbidden":
            known = sorted(cls.model_fields)
            wrong = f"notebook {cls.notebook[:2]} has no parameter {name!r}{nearest(name, known)}"
            return f"{wrong}; it has {', '.join(known)}."
        if first["type"] == "value_error":
            sentence = str(first["ctx"]["error"])
            # a check of several parameters has no place, and says a whole sentence
            return f"{name} = {value!r}: {sentence.rstrip('.')}." if first["loc"] else sentence
        if first["type"] == "literal_error":
            one_of(get_args(cls.model_fields[name].annotation), **{name: str(value)})
        plain = {
            "int": "it must be a whole number",
            "float": "it must be a number",
            "bool": "it must be true or false",
        }
        reason = plain.get(
            first["type"].split("_")[0], first["msg"][0].lower() + first["msg"][1:].rstrip(".")
        )
        if str(value).endswith(","):
            reason += "; parameters are separated by spaces, without commas"
        return f"{name} = {value!r} is not allowed: {reason}."


def parse_assignments(words: list[str]) -> dict[str, str]:
    """Return name → value, as text, of words like ``noise_scale=1e-2``.

    Raises
    ------
    InputError
        If a word is no assignment, names the profile, or repeats a name.

    Examples
    --------
    >>> parse_assignments(["noise_scale=1e-2"])
    {'noise_scale': '1e-2'}
    """
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        refuse(
            {
                f"{word!r} is not a parameter: write name=value without spaces, for example "
                "noise_scale=1e-2.": not (equals and name and value),
                f"profile = {value!r} is no parameter of a notebook: choose it with PROFILE=… "
                f"beside P, or with --profile, from {', '.join(PROFILES)}"
                f"{nearest(value, PROFILES)}.": name == "profile",
                f"{name} is given twice ({values.get(name)} and {value}): give it once.": (
                    name in values
                ),
            }
        )
        values[name] = value
    return values
