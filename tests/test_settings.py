"""Parameters: right ones pass, wrong ones get one sentence, notebooks agree with their classes."""

import json
import subprocess
import sys

import papermill
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters import CHAPTERS, chapter, experiment
from fl_privacy_lib.chapters.threat_types.parameters import ThreatTypes
from fl_privacy_lib.reproduction.paths import MEASURED, ROOT
from fl_privacy_lib.reproduction.settings import PROFILES, parse_assignments


def parameter_rows(notebook):
    """Return name, type, default and comment of each parameter in a notebook's parameters cell."""
    for cell in json.loads(notebook.read_text())["cells"]:
        if "parameters" in cell["metadata"].get("tags", []):
            for line in "".join(cell["source"]).splitlines():
                if "=" in line and not line.startswith("#"):
                    code, _, comment = line.partition("  # ")
                    name, _, value = code.partition("=")
                    name, _, kind = name.partition(":")
                    yield name.strip(), kind.strip(), value.strip(), comment.strip()


@pytest.mark.parametrize("number", CHAPTERS)
def test_the_parameters_cell_and_the_settings_class_are_one(number):
    kind = CHAPTERS[number]
    cell = parameter_rows(ROOT / "notebooks" / f"{kind.notebook}.ipynb")
    rows = {name: (value, comment) for name, _, value, comment in cell}
    assert list(rows) == list(kind.model_fields)
    for name, field in kind.model_fields.items():
        value, comment = rows[name]
        assert eval(value) == getattr(kind(), name), name
        assert comment == field.description, name
    # papermill warns of a parameter that it cannot read: an equals sign in its comment is enough
    read = papermill.inspect_notebook(str(ROOT / "notebooks" / f"{kind.notebook}.ipynb"))
    assert list(read) == list(kind.model_fields)


@pytest.mark.parametrize("number", CHAPTERS)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_valid_and_recognised(number, profile):
    kind = CHAPTERS[number]
    assert kind.of_profile(profile).profile == profile


def test_overrides_make_a_custom_profile_but_data_and_seed_do_not():
    assert ThreatTypes.of_profile("quick", clip_norm="2").profile == "custom"
    assert (
        ThreatTypes.of_profile("quick", dataset="digits", seed="3", device="cpu").profile == "quick"
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"clip_norm": "-1"}, ["clip_norm", "-1", "greater than 0"]),
        ({"clip_norm": "nan"}, ["clip_norm", "nan"]),
        ({"noise_scale": "inf"}, ["noise_scale", "inf"]),
        ({"clip_nrom": "4"}, ["clip_nrom", "did you mean clip_norm", "noise_scale"]),
        ({"victims": "two"}, ["victims", "two", "whole number"]),
        ({"start": "zeros"}, ["start", "zeros", "patterned"]),
        ({"start": "paterned"}, ["did you mean patterned"]),
        ({"clip_norm": "4,"}, ["4,", "a number", "separated by spaces"]),
        ({"victims": "0"}, ["victims", "0"]),
    ],
)
def test_a_wrong_value_gets_one_sentence(values, words):
    with pytest.raises(InputError) as error:
        ThreatTypes.of_profile("quick", **values)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert message.endswith(".") and "\n" not in message


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_no_number_outside_the_range_passes(value):
    inside = 0 < value <= 1e6
    try:
        assert ThreatTypes.checked(clip_norm=value).clip_norm == value and inside
    except InputError:
        assert not inside


def test_chapters_are_found_by_number_and_name():
    assert (
        chapter("01")
        == chapter("1")
        == chapter("threat_types")
        == chapter("01_threat_types")
        == ThreatTypes
    )
    assert chapter("fast_training") == chapter("fast_private_training") == chapter("04")
    assert list(CHAPTERS) == sorted(CHAPTERS) and all(
        kind.notebook[:2] == n for n, kind in CHAPTERS.items()
    )
    with pytest.raises(InputError, match="there is no notebook '99'"):
        chapter("99")


def test_every_chapter_can_be_recorded():
    for kind in CHAPTERS.values():
        parts = experiment(kind).parts(kind.of_profile("full"), MEASURED)
        assert experiment(kind).chapter == kind.notebook[:2]
        recorded = [part for part in parts if not part.long]
        assert recorded and all((MEASURED / f"{part.table}.csv").exists() for part in recorded), (
            kind
        )


def test_assignments():
    assert parse_assignments(["a=1", "b=npz:/x=y"]) == {"a": "1", "b": "npz:/x=y"}
    for words in (["a"], ["=1"], ["a="], ["a=1", "a=2"]):
        with pytest.raises(InputError):
            parse_assignments(words)
    with pytest.raises(
        InputError, match=r"choose it with PROFILE=… .* quick, full \(did you mean quick\?\)"
    ):
        parse_assignments(["profile=quik"])


@pytest.mark.parametrize("name", ["cls", "profile", "self", "values"])
def test_no_name_of_our_own_functions_is_taken_for_a_parameter(name):
    for read in (ThreatTypes.checked, lambda **values: ThreatTypes.of_profile("quick", **values)):
        with pytest.raises(InputError, match=f"has no parameter '{name}'"):
            read(**{name: 1})


def test_parameters_are_checked_without_loading_torch():
    code = (
        "import sys; from fl_privacy_lib.__main__ import main;"
        " status = main(['run', '01', 'clip_norm=-1']);"
        "sys.exit(10 * ('torch' in sys.modules) + status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: clip_norm") and done.stderr.count("\n") == 1
