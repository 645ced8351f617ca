"""The ledger: its form, joined cells, and verdicts that follow from rows and can fail."""

from html import escape

import pandas as pd
import pytest
import yaml

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters import CHAPTERS
from fl_privacy_lib.metrics import wilson_interval
from fl_privacy_lib.reproduction import claims
from fl_privacy_lib.reproduction.book import claims_page
from fl_privacy_lib.reproduction.claims import load_claims
from fl_privacy_lib.reproduction.paths import PUBLISHED, ROOT
from fl_privacy_lib.reproduction.published import load_published
from fl_privacy_lib.reproduction.summary import with_summary
from fl_privacy_lib.reproduction.tables import summary_table
from fl_privacy_lib.reproduction.verdict import Status


def entry(**changes):
    return {
        "id": "t",
        "paper": "fed_cdp",
        "where": "-",
        "kind": "claim",
        "chapter": "01",
        "statement": "-",
        "table": "fed_cdp/table_7",
        "rows": {"arm": "fed_cdp_example"},
        "test": {"check": "rate_below", "bound": 0.1},
    } | changes


def write_rows(folder, *rows):
    base = {
        "dataset": "mnist",
        "threat_type": "type_2",
        "method": "fed_cdp",
        "arm": "fed_cdp_example",
        "attacker": "naive",
        "victims": "20",
        "seeds": "5",
        "max_iterations": "300",
        "start": "patterned",
        "optimiser": "lbfgs",
        "metric": "attack_success_rate",
        "mean": 0.0,
        "std": 0.0,
        "n": "100",
        "seconds": 1,
    }
    path = folder / "fed_cdp" / "table_7.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = [base | row for row in rows]
    table = [{"batch_size": {"mnist": "5", "lfw": "3"}[row["dataset"]]} | row for row in table]
    pd.DataFrame(table).to_csv(path, index=False)


def test_verdicts_follow_from_the_rows(tmp_path):
    assert claims.verdict(entry(), tmp_path).status == "not run"
    write_rows(tmp_path, {})
    assert str(claims.verdict(entry(), tmp_path)) == "reproduced: holds on 1 of 1 recorded cells"
    write_rows(tmp_path, {}, {"dataset": "lfw", "mean": 0.2})
    assert (
        str(claims.verdict(entry(), tmp_path)) == "not reproduced: holds on 1 of 2 recorded cells"
    )
    write_rows(tmp_path, {"victims": "19"})
    assert claims.verdict(entry(), tmp_path).status == "reduced setting"
    write_rows(tmp_path, {"max_iterations": "30"})
    assert claims.verdict(entry(), tmp_path).status == "reduced setting"


def test_a_rate_near_the_bound_is_not_below_it(tmp_path):
    write_rows(tmp_path, {"mean": 0.05})  # the interval reaches above 0.1
    assert wilson_interval(5, 100)[1] > 0.1
    assert claims.verdict(entry(), tmp_path).status == "not reproduced"


def test_refuted_needs_a_counter_example_in_the_rows(tmp_path):
    refutation = {
        "argument": "because", "rows": {"arm": "fed_cdp_example", "attacker": "clip_aware"},
        "test": {"check": "rate_above", "bound": 0.5},
    }  # fmt: skip
    write_rows(tmp_path, {}, {"attacker": "clip_aware", "mean": 0.3})
    assert claims.verdict(entry(refutation=refutation), tmp_path).status == "not reproduced"
    write_rows(tmp_path, {}, {"attacker": "clip_aware", "mean": 0.9})
    outcome = claims.verdict(entry(refutation=refutation), tmp_path)
    assert outcome.status == "refuted" and outcome.note == "because"


def test_fewer_iterations_is_compared_data_set_by_data_set(tmp_path):
    test = {
        "check": "fewer_iterations",
        "rows": {"threat_type": "type_2"},
        "than": {"threat_type": "type_0_1"},
    }
    needed = {"metric": "attack_iterations"}
    rows = [needed | {"mean": 5.0}, needed | {"mean": 9.0, "threat_type": "type_0_1"}]
    write_rows(tmp_path, *rows)
    assert claims.verdict(entry(test=test), tmp_path).status == "reproduced"
    rows[0]["mean"] = 10.0
    write_rows(tmp_path, *rows)
    assert claims.verdict(entry(test=test), tmp_path).status == "not reproduced"
    write_rows(tmp_path, rows[0])
    assert claims.verdict(entry(test=test), tmp_path).status == "not run"


def test_ahead_compares_equal_cells_in_standard_errors(tmp_path):
    test = {
        "check": "ahead",
        "metric": "accuracy",
        "rows": {"method": "new"},
        "than": {"method": "old"},
        "on": ["dataset", "threat_type"],
        "errors": 2,
    }
    base = {"metric": "accuracy", "n": "25"}
    old, new = (
        base | {"method": "old", "mean": 0.7, "std": 0.03},
        base | {"method": "new", "std": 0.04},
    )
    alone = new | {"dataset": "lfw", "mean": 0.9}  # nothing to compare with
    for mean, errors, by, status in (  # the difference's standard error is 0.05 / 5 = 0.01
        (0.7201, 2, 0, "reproduced"), (0.7199, 2, 0, "not reproduced"),
        (0.6801, -2, 0, "reproduced"), (0.6799, -2, 0, "not reproduced"),
        (0.6901, 0, -0.01, "reproduced"), (0.7299, 2, 0.01, "not reproduced"),
    ):  # fmt: skip
        write_rows(tmp_path, old, new | {"mean": mean}, alone)
        outcome = claims.verdict(entry(rows={}, test=test | {"errors": errors, "by": by}), tmp_path)
        assert (outcome.status, outcome.cells) == (status, 1)
    write_rows(tmp_path, new | {"mean": 0.9})
    assert claims.verdict(entry(rows={}, test=test), tmp_path).status == "not run"


def test_a_claim_about_all_data_sets_says_which_are_recorded(tmp_path):
    row = {
        "dataset": "cancer",
        "method": "non_private",
        "rounds": 3,
        "local_iterations": 100,
        "batch_size": 4,
        "clients": 1000,
        "participants": 100,
        "metric": "accuracy",
        "mean": 0.9,
        "std": 0.0,
        "n": "1",
        "seeds": 1,
    }
    path = tmp_path / "fed_cdp" / "table_1.csv"
    path.parent.mkdir(parents=True)
    pd.DataFrame([row]).to_csv(path, index=False)
    claim = {
        "table": "fed_cdp/table_1",
        "test": {"check": "shown", "metric": "accuracy", "bound": 0.5},
    }
    assert claims.verdict(claim, tmp_path).note == "1 of 5 data sets: cancer"
    assert claims.verdict(claim | {"rows": {"dataset": "cancer"}}, tmp_path).note == ""


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ({"check": "rate_below", "bound": 0.1}, "success rate below 0.1, with its interval"),
        ({"check": "ahead", "metric": "mse", "rows": {"arm": ["a", "b_c"]}, "than": {"arm": "d"},
          "errors": 2},
         "mse of a or b c above that of d by 2 standard errors"),
        ({"check": "ahead", "metric": "accuracy", "rows": {"x": 1}, "than": {"x": 0}, "errors": 0,
          "by": -0.01},
         "accuracy of 1 above that of 0 less 0.01"),
        ({"check": "best", "metric": "accuracy", "over": "clip", "at": [2, 4]},
         "accuracy highest at clip = 2 or 4"),
    ],
)  # fmt: skip
def test_a_test_can_be_read(test, words):
    assert claims.in_words(test) == words


def test_every_test_in_the_ledger_has_words():
    for entry in claims.load_claims():
        words = claims.in_words(entry["test"]) if "test" in entry else "—"
        assert words and "None" not in words, (entry["id"], words)


def test_a_cost_is_compared_as_a_ratio(tmp_path):
    ratio, base = (
        "ratio_to_non_private",
        {"engine": "as_written", "repetitions": 7, "std": 0.0, "n": "5", "seeds": 1},
    )
    rows = [
        base
        | {"dataset": d, "batch_size": b, "method": m, "metric": metric, "mean": mean, "seconds": 1}
        for d, b, m, metric, mean in (
            ("mnist", 5, "non_private", ratio, 1.0),
            ("mnist", 5, "fed_cdp", ratio, 3.0),
            ("lfw", 3, "fed_cdp", ratio, 2.0),
            ("lfw", 3, "fed_cdp", "ratio_to_fed_cdp", 1.0),
        )
    ]
    path = tmp_path / "fed_cdp" / "table_3.csv"
    path.parent.mkdir(parents=True)
    pd.DataFrame(rows).to_csv(path, index=False)
    compared = claims.compare("fed_cdp/table_3", claims.measured("fed_cdp/table_3", tmp_path))
    mnist, lfw = (c for c in compared if c.cell)
    assert (mnist.cell["dataset"], mnist.cell["method"], mnist.cell[ratio]) == (
        "mnist",
        "fed_cdp",
        3.0,
    )
    assert [float(c.printed["value"]) for c in (mnist, lfw)] == pytest.approx(
        [22.4 / 6.8, 112.4 / 30.9]
    )
    cost = entry(table="fed_cdp/table_3", rows={"engine": "as_written"}, test={"check": "ratio"})
    assert str(claims.verdict(cost, tmp_path)) == "not reproduced: holds on 1 of 2 recorded cells"
    for bound, held in ((2.5, 1), (3.0, 2), (1.9, 0)):
        most = {"check": "at_most", "metric": "ratio_to_non_private", "bound": bound}
        assert (
            claims.verdict(cost | {"rows": {"method": "fed_cdp"}, "test": most}, tmp_path).held
            == held
        )


def test_values_join_the_published_cells(tmp_path):
    rows = [
        {
            "method": "non_private",
            "arm": "non_private",
            "metric": "attack_success_rate",
            "mean": 1.0,
        },
        {"method": "non_private", "arm": "non_private", "metric": "mse", "mean": 0.0008},
        {"method": "non_private", "arm": "non_private", "metric": "attack_iterations", "mean": 9.0},
    ]
    write_rows(tmp_path, *rows)
    compared = claims.compare("fed_cdp/table_7", claims.measured("fed_cdp/table_7", tmp_path))
    assert {(c.printed["metric"], c.printed["value"], c.held) for c in compared if c.cell} == {
        ("resilient", "false", True), ("rmse", "0.0008", True), ("attack_iterations", "7", False),
    }  # fmt: skip
    assert len(compared) == len(load_published("fed_cdp/table_7")), "the others stand alone"
    only = claims.compare("fed_cdp/table_7", claims.measured("fed_cdp/table_7", tmp_path), "rmse")
    assert {c.printed["metric"] for c in only} == {"rmse"}


def test_a_cell_without_a_published_value_stands_alone(tmp_path):
    write_rows(tmp_path, {"threat_type": "type_9"})
    frame = claims.measured("fed_cdp/table_7", tmp_path)
    assert all(c.cell is None for c in claims.compare("fed_cdp/table_7", frame))
    *_, last = claims.compare("fed_cdp/table_7", frame, unpublished=True)
    assert last.printed is None and last.cell["threat_type"] == "type_9"


def test_the_ledger_is_well_formed_and_every_status_is_a_known_word():
    entries = claims.load_claims()
    assert entries
    for claim in entries:
        assert claims.verdict(claim).status in Status
        for field in ("id", "paper", "where", "chapter", "statement"):
            assert claim[field]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("- {id: a, kind: claim, colour: red, why: x}", "colour"),
        ("- {id: a, kind: claim, why: x}\n- {id: a, kind: claim, why: x}", "twice"),
        ("- {id: a, kind: claim}", "neither a test"),
        ("- {id: a, kind: claim, test: {check: vaules}}", "values"),
    ],
)
def test_a_malformed_ledger_gets_one_sentence(tmp_path, text, word):
    path = tmp_path / "claims.yml"
    path.write_text(text)
    with pytest.raises(InputError, match=word):
        claims.load_claims(path)


def test_published_tables_parse_and_match_their_index():
    total = 0
    for folder in (p for p in PUBLISHED.iterdir() if p.is_dir()):
        index = yaml.safe_load((folder / "index.yaml").read_text())
        for table in index["tables"]:
            if not table["file"]:
                continue
            frame = load_published(f"{folder.name}/{table['file'].removesuffix('.csv')}")
            assert len(frame) == table["values"]
            assert list(frame.columns) == [*table["keys"], "value"]
            assert not frame.duplicated(table["keys"]).any()
            assert not (frame == "").any().any()
            total += len(frame)
        assert index["values_total"] == sum(t["values"] for t in index["tables"])
    assert total == 1936


def test_the_readme_summary_is_fresh():
    readme = (ROOT / "README.md").read_text()
    assert with_summary(readme) == readme, "run `make summary`"
    with pytest.raises(InputError, match="markers"):
        with_summary("no markers here")


def test_the_ledger_page_has_every_claim_in_its_chapter():
    counts, *chapters = claims_page(CHAPTERS).split("## Chapter ")
    for entry in load_claims():
        of_chapter = [text for text in chapters if text.startswith(f"{int(entry['chapter'])}\n")]
        assert len(of_chapter) == 1 and escape(entry["statement"]) in of_chapter[0], entry["id"]
    assert all(status in counts for status in Status)
    assert sum(summary_table().rows[-1][1:]) == len(load_claims())
