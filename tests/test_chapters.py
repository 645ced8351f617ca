"""The chapter contract: parts in order, figures described, no typed number, fallible exercises."""

import ast
import json
import re

import pytest
from api import found

from fl_privacy_lib.chapters import CHAPTERS
from fl_privacy_lib.reproduction.paths import ROOT

NOTEBOOKS = [ROOT / "notebooks" / f"{kind.notebook}.ipynb" for kind in CHAPTERS.values()]
PARTS = [
    "Objectives",
    "Prerequisites",
    "Time and hardware",
    "…",
    "Published beside measured",
    "What holds, what does not",
    "Differences from the paper",
    "Exercises",
    "So, what to do?",
    "Further reading",
]
PAGES = sorted((ROOT / "book").glob("*.md"))


def cells(path):
    for cell in json.loads(path.read_text())["cells"]:
        yield cell["cell_type"], "".join(cell["source"]), cell["metadata"], cell.get("outputs", [])


def prose(path):
    return "\n\n".join(source for kind, source, *_ in cells(path) if kind == "markdown")


def chapter_and_appendix(path):
    """Return a notebook's prose in front of its appendix, and that of the appendix."""
    chapter, mark, appendix = prose(path).partition("\n\n# Appendix")
    assert mark, f"{path.name} has no appendix"
    return chapter, mark.strip() + appendix


def test_every_notebook_is_a_chapter():
    assert sorted((ROOT / "notebooks").glob("*.ipynb")) == sorted(NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_parts_stand_in_order(path):
    text, _ = chapter_and_appendix(path)
    titles = re.findall(r"^## (.+)$", text, re.M)
    body = PARTS.index("…")
    assert titles[:body] == PARTS[:body]
    assert titles[body - len(PARTS) + 1 :] == PARTS[body + 1 :]
    assert len(titles) > len(PARTS) - 1, "a chapter has a body"
    advice = text.partition("## So, what to do?")[2].partition("## Further reading")[0]
    assert path.stem == "10_what_works" or "{doc}`10_what_works`" in advice
    first_screen = text.split("## ")[0]
    assert re.match(rf"# {int(path.stem[:2])}\. ", text)
    assert "{admonition} What this chapter reproduces" in first_screen
    for line in ("**Status** {glue:text}", "**Study time**", f"make lab NB={path.stem[:2]}"):
        assert line in first_screen, line


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_picture_stands_on_the_first_screen(path):
    before = []
    for kind, source, meta, _ in cells(path):
        if kind == "markdown" and "## Objectives" in source:
            break
        before.append("figure" in meta.get("mystnb", {}))
    assert any(before)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_source_is_clean(path):
    kinds = list(cells(path))
    assert not any(outputs for *_, outputs in kinds)
    tagged = [i for i, (_, _, meta, _) in enumerate(kinds) if "parameters" in meta.get("tags", [])]
    assert len(tagged) == 1
    checked = next(source for kind, source, *_ in kinds[tagged[0] + 1 :] if kind == "code")
    assert ".checked(" in checked, "the first code cell after the parameters validates them"
    names = [cell["id"] for cell in json.loads(path.read_text())["cells"]]
    assert len(set(names)) == len(names), "two cells have one id, which nbformat would change"


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


SKIPPED = r"^(`{3,}|:{3,})\{(?!admonition|exercise|note|prf|solution|dropdown|tip|warning).*?^\1$"


def without_code(text):
    """Return a page's Markdown without code and without directives other than those with prose.

    Only a block with a language is code: a bare fence may be the end of a directive.
    """
    text = re.sub(SKIPPED, "", text, flags=re.M | re.S)
    return re.sub(r"^```(?:python|bash|text|console)$.*?^```$", "", text, flags=re.M | re.S)


def typed_decimals(text):
    """Return Markdown's decimals outside code, formulas, glued values, links and options."""
    text = re.sub(r"^`{3,}.*$", "", without_code(text), flags=re.M)
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
    assert typed_decimals("```{solution} ex-a\n0.93\n```\n\n```python\n0.94\n```\n0.95") == [
        "0.93",
        "0.95",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS + PAGES, ids=lambda p: p.stem)
def test_no_measured_number_is_typed(path):
    text = prose(path) if path.suffix == ".ipynb" else path.read_text()
    assert not typed_decimals(text)


def sentences(text):
    """Return the sentences of a page's Markdown, without tables, code and directives.

    A glued value counts as one word, and so does a formula.
    """
    text = without_code(text)
    marks = re.compile(r"\s*(\||#|:[a-z-]+:|`{3,}|:{3,}|\(.*\)=$)")
    text = "\n".join("" if marks.match(line) else line for line in text.splitlines())
    text = re.sub(r"\$\$.*?\$\$", " Formula ", text, flags=re.S)
    text = re.sub(r"\$[^$]*\$", "Formula", text)
    text = re.sub(r"\{glue:text\}`[^`]*`", "Value", text)
    roles = re.compile(r"\{[a-z:]+\}`([^`<]*?)(\s*<[^`]*>)?`")
    text = roles.sub(lambda role: role[1][:1].upper() + role[1][1:], text)
    text = re.sub(r"``[^`]*``|`[^`]*`", "Code", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[*+-]|\d+\.) )", text):
        yield from re.split(r"(?<=[.!?])[\"')*_]*\s+(?=[^a-z])", " ".join(paragraph.split()))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_code_that_is_in_sight_fits_a_page(path):
    out_of_sight = ("hide", "remove", "parameters")
    shown = [
        source
        for kind, source, about, _ in cells(path)
        if kind == "code" and not any(t.startswith(out_of_sight) for t in about.get("tags", []))
    ]
    assert shown and [line for s in shown for line in s.splitlines() if len(line) > 100] == []


def too_long(text, limit=35):
    return [s for s in sentences(text) if len(s.split()) > limit]


def test_the_finder_of_long_sentences_finds_them():
    assert too_long("A word " * 36 + "ends. And a short one.")
    assert not too_long("A word. " * 40)
    assert not too_long("| a | table |\n" * 40)
    inside = "```{solution} ex-a\n:label: sol-a\n\n" + "A word " * 36 + "ends.\n```\n"
    assert len(too_long(inside * 2 + "```python\n" + "code " * 40 + "\n```\n")) == 2


@pytest.mark.parametrize("path", NOTEBOOKS + PAGES, ids=lambda p: p.stem)
def test_no_sentence_is_longer_than_35_words(path):
    assert too_long(prose(path) if path.suffix == ".ipynb" else path.read_text()) == []


def glued_in_loops(source):
    """Return the names that code glues in a loop, where the strict build meets them twice."""
    loops = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.For | ast.While)]
    calls = [n for loop in loops for n in ast.walk(loop) if isinstance(n, ast.Call)]
    names = [call.args[0] for call in calls if getattr(call.func, "id", "") == "glue"]
    return [name.value for name in names if isinstance(name, ast.Constant)]


def test_the_finder_of_names_glued_in_loops_finds_them():
    code = "glue('a', 1)\nfor x in y:\n    glue('b', x)\n    glue(f'{x}', 1)"
    assert glued_in_loops(code) == ["b"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_no_value_is_glued_in_a_loop(path):
    code = [source for kind, source, *_ in cells(path) if kind == "code"]
    assert not [name for source in code for name in glued_in_loops(source)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_chapter_has_at_most_4500_words_of_prose(path):
    assert len(chapter_and_appendix(path)[0].split()) <= 4500


IDENTIFIERS = re.compile(
    r"(?<![\w/])(?:fed_(?:sdp|cdp)\w*|(?:mask|clip|noise)_aware|non_private|median_clip|dynamic_parameters"
    r"|pm_unscaled|adult_(?:z|123)|cancer_z|as_coded|not_applicable|layer_cosine)\b(?!/)"
)
"""Names of the code that a reader should never meet in a sentence, but in the path of a file."""


@pytest.mark.parametrize("path", NOTEBOOKS + PAGES, ids=lambda p: p.stem)
def test_prose_has_no_raw_identifier(path):
    text = prose(path) if path.suffix == ".ipynb" else path.read_text()
    text = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.M | re.S)
    text = re.sub(r"``[^`]*``|`[^`]*`|\]\([^)]*\)", "", text)
    assert IDENTIFIERS.findall(text) == []


@pytest.mark.parametrize("path", NOTEBOOKS + PAGES, ids=lambda p: p.stem)
def test_every_link_to_the_code_leads_somewhere(path):
    text = prose(path) if path.suffix == ".ipynb" else path.read_text()
    for name in re.findall(r"\{source\}`(?:[^`<]*<)?([\w.]+)>?`", text):
        assert found(name), name  # an AttributeError names the code that is not there
