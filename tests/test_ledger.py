"""The ledger as it stands: its form, its words, the published tables, the README's summary."""

import functools

import pytest
import yaml

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.reproduction import checks, claims, comparison
from fl_privacy_lib.reproduction.claims import load_claims
from fl_privacy_lib.reproduction.comparison import measured
from fl_privacy_lib.reproduction.paths import PUBLISHED, ROOT
from fl_privacy_lib.reproduction.published import load_published
from fl_privacy_lib.reproduction.tables import summary_table
from fl_privacy_lib.reproduction.verdict import Status
from tools.summary import values_table, with_summary


@functools.cache
def verdicts():
    """Return every claim of the ledger with its verdict; both take a while."""
    return [(claim, claims.verdict(claim)) for claim in claims.load_claims()]


def test_every_claim_that_does_not_hold_says_why():
    for claim, outcome in verdicts():
        if outcome.status in ("not reproduced", "undecided", "refuted"):
            assert outcome.note, claim["id"]


def test_a_reduced_setting_is_one_of_sizes_and_not_of_the_reading():
    for claim, outcome in verdicts():
        if outcome.status == "reduced setting":
            rows = measured(claim["table"])
            rows = rows[rows["at_setting"].astype(bool)]
            assert comparison.select(rows, claim.get("rows", {})).empty, claim["id"]


def test_every_test_in_the_ledger_has_words():
    for entry in claims.load_claims():
        words = checks.in_words(entry["test"]) if "test" in entry else "—"
        assert words and "None" not in words, (entry["id"], words)


def test_the_ledger_is_well_formed_and_every_status_is_a_known_word():
    assert verdicts()
    for claim, outcome in verdicts():
        assert outcome.status in Status
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


def test_what_a_caller_changes_in_an_entry_stays_its_own():
    load_claims()[0].clear()
    assert load_claims()[0]["id"]


def test_the_readme_summary_is_fresh():
    readme = (ROOT / "README.md").read_text()
    assert with_summary(readme) == readme, "run `make summary`"
    with pytest.raises(InputError, match="markers"):
        with_summary("no markers here")


def test_the_summary_counts_every_claim():
    *_, claimed, ours = summary_table().rows
    assert sum(claimed[1:]) + sum(ours[1:]) == len(load_claims())
    assert sum(ours[1:]) == sum(entry["kind"] == "finding" for entry in load_claims())


def test_every_printed_value_is_counted_once():
    *_, total = values_table().rows
    printed, measured_, at_setting, came_out, beyond = total[1:]
    assert printed == 1936 > measured_ >= at_setting >= came_out + beyond > 0
