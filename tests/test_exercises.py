"""Every coding exercise, on the data that come with the project: solved, unwritten, wrong."""

import ast
import json
import re
import symtable

import pytest

from fl_privacy_lib.chapters import CHAPTERS
from fl_privacy_lib.reproduction.paths import ROOT


def code_cells(kind):
    notebook = json.loads((ROOT / "notebooks" / f"{kind.notebook}.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"]), "parameters" in cell["metadata"].get("tags", [])


def exercises():
    """Return (chapter, name of the reader's function) of every stub."""
    for number, kind in CHAPTERS.items():
        for source, _ in code_cells(kind):
            for name in re.findall(
                r"^def (my_\w+).*?raise NotImplementedError", source, re.M | re.S
            ):
                yield number, name


def names_in(source):
    """Return the names that a statement binds at its top level, and those it takes from there."""
    table = symtable.symtable(source, "statement", "exec")
    binds = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    binds |= {child.get_name() for child in table.get_children()}
    reads, inner = {s.get_name() for s in table.get_symbols() if s.is_referenced()}, [table]
    while inner := [child for scope in inner for child in scope.get_children()]:
        reads |= {s.get_name() for scope in inner for s in scope.get_symbols() if s.is_global()}
    return binds, reads


WHOLE = (ast.Assign, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
"""Statements that bind a name anew, whatever it was before."""


def needed(statements, wanted):
    """Return, in order, the statements that a name needs: a notebook without its slow cells."""
    chosen, wanted = [], set(wanted)
    for source in reversed(statements):
        binds, reads = names_in(source)
        if binds & wanted:
            chosen.append(source)
            if isinstance(ast.parse(source).body[0], WHOLE):
                wanted -= binds  # what was bound before is not seen
            wanted |= reads
    return chosen[::-1]


WRONG = {
    "my_schedule": (lambda rounds: (1.0, 2.0, 0.5),),
    "my_clients": (lambda budget, rate, batch, examples, rounds: batch / rate,),
    "my_margin": (lambda total, dropping, colluders, rounds, failure: colluders,),
    "my_label": (lambda gradient: 3, lambda gradient: int(gradient.sum(1).argmax())),
}
"""Wrong answers of an exercise, beside no answer."""


@pytest.fixture(scope="module")
def namespace_of():
    """Return a function that gives what an exercise's check needs of its notebook, executed."""

    def build(number, name):
        kind = CHAPTERS[number]
        values = kind.of_profile("smoke").model_dump()
        statements, namespace = [], {"__name__": "exercise"}
        for source, parameters in code_cells(kind):
            if parameters:
                exec(source, namespace)
                namespace |= values
                continue
            for node in ast.parse(source).body:
                if not isinstance(node, ast.Try):  # where the reader's function is checked
                    statements.append(ast.get_source_segment(source, node))
        for source in needed(statements, {name, f"check_{name}"}):
            exec(source, namespace)
        return namespace

    return build


@pytest.fixture(autouse=True)
def without_data(monkeypatch):
    monkeypatch.delenv("FL_PRIVACY_DATA", raising=False)


def solution(number, name):
    page = (ROOT / "book" / f"solutions_{number}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    return next(block for block in blocks if f"def {name}(" in block)


@pytest.mark.long
@pytest.mark.parametrize(("number", "name"), list(exercises()), ids=lambda value: value)
def test_an_exercise_is_solved_by_its_solution_and_by_nothing_else(
    number, name, namespace_of, capsys
):
    namespace = namespace_of(number, name)
    check, stub = namespace[f"check_{name}"], namespace[name]
    with pytest.raises(NotImplementedError):
        check(stub)
    capsys.readouterr()
    assert not check(lambda *_: None)
    assert re.search(r"expected.*got|got.*expected", capsys.readouterr().out, re.I | re.S)
    assert not any(check(wrong) for wrong in WRONG.get(name, ()))
    exec(solution(number, name), namespace)
    assert check(namespace[name])


def test_every_chapter_has_an_exercise_in_code():
    assert {number for number, _ in exercises()} == set(CHAPTERS)
