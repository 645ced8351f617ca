"""The chapter contract: parts in order, figures described, no typed number, fallible exercises."""

import json
import re
import types

import pytest

from fl_privacy_lib.chapters import CHAPTERS
from fl_privacy_lib.reproduction.paths import ROOT

NOTEBOOKS = [ROOT / "notebooks" / f"{kind.notebook}.ipynb" for kind in CHAPTERS.values()]
PARTS = [
    "Objectives",
    "Prerequisites",
    "Time and hardware",
    "Parameters",
    "…",
    "Published beside measured",
    "What holds, what does not",
    "Differences from the paper",
    "Exercises",
    "What you learned",
    "Further reading",
]
PAGES = sorted((ROOT / "book").glob("*.md"))


def cells(path):
    for cell in json.loads(path.read_text())["cells"]:
        yield cell["cell_type"], "".join(cell["source"]), cell["metadata"], cell.get("outputs", [])


def prose(path):
    return "\n".join(source for kind, source, *_ in cells(path) if kind == "markdown")


def test_every_notebook_is_a_chapter():
    assert sorted((ROOT / "notebooks").glob("*.ipynb")) == sorted(NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_parts_stand_in_order(path):
    text = prose(path)
    titles = re.findall(r"^## (.+)$", text, re.M)
    body = PARTS.index("…")
    assert titles[:body] == PARTS[:body]
    assert titles[body - len(PARTS) + 1 :] == PARTS[body + 1 :]
    assert len(titles) > len(PARTS) - 1, "a chapter has a body"
    assert (
        text.startswith("# ")
        and "{admonition} What this chapter reproduces" in text.split("## ")[0]
    )
    assert "**Status** {glue:text}" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_source_is_clean(path):
    kinds = list(cells(path))
    assert not any(outputs for *_, outputs in kinds)
    tagged = [i for i, (_, _, meta, _) in enumerate(kinds) if "parameters" in meta.get("tags", [])]
    assert len(tagged) == 1
    checked = next(source for kind, source, *_ in kinds[tagged[0] + 1 :] if kind == "code")
    assert ".checked(" in checked, "the first code cell after the parameters validates them"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_figure_has_caption_label_and_alt_text(path):
    figures = 0
    for kind, source, meta, _ in cells(path):
        draws = kind == "code" and re.search(
            r"figures\.(?!use_style|named|NAMES)[a-z_]+\([^\n]*", source
        )
        if not draws or "def " in source.split("figures.")[0][-4:]:
            continue
        if not source.rstrip().endswith(";"):
            continue
        figures += 1
        style = meta["mystnb"]
        assert len(style["image"]["alt"]) > 60
        assert style["figure"]["caption"] and style["figure"]["name"].startswith("fig-")
        assert style["image"]["classes"] == "dark-light"
    assert figures, "a chapter has figures"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_there_are_exercises_with_solutions_apart(path):
    labels = re.findall(r"\{exercise\}.*\n:label: (\S+)", prose(path))
    assert len(labels) >= 3
    solutions = "\n".join(page.read_text() for page in PAGES if page.stem.startswith("solutions"))
    for label in labels:
        assert re.search(rf"\{{solution\}} {label}$", solutions, re.M), f"{label} has no solution"
    assert "{solution}" not in prose(path)
    code = "\n".join(source for kind, source, *_ in cells(path) if kind == "code")
    assert "raise NotImplementedError" in code and "def check_" in code


def typed_decimals(text):
    """Return Markdown's decimals outside code, formulas, glued values, links and options."""
    text = re.sub(r"^```+\{?(?!exercise|admonition|note).*?^```+$", "", text, flags=re.M | re.S)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.S)
    text = re.sub(
        r"\{[a-z:]+\}`[^`]*`|``[^`]*``|`[^`]*`|\$[^$]*\$|\]\([^)]*\)|CC BY[- ][A-Z-]*\s?4\.0",
        "",
        text,
    )
    return re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", text)


def test_the_finder_of_typed_decimals_finds_them():
    assert typed_decimals("it reached 0.93 accuracy") == ["0.93"]
    assert typed_decimals("`0.93` $0.93$ {glue:text}`a:0.93` v1.2.3 CC BY 4.0") == []


@pytest.mark.parametrize("path", NOTEBOOKS + PAGES, ids=lambda p: p.stem)
def test_no_measured_number_is_typed(path):
    text = prose(path) if path.suffix == ".ipynb" else path.read_text()
    assert not typed_decimals(text)


def test_the_coding_exercise_of_chapter_01_can_be_solved_and_failed():
    import torch
    from torch.nn.functional import cross_entropy

    from fl_privacy_lib.models import build

    source = {"check": "", "solution": ""}
    for kind, text, *_ in cells(NOTEBOOKS[0]):
        if kind == "code" and "def check_my_label" in text:
            source["check"] = text.partition("\n\n\ntry:")[0]
    solutions = (ROOT / "book" / "solutions_01.md").read_text()
    source["solution"] = re.search(r"```python\n(def my_label.*?)```", solutions, re.S).group(1)
    generator = torch.Generator().manual_seed(0)
    module = types.ModuleType("exercise")
    module.__dict__.update(
        {
            "torch": torch,
            "cross_entropy": cross_entropy,
            "model": build("attacked_lenet", (1, 28, 28), 10, generator),
            "train": (
                torch.rand(60, 1, 28, 28, generator=generator),
                torch.randint(10, (60,), generator=generator),
            ),
        }
    )
    exec(source["check"] + "\n" + source["solution"], module.__dict__)
    assert module.check_my_label(module.my_label)
    assert not module.check_my_label(lambda gradient: 3)
    assert not module.check_my_label(lambda gradient: int(gradient.sum(1).argmax()))
