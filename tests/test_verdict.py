"""Only `verdict` decides a status, and no row at less than the published setting ever counts."""

import ast
import collections
import contextlib
import functools
import json
import re

import claim_rows
import claims as claims_page
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from fl_privacy_lib.chapters.adaptive_attacks import reading as adaptive_rows
from fl_privacy_lib.reproduction import claims, comparison, figures, tables
from fl_privacy_lib.reproduction.comparison import compare, measured
from fl_privacy_lib.reproduction.experiments import spending
from fl_privacy_lib.reproduction.paths import MEASURED, RESULTS, ROOT
from fl_privacy_lib.reproduction.published import has_published
from fl_privacy_lib.reproduction.verdict import (
    Outcome,
    Status,
    agrees,
    at_setting,
    decide,
    published_setting,
    trial_of,
)
from tools.summary import with_summary

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KNOWN = {
    table: {column: value for column, value in setting.items() if column != "trial"}
    for table, setting in yaml.safe_load((RESULTS / "settings.yml").read_text()).items()
}
TABLES = [f"{path.parent.name}/{path.stem}" for path in sorted(MEASURED.glob("*/*.csv"))]

# ---- a value -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "value", "unit", "expected"),
    [
        ("0.1549", (0.1550, 0), "dimensionless", True),
        ("0.1549", (0.1551, 0), "dimensionless", False),
        ("0.1549", (0.17, 0.01), "dimensionless", True),
        ("0.95", (0.9601, 0), "fraction", False),
        ("6", (7, 0), "count", True),
        ("6", (7.1, 0), "count", False),
        ("true", (0.09, 0), "boolean", True),
        ("true", (0.1, 0), "boolean", False),
        ("false", (0.9, 0), "boolean", True),
        ("3.2", (4.0, 0), "ratio", True),
        ("3.2", (2.55, 0), "ratio", False),
    ],
)
def test_the_rule_of_a_value(printed, value, unit, expected):
    assert agrees(printed, *value, unit) is expected


@pytest.mark.parametrize(
    ("printed", "mean", "metric", "expected"),
    [
        ("123.354", 123.477, "epsilon", True), ("123.354", 123.478, "epsilon", False),
        ("0.82", 0.8299, "epsilon", True), ("0.823", 0.8241, "target_epsilon", False),
        ("9646", 9647, "iterations", True), ("9646", 9648, "iterations", False),
        ("95", 95, "rounds", True), ("95", 96, "rounds", False),
    ],
)  # fmt: skip
def test_the_rule_of_a_computed_value(printed, mean, metric, expected):
    unit = "dimensionless" if "epsilon" in metric else "count"
    assert agrees(printed, mean, 0.0, unit, metric) is expected


@given(st.floats(0, 1), st.floats(0, 0.2), st.floats(0, 0.2))
def test_more_spread_never_loses_a_value(mean, std, more):
    if agrees("0.50", mean, std, "dimensionless"):
        assert agrees("0.50", mean, std + more, "dimensionless")


# ---- the decision --------------------------------------------------------------------------------

HELD = st.lists(st.sampled_from([True, False, None]), max_size=4).map(
    lambda held: tuple(Outcome(h) for h in held)
)
COUNTER = st.lists(st.booleans(), max_size=4).map(tuple)


@given(st.booleans(), st.booleans(), HELD, COUNTER, st.sampled_from(["", "its rate is lost"]))
def test_what_counts_was_recorded_at_the_setting_and_compared(recorded, full, held, counter, lost):
    outcome = decide(recorded, full, held, counter, lost)
    counts = set(Status) - {Status.NOT_RUN, Status.REDUCED_SETTING}
    assert (outcome.status in counts) == bool(recorded and full and (held or lost))
    assert (outcome.status is Status.REFUTED) == bool(recorded and full and held and any(counter))
    results = [o.held for o in held]
    if outcome.status is Status.REPRODUCED:
        assert outcome.held == outcome.cells == len(held) and all(results)
    if outcome.status is Status.NOT_REPRODUCED:
        assert outcome.held < outcome.cells == len(held) and False in results and not lost
    if outcome.status is Status.UNDECIDED:
        assert lost or (None in results and False not in results)


def test_each_status_can_come_out():
    held, failed, open_ = Outcome(True), Outcome(False), Outcome(None, why="one seed")
    beyond = Outcome(False, exceeded=True)
    outcomes = {
        Status.NOT_RUN: [decide(False), decide(True, True)],
        Status.REDUCED_SETTING: [decide(True, False, (held,))],
        Status.REPRODUCED: [decide(True, True, (held, held)),
                            decide(True, True, (held,), lost="x")],
        Status.EXCEEDED: [decide(True, True, (held, beyond))],
        Status.NOT_REPRODUCED: [decide(True, True, (held, failed)),
                                decide(True, True, (open_, failed, beyond))],
        Status.UNDECIDED: [decide(True, True, (held, open_)), decide(True, True, lost="x"),
                           decide(True, True, (beyond, open_)),
                           decide(True, True, (held, failed), lost="x")],
        Status.REFUTED: [decide(True, True, (held,), (False, True))],
    }  # fmt: skip
    assert set(outcomes) == set(Status)
    for status, cases in outcomes.items():
        assert {case.status for case in cases} == {status}
    assert decide(True, True, (held, open_)).note == "one seed"


def test_every_status_has_its_badge():
    css = (ROOT / "book" / "_static" / "book.css").read_text()
    for status in Status:
        assert f".status-{status.style}" in css
        badge = tables.Badge(status, "text")
        assert (
            f'<span class="status status-{status.style}">text</span>'
            in tables.Table(["a"], [[badge]]).html()
        )


# ---- the published setting -----------------------------------------------------------------------

ROWS = pd.DataFrame(
    {
        "dataset": ["mnist", "mnist", "lfw", "digits"],
        "method": ["a", "b", "b", "a"],
        "victims": ["20", "19", "20", "100"],
        "seeds": ["5", "5", "5", "1"],
        "batch_size": ["5", "5", "5", "5"],
    }
)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, [1, 1, 1, 1]), (None, [0, 0, 0, 0]),
        ({"method": "a"}, [1, 0, 0, 1]), ({"method": ["a", "b"]}, [1, 1, 1, 1]),
        ({"victims": {"at_least": 100}}, [1, 0, 1, 1]),
        ({"batch_size": {"at_least": 5}}, [1, 1, 1, 1]),
        ({"batch_size": {"mnist": 5, "lfw": 3}}, [1, 1, 0, 0]),
        ({"batch_size": {"by": "method", "a": 5}}, [1, 0, 0, 1]),
        ({"rounds": 3}, [0, 0, 0, 0]), ({"rounds": {"at_least": 3}}, [0, 0, 0, 0]),
    ],
)  # fmt: skip
def test_which_rows_ran_at_a_setting(setting, expected):
    assert at_setting(ROWS, setting).tolist() == [bool(e) for e in expected]


def test_every_table_with_a_claim_or_a_published_twin_has_a_setting():
    claimed = {entry["table"] for entry in claims.load_claims() if "table" in entry}
    assert set(KNOWN) == claimed | {table for table in TABLES if has_published(table)}
    for table, setting in KNOWN.items():
        frame = measured(table)  # a setting may be older than the first row
        assert setting and (frame.empty or set(setting) <= set(frame)), table


SIZES = ("victims", "rounds", "folds", "repetitions", "draws", "examples", "delta")
FREE = {
    "fedsel": "rounds",
    "fed_cdp/utility": "rounds",
    "audit/statements": "delta",
    "fedsel/statements": "delta",
}


def test_what_could_be_reduced_is_named():
    """A table's sizes stand in its setting, but for FedSel's (from b) and those of single cases."""
    for table, setting in KNOWN.items():
        free = {FREE.get(table), FREE.get(table.partition("/")[0])}
        assert set(SIZES) & set(measured(table)) <= set(setting) | free, table


def test_without_a_known_setting_nothing_counts(monkeypatch):
    assert published_setting("no/table") is None
    for module in (claims, comparison):
        monkeypatch.setattr(module, "published_setting", lambda table: None)
    outcomes = [claims.verdict(entry) for entry in claims.load_claims()]
    assert {v.status for v in outcomes} == {Status.NOT_RUN, Status.REDUCED_SETTING}
    assert {v.note for v in outcomes if v.status is Status.REDUCED_SETTING} == {
        "no published setting is known"
    }


# ---- no reduced row counts: pages, badges, ledger, README ----------------------------------------

DRAWS = (
    r"beside\(|compare\(|claims_table\(|claims_summary|table_3\(\)|accounted\(|\bratios\(|crossed\("
)


@functools.cache
def code_of(path):
    """Return the page's imports and definitions, and the cells that draw a table with statuses."""
    sources = [
        "".join(c["source"])
        for c in json.loads(path.read_text())["cells"]
        if c["cell_type"] == "code"
    ]
    defined = []
    for node in (node for source in sources for node in ast.parse(source).body):
        # constants, but none that rests on this run's parameters
        named = isinstance(node, ast.Assign) and (
            (
                isinstance(node.value, ast.List | ast.Tuple)
                and not any(isinstance(n, ast.Call | ast.Name) for n in ast.walk(node.value))
            )
            or (
                ast.unparse(node.targets[0]).isupper()
                and not re.search(r"settings|measured\(|_rates\(", ast.unparse(node.value))
            )
        )
        if (
            isinstance(node, ast.Import | ast.ImportFrom)
            or named
            or isinstance(node, ast.FunctionDef)
        ):
            if "tensorflow" not in ast.unparse(node) and all(
                ast.unparse(default).isupper()
                for default in getattr(node, "args", ast.arguments(defaults=[])).defaults
            ):
                defined.append(compile(ast.unparse(node), path.name, "exec"))
    draws = [source for source in sources if re.search(DRAWS, source)]
    # what ties this run to the records cannot hold where nothing ran
    tied = re.compile(r"^assert .*this run and the records.*\n", re.M)
    draws = [tied.sub("", source) for source in draws]
    return defined, [(source, compile(source, path.name, "exec")) for source in draws]


@pytest.fixture
def pages(monkeypatch):
    """Return what draws the tables of all pages from a folder of records, and what it drew."""
    # takes minutes, and decides nothing
    monkeypatch.setattr(spending, "epsilons", lambda point: "—")
    monkeypatch.setattr(figures, "panels", lambda *_, **__: Figure())
    drawn = []
    construct = tables.Table.__init__

    def noted(self, columns, rows):
        construct(self, columns, rows)
        drawn.append(self)

    monkeypatch.setattr(tables.Table, "__init__", noted)

    readers = [
        measured,
        claims.verdict,
        adaptive_rows.table_3,
        adaptive_rows.table_3_frame,
    ]

    def draw(folder, only=""):
        drawn.clear()
        for function in readers:
            monkeypatch.setattr(function, "__defaults__", (*function.__defaults__[:-1], folder))
        ledger = {entry["id"]: entry for entry in claims.load_claims()}
        once = functools.cache(lambda name: claims.verdict(ledger[name]))
        for module in (tables, claim_rows):  # all ask for the same verdicts
            monkeypatch.setattr(module, "verdict", lambda entry: once(entry["id"]))
        glued = {}
        for path in NOTEBOOKS:
            definitions, cells = code_of(path)
            page = {"results": {}, "live": collections.defaultdict(dict), "B": 5, "sure": ()}
            for statement in definitions:
                with contextlib.suppress(NameError):  # a constant that rests on this run
                    exec(statement, page)
            page["glue"] = lambda name, text, path=path: glued.update({(path.stem[:2], name): text})
            for source, cell in cells:
                shows = f'"{only}"' in source or (
                    only in adaptive_rows.SOURCES and "table_3()" in source
                )
                if not only or (shows and "claims_table" not in source):
                    exec(cell, page)
        return list(drawn), glued

    return draw


def counted(drawn):
    """Return how often each status stands on a badge, in a table's HTML."""
    return collections.Counter(
        re.findall(r'class="status status-([a-z-]+)"', "".join(t.html() for t in drawn))
    )


def other(allowed):
    """Return a value that no setting allows, and that is a small number."""
    return next(value for value in ("1", "2", "3") if value not in allowed)


def first_column(table):
    """Return the first column of a table's setting apart from its data, else no column's name."""
    return next((c for c in KNOWN.get(table, ()) if c != "dataset"), "none")


def reduced(table, folder, column=None):
    """Write a copy of the records in which one table's rows, or all, ran at less in one column.

    So did those that the table reads in another chapter's record.
    """
    chosen = {table, *(trial_of(table).get("also", {}) if table else {})}
    for path in MEASURED.glob("*/*.csv"):
        name = f"{path.parent.name}/{path.stem}"
        target = folder / f"{name}.csv"
        target.parent.mkdir(parents=True, exist_ok=True)
        if table is not None and name not in chosen:
            target.write_bytes(path.read_bytes())
            continue
        lowered = column or first_column(name)
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
        if lowered == "dataset" or lowered not in rows:
            rows = rows.assign(dataset="digits") if lowered == "dataset" else rows
        elif lowered == "victims":
            rows = rows.assign(victims="1", seeds="1")
        else:
            rows[lowered] = other(set(rows[lowered]))
        rows.to_csv(target, index=False)


CASES = [(t, c) for t in TABLES if has_published(t) for c in dict.fromkeys([*KNOWN[t], "dataset"])]


@pytest.mark.parametrize(("table", "column"), CASES, ids=lambda value: value)
def test_rows_of_a_table_that_ran_at_less_are_reproduced_nowhere(table, column, tmp_path):
    """Values and claims: each column of each published table's setting, and other data."""
    reduced(table, tmp_path, column)
    for metric in ("", "accuracy"):
        compared = compare(table, measured(table, tmp_path), metric)
        statuses = {claims.judge([c]).status for c in compared}
        assert statuses <= {Status.REDUCED_SETTING, Status.NOT_RUN}
    for entry in claims.load_claims():
        if entry.get("table") == table:
            status = claims.verdict(entry, tmp_path).status
            assert status in {Status.REDUCED_SETTING, Status.NOT_RUN}, entry["id"]


@pytest.mark.parametrize("table", [t for t in KNOWN if not has_published(t)])
def test_so_are_claims_about_our_own_tables(table, tmp_path):
    for column in dict.fromkeys([*KNOWN[table], *({"dataset"} & set(measured(table)))]):
        reduced(table, tmp_path, column)
        for entry in claims.load_claims():
            if entry.get("table") == table:
                status = claims.verdict(entry, tmp_path).status
                assert status in {Status.REDUCED_SETTING, Status.NOT_RUN}, (entry["id"], column)


def test_with_the_records_as_they_are_the_pages_show_every_status(pages):
    drawn, glued = pages(MEASURED)
    assert {style for style, n in counted(drawn).items()} == {status.style for status in Status}
    assert (
        "reproduced" in glued["03", "claims_summary"]
        and glued["05", "by_reading"].count(" of ") == 3
    )
    published = {table for table in TABLES if has_published(table)}
    sources = "".join(source for path in NOTEBOOKS for source, _ in code_of(path)[1])
    shown = {t for t in published if f'"{t}"' in sources}
    # Table 3 is drawn whole by chapter 02's own module, from its two records; chapter 09 draws the
    # panels of Table III in one table, without a status
    panels = {f"compensation/table_3{panel}" for panel in "abce"}
    assert published - shown - panels == {"fed_alpha_cdp/table_3"}


def test_no_page_ledger_or_readme_counts_a_reduced_row(pages, tmp_path):
    """All tables at less at once: nothing that a reader sees says that anything came out."""
    reduced(None, tmp_path)
    drawn, glued = pages(tmp_path)
    assert set(counted(drawn)) == {Status.REDUCED_SETTING.style, Status.NOT_RUN.style}
    assert len(drawn) > 25
    assert all(
        word not in str(text) for text in glued.values() for word in ("reproduced", "refuted")
    )
    assert set(re.findall(r"(\d+) of", glued["05", "by_reading"])) == {"0"}
    columns, last = tables.summary_table().columns, tables.summary_table().rows[-1]
    counts = dict(zip(columns, last, strict=True))
    assert [counts[s] for s in (Status.REPRODUCED, Status.NOT_REPRODUCED, Status.REFUTED)] == [
        0,
        0,
        0,
    ]
    assert with_summary((ROOT / "README.md").read_text()).count("| 0 | 0 |") >= 5
    assert set(re.findall(r'class="status status-([a-z-]+)"', claims_page.whole_page())) == {
        "reduced",
        "not-run",
    }


@pytest.mark.long
@pytest.mark.parametrize("table", [t for t in TABLES if has_published(t)])
def test_a_page_s_badges_go_with_one_table(table, pages, tmp_path):
    reduced(table, tmp_path)
    before, after = (counted(pages(folder, table)[0]) for folder in (MEASURED, tmp_path))
    judged = [
        sum(badges[s.style] for s in (Status.REPRODUCED, Status.NOT_REPRODUCED, Status.UNDECIDED))
        for badges in (before, after)
    ]
    assert judged[1] < judged[0] or not judged[0]  # all of it at less already, or another reading
    assert after["reduced"] > before["reduced"] or not judged[0]
    apart = ("dynamic_parameters/table_8", "fed_alpha_cdp/table_8", "fed_alpha_cdp/table_11",
             "compensation/table_2")  # fmt: skip
    assert judged[1] == 0 or table in (*adaptive_rows.SOURCES, *apart), (
        "but for Table 3's other records; accuracies of Tables VIII, 8, 11 and II stand apart"
    )


def test_a_row_is_undecided_where_its_table_s_claim_says_what_is_left_out(monkeypatch):
    columns = {"method": lambda row: row["method"]}
    by = ("dataset", "attack", "method")

    def statuses(table):
        badges = [row[-1] for row in tables.beside(table, columns, by).rows]
        return {badge.status for badge in badges if isinstance(badge, tables.Badge)}

    entries = {entry.get("table"): entry for entry in claims.load_claims() if "lost" in entry}
    for table in ("fed_cdp/table_7", "fed_cdp/table_4", "compensation/table_2"):
        assert table in entries
        found = statuses(table)
        assert Status.UNDECIDED in found
        assert found <= {Status.REPRODUCED, Status.UNDECIDED, Status.REDUCED_SETTING}
    monkeypatch.setattr(tables, "load_claims", list)  # a ledger that leaves nothing out
    assert all(
        Status.NOT_REPRODUCED in statuses(table)
        for table in ("fed_cdp/table_7", "compensation/table_2")
    )


# ---- nobody else decides -------------------------------------------------------------------------

WORDS = re.compile(r"^(?:not[ _])?reproduced\b|^reduced setting\b|^refuted\b|^not run\b")
ALLOWED = {
    # cells of tables that carry no status
    "05_fed_cdp.ipynb": {"not run: make record NB=05", "not run"},
    "06_dynamic_parameters.ipynb": {"not run: make record NB=06"},
    "07_fed_alpha_cdp.ipynb": {"not run: make record NB=07", "not run"},
    "09_compensation.ipynb": {"not run: make record NB=09"},
    "10_what_works.ipynb": {"not run: make record NB=10"},
}


def literals(text):
    """Return the string literals of Python source: parts of f-strings, but no docstrings."""
    tree = ast.parse(text)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docstrings)
    return {node.value for node in nodes if isinstance(node.value, str)}


def test_literals_are_found():
    assert literals('"""reproduced"""\nx = f"not reproduced: {y}"\nz = ["refuted"]') >= {
        "not reproduced: ",
        "refuted",
    }
    assert "reproduced" not in literals('"""reproduced"""\n')


def test_no_other_module_and_no_notebook_chooses_a_status():
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in (ROOT / "fl_privacy_lib").rglob("*.py")
    }
    del sources["fl_privacy_lib/reproduction/verdict.py"]
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        sources[path.name] = "\n".join(
            "".join(c["source"]) for c in cells if c["cell_type"] == "code"
        )
    chosen = {
        name: {t for t in literals(text) if WORDS.search(t)} for name, text in sources.items()
    }
    assert {name: words for name, words in chosen.items() if words} == ALLOWED


def test_only_verdict_builds_a_verdict():
    for path in (ROOT / "fl_privacy_lib").rglob("*.py"):
        calls = {
            ast.unparse(n.func)
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Call)
        }
        assert "Verdict" not in calls or path.name == "verdict.py", path
