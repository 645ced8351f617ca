"""Claims: joined cells, and verdicts that follow from rows and can fail."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fl_privacy_lib.metrics import wilson_interval
from fl_privacy_lib.reproduction import checks, claims, comparison, tables
from fl_privacy_lib.reproduction.claims import load_claims
from fl_privacy_lib.reproduction.comparison import compare, measured
from fl_privacy_lib.reproduction.published import load_published
from fl_privacy_lib.reproduction.verdict import design_effect


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
        "victims": "2",
        "seeds": "50",
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
    write_rows(tmp_path, {"victims": "1"})
    assert claims.verdict(entry(), tmp_path).status == "reduced setting"
    write_rows(tmp_path, {"max_iterations": "30"})
    assert claims.verdict(entry(), tmp_path).status == "reduced setting"


def test_a_rate_near_the_bound_is_neither_below_nor_above_it(tmp_path):
    write_rows(tmp_path, {"mean": 0.05})  # the interval reaches above 0.1
    assert wilson_interval(5, 100)[1] > 0.1
    outcome = claims.verdict(entry(), tmp_path)
    assert outcome.status == "undecided" and "includes 0.1" in outcome.note
    write_rows(tmp_path, {"mean": 0.2})
    assert claims.verdict(entry(), tmp_path).status == "not reproduced"


def test_images_of_one_network_count_less_than_independent_ones(tmp_path):
    few = {"victims": "20", "seeds": "5"}
    alike = few | {"dataset": "lfw", "mean": 0.5, "std": 0.5}  # all images of a network or none
    write_rows(tmp_path, few, alike)
    counted = measured("fed_cdp/table_7", tmp_path)["effective"]
    assert list(counted) == [5.0, 5.0]  # five networks, not 100 images
    mnist = entry(rows={"dataset": "mnist"})
    assert "0.00 to 0.43" in claims.verdict(mnist, tmp_path).note  # Wilson's interval of 0 in 5
    write_rows(tmp_path, few, alike | {"std": 0.0})
    assert list(measured("fed_cdp/table_7", tmp_path)["effective"]) == [100.0, 100.0]
    write_rows(tmp_path, few)  # nothing comes back anywhere, so that nothing tells
    assert claims.verdict(mnist, tmp_path).status == "undecided"


def test_the_design_effect_is_that_of_drawn_networks():
    """Against a simulation: images of a network succeed together with correlation ρ."""
    rng, rho = np.random.default_rng(0), 0.3
    shape = (1 - rho) / rho  # of the beta law of a network's chance
    cells = []
    for seeds, victims, mean in ((5, 20, 0.4), (35, 3, 0.1)):
        chances = rng.beta(mean * shape, (1 - mean) * shape, (4000, seeds))
        rates = rng.binomial(victims, chances) / victims
        cells += [(p, s, seeds, victims) for p, s in zip(rates.mean(1), rates.std(1), strict=True)]
    cells += [(0.0, 0.0, 5, 1), (0.0, 0.0, 5, 10)]
    effect = design_effect(*zip(*cells, strict=True))
    assert effect[-2] == 1  # one image a network
    # ρ belongs to the table: a cell that holds nothing has it too
    found = (effect[[0, 4000, -1]] - 1) / (np.array([20, 3, 10]) - 1)
    assert found == pytest.approx([rho] * 3, rel=0.02)


def test_the_design_effect_is_that_of_the_analysis_of_variance():
    images = np.array([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=float)  # [k, m]
    rates, (k, m) = images.mean(1), images.shape
    between = m * ((rates - rates.mean()) ** 2).sum() / (k - 1)
    within = ((images - rates[:, None]) ** 2).sum() / (k * (m - 1))
    rho = (between - within) / (between + (m - 1) * within)
    assert design_effect(rates.mean(), rates.std(), k, m) == pytest.approx(1 + (m - 1) * rho)
    for nothing in ((0.0, 0.0, k, m), (1.0, 0.0, k, m), (0.5, 0.0, 1, m)):  # or a single network
        assert design_effect(*nothing) == m


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


AHEAD = {
    "check": "ahead",
    "metric": "accuracy",
    "rows": {"method": "new"},
    "than": {"method": "old"},
    "on": ["dataset", "threat_type"],
}


def test_ahead_asks_for_an_interval_beyond_zero(tmp_path):
    base = {"metric": "accuracy", "victims": "4", "seeds": "25"}
    old, new = (
        base | {"method": "old", "mean": 0.7, "std": 0.03},
        base | {"method": "new", "std": 0.04},
    )
    alone = new | {"dataset": "lfw", "mean": 0.9}  # nothing to compare with
    # scipy's Welch test at its border: the half width of the interval is 2.0129 standard errors;
    # deviations over networks are recorded in population form
    half = 2.0129 * (0.0025 / 24) ** 0.5
    for mean, by, status in (
        (0.7 + half + 1e-4, 0, "reproduced"), (0.7 + half - 1e-4, 0, "undecided"),
        (0.7 - half + 1e-4, 0, "undecided"), (0.7 - half - 1e-4, 0, "not reproduced"),
        (0.69 + half + 1e-4, -0.01, "reproduced"), (0.71 + half - 1e-4, 0.01, "undecided"),
    ):  # fmt: skip
        write_rows(tmp_path, old, new | {"mean": mean}, alone)
        outcome = claims.verdict(entry(rows={}, test=AHEAD | {"by": by}), tmp_path)
        assert (outcome.status, outcome.cells) == (status, 1), (mean, by)
        sample = [std * (25 / 24) ** 0.5 for std in (0.04, 0.03)]
        p_value = stats.ttest_ind_from_stats(
            mean - by, sample[0], 25, 0.7, sample[1], 25, False
        ).pvalue
        assert (p_value < 0.05) == (status != "undecided")
    write_rows(tmp_path, new | {"mean": 0.9})
    assert claims.verdict(entry(rows={}, test=AHEAD), tmp_path).status == "not run"
    # one network has no spread, however many of its images are attacked
    one = [
        row | {"victims": "100", "seeds": "1", "std": 0.0, "mean": mean}
        for row, mean in ((old, 0.7), (new, 0.8))
    ]
    write_rows(tmp_path, *one)
    assert claims.verdict(entry(rows={}, test=AHEAD), tmp_path).status == "undecided"


TRAINED = {
    "dataset": "mnist", "setting": "printed", "clients": "100", "participation": "0.05",
    "participants": "5", "rounds": "100", "local_iterations": "100", "batch_size": "5",
}  # fmt: skip
FAIR = {"accuracy": 0.5, "guess": 0.1, "evaluated": 10_000, "searched": 14, "diverged": 0}


def write_trained(folder, *cells):
    """Write made-up trainings of Table II: columns, then metrics over those of a fair trial."""
    rows = []
    for columns, metrics in cells:
        seeds = columns.get("seeds", "3")
        for metric, mean in (FAIR | metrics).items():
            if mean is not None:
                std = 0.01 if metric == "accuracy" and seeds != "1" else 0.0
                rows.append(TRAINED | {"metric": metric, "mean": mean, "std": std, "n": seeds,
                                       "seeds": seeds, "seconds": 1} | columns)  # fmt: skip
    path = folder / "fed_cdp" / "table_2.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(path, index=False)


VALUES = {"table": "fed_cdp/table_2", "test": {"check": "values"}, "rows": {}}
WINS = {
    "table": "fed_cdp/table_2", "rows": {}, "test": AHEAD
    | {"rows": {"method": "fed_cdp"}, "than": {"method": "fed_sdp"}, "on": ["participation"]},
}  # fmt: skip
FAILURES = {
    "not searched": ({}, {"searched": None}),
    "one seed": ({"seeds": "1"}, {}),
    "diverged": ({}, {"diverged": 1 / 3}),
    "diverged, so that the mean is at the guess": ({}, {"diverged": 1 / 3, "guess": 0.5}),
    "reduced": ({"rounds": "20"}, {}),
    "another reading": ({"setting": "code"}, {}),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("claim", [VALUES, WINS, WINS | {"test": {"check": "shown",
    "metric": "accuracy", "bound": 0.9}}], ids=["values", "ahead", "shown"])  # fmt: skip
def test_no_failure_of_the_rule_decides_a_claim(claim, failure, tmp_path):
    """One seed, no search, a diverged run, a reduced row, another reading: nothing is decided."""
    columns, metrics = FAILURES[failure]
    other = ({"method": "fed_sdp"}, {"accuracy": 0.3})
    write_trained(tmp_path, ({"method": "fed_cdp"}, {}), other)
    decided = claims.verdict(entry(**claim), tmp_path).status
    assert decided in ("reproduced", "not reproduced")
    arms = [(columns | {"method": m}, metrics | {"accuracy": a}) for m, a in (("fed_cdp", 0.5),
            ("fed_sdp", 0.3))]  # fmt: skip
    write_trained(tmp_path, *arms)
    outcome = claims.verdict(entry(**claim), tmp_path)
    assert outcome.status in ("undecided", "reduced setting", "not run")
    assert outcome.note or outcome.status == "reduced setting"


def test_an_arm_at_the_guess_neither_wins_nor_loses(tmp_path):
    one, other = ({"method": "fed_cdp"}, {}), ({"method": "fed_sdp"}, {"accuracy": 0.101})
    write_trained(tmp_path, one, other)
    outcome = claims.verdict(entry(**WINS), tmp_path)
    assert outcome.status == "undecided" and "no learning" in outcome.note
    # but a fair trial that ends at the guess misses a printed value, and is behind by too much
    assert claims.verdict(entry(**VALUES), tmp_path).status == "not reproduced"
    behind = WINS["test"] | {"rows": {"method": "fed_sdp"}, "than": {"method": "fed_cdp"}}
    claim = entry(**WINS | {"test": behind | {"by": -0.1}})
    assert claims.verdict(claim, tmp_path).status == "not reproduced"


def test_a_value_that_comes_out_without_learning_says_so(tmp_path):
    """Fed-CDP's printed .815 (Table II, 5 of 100), by a training at a guess of .815 or .1."""
    for guess, words in ((0.815, ["1 of those that hold have not learned"]), (0.1, [])):
        write_trained(tmp_path, ({"method": "fed_cdp"}, {"accuracy": 0.815, "guess": guess}))
        outcome = claims.verdict(entry(**VALUES), tmp_path)
        assert outcome.status == "reproduced"
        assert [part for part in outcome.beside if "learned" in part] == words


def test_what_an_entry_calls_lost_holds_where_its_values_are_printed_again():
    """Fed-αCDP's Table 2 is repeated in Table 5, whose own entry leaves nothing out."""
    cell = {"record": "fed_alpha_cdp/table_5", "key": {"method": "non_private"}}
    assert "held out" in claims.deciding(load_claims(), cell)
    assert claims.deciding(load_claims(), cell | {"key": {"method": "fed_cdp"}}) == ""


def test_a_cell_that_no_entry_is_about_lacks_what_all_entries_on_its_record_lack():
    cell = {"record": "a/b", "key": {"arm": "other"}}
    ledger = [entry(table="a/b", rows={"arm": arm}, test={"check": "values"}) for arm in "xy"]
    assert claims.deciding(ledger, cell) == ""
    ledger[0]["lost"] = "the rate"
    assert claims.deciding(ledger, cell) == ""
    ledger[1]["unfair"] = "the search"
    assert claims.deciding(ledger, cell) == "the rate"
    assert claims.deciding(ledger, cell | {"key": {"arm": "y"}}) == "the search"


def test_an_accuracy_is_shown_with_its_marks():
    """† a seed diverged, ‡ not learned, ○ a rate that no search of the cell chose."""
    fair = FAIR | {"accuracy_std": 0.01, "seeds": "3"}
    for changes, shown in (
        ({}, "0.500 ± 0.010"),
        ({"seeds": "1", "searched": 0}, "0.500 ○"),
        ({"diverged": 1 / 3, "guess": 0.5}, "0.500 ± 0.010 †‡"),
    ):
        assert tables.outcome(fair | changes) == shown


def test_a_departure_that_was_no_fair_trial_is_open(tmp_path):
    judged, other = ({"method": "fed_cdp"}, {}), {"method": "fed_cdp", "setting": "code"}
    for metrics, words in (({}, "0 of 1"), ({"searched": None}, "0 of 1 (1 open)")):
        write_trained(tmp_path, judged, (other, metrics))
        beside = claims.verdict(entry(**VALUES), tmp_path).beside
        assert [part.split(": ")[1] for part in beside if part.startswith("noise as")] == [words]


@pytest.mark.parametrize(("gap", "status"), [(0.05, "reproduced"), (0.02, "undecided"),
                                             (-0.05, "not reproduced")])  # fmt: skip
def test_one_seed_of_a_large_round_decides_by_three_times_the_largest_spread(gap, status, tmp_path):
    large = {"participants": "500", "participation": "0.5", "clients": "1000", "seeds": "1"}
    small = [({"method": m}, {}) for m in ("fed_cdp", "fed_sdp")]  # their spread is 0.01
    arms = [(large | {"method": m}, {"searched": 0, "accuracy": 0.5 + g})
            for m, g in (("fed_cdp", gap), ("fed_sdp", 0.0))]  # fmt: skip
    write_trained(tmp_path, *small, *arms)
    frame = measured("fed_cdp/table_2", tmp_path)
    held = [o.held for o in checks.check(WINS["test"], "fed_cdp/table_2", frame)]
    expected = {"reproduced": True, "undecided": None, "not reproduced": False}[status]
    assert held == [None, expected]


def test_a_tuned_value_beyond_the_printed_one_exceeds_it(tmp_path):
    cell = ({"method": "non_private"}, {"accuracy": 0.99})  # 0.924 is printed
    write_trained(tmp_path, (cell[0] | {"setting": "not_applicable"}, cell[1]))
    assert claims.verdict(entry(**VALUES), tmp_path).status == "exceeded"


def test_what_a_paper_leaves_out_leaves_a_claim_undecided(tmp_path):
    write_trained(tmp_path, ({"method": "fed_cdp"}, {}))
    lost = "the population is not printed; the authors' own would settle it"
    outcome = claims.verdict(entry(**VALUES, lost=lost), tmp_path)
    assert (outcome.status, outcome.note.split(" would")[0]) == (
        "undecided",
        lost.split(" would")[0],
    )
    write_trained(tmp_path, ({"method": "fed_cdp"}, {"accuracy": 0.804}))
    assert claims.verdict(entry(**VALUES, lost=lost), tmp_path).status == "reproduced"
    unfair = claims.verdict(entry(**VALUES, unfair="the attack was not tuned"), tmp_path)
    assert unfair.status == "undecided" and unfair.note.startswith("the attack was not tuned")


def test_a_claim_about_all_data_sets_says_which_are_recorded(tmp_path):
    row = {
        "dataset": "cancer_z",
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
        "seeds": 3,
        "searched": 1,
        "setting": "not_applicable",
    }
    path = tmp_path / "fed_cdp" / "table_1.csv"
    path.parent.mkdir(parents=True)
    pd.DataFrame([row]).to_csv(path, index=False)
    claim = {
        "table": "fed_cdp/table_1",
        "test": {"check": "shown", "metric": "accuracy", "bound": 0.5},
    }
    assert claims.verdict(claim, tmp_path).beside == ("1 of 5 data sets: Cancer",)
    assert claims.verdict(claim | {"rows": {"dataset": "cancer_z"}}, tmp_path).beside == ()


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ({"check": "rate_below", "bound": 0.1},
         "the share of images recovered is below 10 %, with its whole interval"),
        ({"check": "ahead", "metric": "mse", "rows": {"arm": ["fed_cdp_example", "dssgd"]},
          "than": {"arm": "pruned"}, "on": []},
         "the mean squared error for Fed-CDP per example or DSSGD is above that for pruning"),
        ({"check": "ahead", "metric": "accuracy", "rows": {"pruned": 0.3}, "than": {"pruned": 0},
          "by": -0.01},
         "the accuracy for 30 % pruned is no more than 0.01 below that for 0 % pruned"),
        ({"check": "best", "metric": "accuracy", "over": "clip", "at": [2, 4]},
         "the accuracy is highest at C = 2 or C = 4"),
        ({"check": "shown", "metric": "sure_lead_over_full", "bound": -1},
         "the lead in accuracy over the full gradient, in points, at the lower end of its 95 % "
         "interval, is at least −1"),
        ({"check": "shown", "metric": "excess", "bound": 1e-6},
         "what is found exceeds what is claimed"),
        ({"check": "shown", "metric": "excess", "bound": 0.002},
         "the value found minus the claimed one is at least 0.002"),
        ({"check": "shown", "metric": "margin", "bound": -1e-9},
         "what is found does not exceed what is claimed"),
        ({"check": "at_most", "metric": "difference", "bound": 1e-6},
         "the largest difference between two weights is at most 0, apart from rounding"),
    ],
)  # fmt: skip
def test_a_test_can_be_read(test, words):
    assert checks.in_words(test) == words


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
    compared = compare("fed_cdp/table_3", measured("fed_cdp/table_3", tmp_path))
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


def test_a_number_that_lies_within_chance_of_its_bound_decides_nothing(tmp_path):
    """Four repetitions, 1 ± 0.2: half the 95 % interval is 3.182 · 0.1 = 0.318."""
    ratio = "ratio_to_fed_cdp"
    row = {"dataset": "mnist", "method": "fed_cdp_decay", "engine": "as_written", "metric": ratio,
           "mean": 1.0, "std": 0.2, "n": "4", "seeds": 1, "repetitions": 7,
           "batch_size": 5}  # fmt: skip
    path = tmp_path / "fed_cdp" / "table_3.csv"
    path.parent.mkdir(parents=True)
    pd.DataFrame([row]).to_csv(path, index=False)
    frame = measured("fed_cdp/table_3", tmp_path)
    for bound, held in ((0.67, False), (0.69, None), (1.31, None), (1.33, True)):
        most = {"check": "at_most", "metric": ratio, "bound": bound}
        (outcome,) = checks.check(most, "fed_cdp/table_3", frame)
        assert outcome.held is held, bound
        (least,) = checks.check(most | {"check": "shown"}, "fed_cdp/table_3", frame)
        assert least.held is (None if held is None else not held), bound


@pytest.mark.parametrize(
    ("mean", "std", "held"),
    [
        (0.95, 0.01, True),
        (0.90, 0.03, True),
        (0.80, 0.15, True),  # two deviations are .30, a third of .949 is .316
        (0.80, 0.16, None),  # .32: hardly a number would have missed it
        (0.50, 0.16, False),  # but this one does
    ],
)
def test_a_spread_that_hardly_a_number_would_miss_decides_nothing(mean, std, held):
    printed = {
        "value": "0.949",
        "unit": "fraction",
        "metric": "accuracy",
        "measured_as": "accuracy",
    }
    cell = {"accuracy": mean, "accuracy_std": std}
    assert comparison._outcome(printed, cell, True).held is held


def test_a_setting_with_the_name_of_a_metric_answers_for_no_published_value():
    frame = measured("fed_alpha_cdp/stopped")
    assert "rounds" in frame and "rounds" not in set(frame["metric"])
    compared = compare("fed_alpha_cdp/table_8", frame)
    assert {c.printed["metric"] for c in compared if c.cell} == {"accuracy"}
    assert "rounds" in {c.printed["metric"] for c in compared}


def test_values_join_the_published_cells(tmp_path):
    rows = [
        {
            "method": "non_private",
            "arm": "non_private",
            "metric": "attack_success_rate",
            "mean": 1.0,
        },
        {"method": "non_private", "arm": "non_private", "metric": "mse", "mean": 0.0008**2},
        {"method": "non_private", "arm": "non_private", "metric": "attack_iterations", "mean": 9.0},
    ]
    write_rows(tmp_path, *rows)
    compared = compare("fed_cdp/table_7", measured("fed_cdp/table_7", tmp_path))
    found = [(c.printed["metric"], c.printed["value"], c.outcome.held) for c in compared if c.cell]
    assert set(found) == {
        ("resilient", "false", True), ("rmse", "0.0008", True), ("attack_iterations", "7", False),
    }  # fmt: skip
    assert len(compared) == len(load_published("fed_cdp/table_7")), "the others stand alone"
    only = compare("fed_cdp/table_7", measured("fed_cdp/table_7", tmp_path), "rmse")
    assert {c.printed["metric"] for c in only} == {"rmse"}


@pytest.mark.parametrize("iterations", [300.0, 40.0])
def test_the_limit_of_a_failed_attack_is_compared_with_nothing(tmp_path, iterations):
    write_rows(tmp_path, {}, {"metric": "attack_iterations", "mean": iterations})
    compared = compare("fed_cdp/table_7", measured("fed_cdp/table_7", tmp_path))
    ran = [c for c in compared if c.cell]
    assert {(c.printed["metric"], c.outcome and c.outcome.held) for c in ran} == {
        ("resilient", True), ("attack_iterations", None),
    }  # fmt: skip
    assert claims.judge(ran).cells == 1, "the row of the table rests on what it says"


def test_a_cell_without_a_published_value_stands_alone(tmp_path):
    write_rows(tmp_path, {"threat_type": "type_9"})
    frame = measured("fed_cdp/table_7", tmp_path)
    assert all(c.cell is None for c in compare("fed_cdp/table_7", frame))
    *_, last = compare("fed_cdp/table_7", frame, unpublished=True)
    assert last.printed is None and last.cell["threat_type"] == "type_9"
