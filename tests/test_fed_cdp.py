"""Fed-CDP's cells: readings of the noise, divergence, the utility bound, grid and recording."""

import functools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from fed_cdp_scenes import EVERYTHING

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters.fed_cdp import grid as fed_cdp_grid
from fl_privacy_lib.chapters.fed_cdp import run
from fl_privacy_lib.chapters.fed_cdp import utility as fed_cdp_utility
from fl_privacy_lib.chapters.fed_cdp.grid import AS_CODED, PARTS
from fl_privacy_lib.chapters.fed_cdp.parameters import FedCdp
from fl_privacy_lib.chapters.fed_cdp.rates import with_rate
from fl_privacy_lib.federated import example_gradients
from fl_privacy_lib.federated.simulation import evaluate
from fl_privacy_lib.federated.stacked import local_noise
from fl_privacy_lib.models import init_glorot, mlp, parameters_of, training_cnn
from fl_privacy_lib.reproduction import experiment
from fl_privacy_lib.reproduction.checks import check
from fl_privacy_lib.reproduction.claims import load_claims
from fl_privacy_lib.reproduction.comparison import measured
from fl_privacy_lib.reproduction.experiment import Row
from fl_privacy_lib.reproduction.experiments import training as fed_cdp
from fl_privacy_lib.reproduction.experiments.searching import STEPS, rate_at
from fl_privacy_lib.reproduction.experiments.training import Training
from fl_privacy_lib.reproduction.experiments.training import point_of as training_of
from fl_privacy_lib.reproduction.experiments.watching import (
    NormWatch,
    NotFinite,
    end_if_not_finite,
    has_diverged,
)
from fl_privacy_lib.reproduction.verdict import listed, published_setting

CPU = torch.device("cpu")
record = functools.partial(experiment.record, run.EXPERIMENT)
FULL = FedCdp.of_profile("full")
SMALL = Training(
    "digits", "fed_cdp", "code", clients=10, participants=2, rounds=3, local_iterations=2
)
UNBOUNDED = replace(
    SMALL, method="fed_sdp", setting="printed", rounds=15, noise_scale=1e38, clip_norm=1e6
)
"""Its weights are soon no longer finite."""


# ---- readings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "scale", "std"), [("printed", 6, 24 / 5**0.5), ("code", 6, 4.8), ("code", 2, 1.6)]
)
@pytest.mark.parametrize("method", ["fed_cdp", "fed_cdp_decay"])
def test_the_noise_on_a_batch_mean_is_the_readings(method, setting, scale, std):
    point = Training("mnist", method, setting, noise_scale=scale, clip_end=2.0)
    assert local_noise(point.defense, 5, 0) == pytest.approx(std)
    assert point.multiplier * 4 / 5 == pytest.approx(std)


def test_the_decaying_bound_starts_and_ends_where_it_should():
    point = fed_cdp_grid.training(FULL, "mnist", "fed_cdp_decay", "code")
    bounds = [point.defense.per_example.clip.bound(t) for t in range(100)]
    assert bounds == pytest.approx(6 - 4 * np.arange(100) / 100)


@pytest.mark.parametrize(("setting", "std"), [("printed", 24.0), ("code", 24 / math.sqrt(5))])
def test_fed_sdp_noises_an_update_as_read(setting, std):
    for method, stage in (("fed_sdp", "per_client"), ("fed_sdp_server", "on_arrival")):
        point = Training("mnist", method, setting)
        rule = getattr(point.defense, stage)
        assert rule.noise_scale * rule.clip.clip_norm * rule.scale == pytest.approx(std)
        assert point.multiplier * 4 == pytest.approx(std)


def test_what_has_no_noise_has_no_multiplier_and_pruning_stands_last():
    assert Training("mnist", "non_private").multiplier == 0
    pruned = Training("mnist", "fed_sdp", "code", pruned=0.3).defense
    assert pruned.per_client.first.noise_scale == 6 and pruned.per_client.then.fraction == 0.3


def test_as_coded_is_the_released_codes_noise_and_rate():
    point = fed_cdp_grid.training(FULL, "mnist", *AS_CODED[0])
    assert (point.noise_scale, point.local_lr, local_noise(point.defense, 5, 0)) == (
        0.5,
        0.05,
        pytest.approx(0.4),
    )
    assert with_rate(point, {}) == point


# ---- training ------------------------------------------------------------------------------------


def stopped_at(round, monkeypatch):
    """Interrupt every training after one round; return the list of rounds that are looked at."""
    rounds, look = [], fed_cdp._after_round

    def watch(checkpoint, started, report):
        rounds.append(report.round)
        look(checkpoint, started, report)
        if report.round == round:
            raise KeyboardInterrupt

    monkeypatch.setattr(fed_cdp, "_after_round", watch)
    return rounds


def test_a_training_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    whole = fed_cdp.measure(SMALL, CPU, tmp_path)
    assert not list(tmp_path.iterdir())
    stopped_at(1, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        fed_cdp.measure(SMALL, CPU, tmp_path)
    monkeypatch.undo()
    rounds = stopped_at(None, monkeypatch)
    (clock,) = tmp_path.glob("*.seconds")
    clock.write_text("1000")  # of the interrupted run: they count
    again = fed_cdp.measure(SMALL, CPU, tmp_path)
    assert rounds == [2] and 1000 < again.pop("seconds") < 1000 + 600
    whole.pop("seconds")
    for name, values in whole.items():
        np.testing.assert_array_equal(again[name], values)


def test_a_training_that_has_ended_early_does_not_go_on_when_a_later_seed_is_interrupted(
    tmp_path, monkeypatch
):
    point = replace(UNBOUNDED, seeds=2)
    whole = fed_cdp.measure(point, CPU, tmp_path)
    fed_cdp.train(point, point.seed, CPU, tmp_path / "state.pt")
    rounds = stopped_at(None, monkeypatch)
    again = fed_cdp.train(point, point.seed, CPU, tmp_path / "state.pt")
    assert rounds == []
    for name in ("rounds_run", "diverged", "accuracy", "curve"):
        np.testing.assert_array_equal(again[name], whole[name][0])


def test_a_training_says_which_engine_it_took_and_scores_with_it(tmp_path):
    pytest.importorskip("numba", reason="the fastest engine")
    result = fed_cdp.measure(SMALL, CPU, tmp_path)
    assert list(result["engine"]) == ["compiled"] and "compiled engine" in run.EXPERIMENT.words(
        SMALL, result
    )
    start = fed_cdp.scene(SMALL, 0, CPU)
    weights = parameters_of(start.model)
    fast, slow = (
        evaluate(start.model, weights, start.evaluation, compiled) for compiled in (True, False)
    )
    # two ties that rounding decides
    assert fast == pytest.approx(slow, abs=2 / len(start.evaluation[1]))


def test_seeds_differ_and_their_accuracies_stand_in_order(tmp_path):
    point = replace(SMALL, method="non_private", setting="not_applicable", local_lr=0.2, rounds=2)
    both = fed_cdp.measure(replace(point, seeds=2), CPU, tmp_path)
    second = fed_cdp.measure(replace(point, seed=1), CPU, tmp_path)
    assert both["curve"].shape == (2, 2)
    assert both["accuracy"][1] == second["accuracy"][0] != both["accuracy"][0]


@pytest.mark.parametrize(("small", "folds"), [(5000, 5), (1000, 10)])
def test_what_is_held_out_is_not_trained_on_and_is_the_same_for_all(small, folds, monkeypatch):
    monkeypatch.setattr(fed_cdp, "SMALL", small)
    scenes = [
        fed_cdp.scene(replace(SMALL, held_out=True, method=m), s, CPU)
        for m, s in (("fed_cdp", 0), ("dssgd", folds))
    ]
    whole = fed_cdp.scene(SMALL, 0, CPU)
    assert torch.equal(scenes[0].evaluation[0], scenes[1].evaluation[0])
    images = (scenes[0].train[0], scenes[0].evaluation[0], whole.train[0])
    train, out, all_ = ([image.numpy().tobytes() for image in x] for x in images)
    assert len(out) == len(all_) // folds and len(scenes[0].test[1]) == 0
    assert sorted(train + out) == sorted(all_)
    assert scenes[0].partition.examples == len(train)
    # every seed holds out another part
    parts = [
        fed_cdp.scene(replace(SMALL, held_out=True), s, CPU).evaluation[0] for s in range(folds)
    ]
    assert len({image.numpy().tobytes() for part in parts for image in part}) > 0.99 * sum(
        map(len, parts)
    )


def test_a_training_stops_only_when_its_weights_are_no_longer_finite(tmp_path):
    def kept(weight, looks):
        state = {
            "weights": {"w": torch.tensor([1.0, weight])},
            "history": [(t, (), v) for t, v in enumerate(looks)],
        }
        torch.save(state, tmp_path / "state.pt")
        end_if_not_finite(tmp_path / "state.pt")

    kept(1e30, [0.1] * 50)
    kept(math.nan, [0.1, None])  # not looked at
    for bad in (math.nan, math.inf):
        with pytest.raises(NotFinite):
            kept(bad, [None, 0.9])


@pytest.mark.parametrize(
    ("accuracies", "growth", "said"),
    [
        ([0.12] * 20, 50.0, True),
        ([0.12] * 20, 9.0, False),  # at chance, but its weights have not grown long
        ([0.2] * 20, 50.0, False),
        ([0.12] * 15 + [0.2] * 5, 50.0, False),  # late, but it has learned
        ([0.2] * 9 + [0.12] * 11, 50.0, True),
        # above chance once in the last ten rounds and the look before them
        (
            [0.2] * 10 + [0.12] * 10,
            50.0,
            False,
        ),
        ([0.12] * 10, 50.0, False),  # too short to say
        ([0.9, 0.9], math.nan, True),
    ],
)
def test_what_has_diverged(accuracies, growth, said):
    assert has_diverged(dict(enumerate(accuracies)), 0.1, growth) is said


def test_looks_that_are_far_apart_reach_ten_rounds_back():
    often = dict.fromkeys(range(9, 209, 10), 0.9)
    assert not has_diverged({**often, 219: 0.12}, 0.1, 50.0)
    assert has_diverged({**often, 209: 0.12, 219: 0.12}, 0.1, 50.0)


def test_a_lost_training_goes_on_to_its_end_and_is_reported_as_such(tmp_path):
    point = replace(SMALL, method="fed_sdp", setting="printed", rounds=15, noise_scale=60.0)
    result = fed_cdp.measure(point, CPU, tmp_path)
    assert result["diverged"][0] == 1 and result["rounds_run"][0] == 15 and result["growth"][0] > 10
    assert np.isfinite(result["curve"]).all()


def test_a_training_without_finite_weights_ends_early(tmp_path):
    result = fed_cdp.measure(UNBOUNDED, CPU, tmp_path)
    assert (
        result["diverged"][0] == 1
        and result["rounds_run"][0] < 15
        and not np.isfinite(result["growth"][0])
    )
    assert np.isnan(result["curve"][0, -1])


def test_the_watched_norms_are_those_of_the_examples_gradients(tmp_path):
    point = replace(SMALL, watched=True, rounds=1, seed=3)
    start, plan = fed_cdp.scene(point, 3, CPU), point.plan(3)
    clients = [int(c) for c in plan.participants_of(0)]
    expected = []
    for client in clients:
        positions = start.partition.indices[client]
        first = positions[plan.batches(client, len(positions), 0)[0]]
        weights = {name: w[None] for name, w in parameters_of(start.model).items()}
        gradients = example_gradients(
            start.model, weights, start.train[0][first][None], start.train[1][first][None]
        )
        expected.append([float(g.flatten(2).norm(dim=2).mean()) for g in gradients.values()])
    for setting in ("printed", "code"):
        norms = fed_cdp.measure(replace(point, setting=setting), CPU, tmp_path)["norms"]
        assert norms.shape == (1, 2, 3)
        np.testing.assert_allclose(norms[0, 0], np.mean(expected, 0), rtol=1e-4)
    bare = replace(point, method="non_private", setting="not_applicable")
    np.testing.assert_allclose(
        fed_cdp.measure(bare, CPU, tmp_path)["norms"][0, 0], np.mean(expected, 0), rtol=1e-4
    )


def test_watching_changes_nothing_of_what_is_released():
    values = {"w": torch.ones(1, 2)}

    class Told:
        round, iteration, norms = 0, 0, {"w": torch.tensor([[1.0, 3.0]])}

    watch = NormWatch()
    assert watch(values, Told()) is values
    assert watch.table(1, 1).tolist() == [[[2.0]]]


# ---- the utility bound ---------------------------------------------------------------------------


def test_margins_and_their_gradients_equal_a_naive_loop():
    generator = torch.Generator().manual_seed(1)
    model = init_glorot(mlp(4, 3, (5, 6)), generator)
    x, y = torch.randn(7, 4, generator=generator), torch.randint(3, (7,), generator=generator)
    s, norms = fed_cdp_utility.margins(model, parameters_of(model), x, y)
    for i in range(7):
        scores = model(x[i : i + 1])[0]
        margin = scores[y[i]] - max(scores[j] for j in range(3) if j != y[i])
        gradient = torch.autograd.grad(margin, list(model.parameters()))
        assert s[i] == pytest.approx(margin.item(), abs=1e-5)
        assert norms[i] == pytest.approx(
            math.sqrt(sum(float(g.square().sum()) for g in gradient)), rel=1e-5
        )


def test_within_the_bound_a_linear_model_keeps_its_classes():
    """For a linear model the gradient is the same at all weights: Proposition 2 holds, tightly."""
    generator = torch.Generator().manual_seed(2)
    model = init_glorot(mlp(4, 2, ()), generator)
    x = torch.randn(20, 4, generator=generator)
    y = model(x).argmax(1)
    weights = parameters_of(model)
    s, norms = fed_cdp_utility.margins(model, weights, x, y)
    bounds = fed_cdp_utility.utility_bounds(s, norms)
    (name, w), tight = next(iter(weights.items())), int(np.argmax(norms))
    for i, (bound, inside) in [(i, (b, f)) for i, b in enumerate(bounds) for f in (0.999, 1.001)]:
        worst = torch.zeros_like(w)
        worst[y[i]], worst[1 - y[i]] = -x[i], x[i]
        changed = {name: w + worst * (inside * bound / worst.norm())}
        after, _ = fed_cdp_utility.margins(model, changed, x[i : i + 1], y[i : i + 1])
        assert after[0] > 0 or (i == tight and inside > 1)
        assert after[0] < 0 or not (i == tight and inside > 1)


def test_the_statements_values():
    statements = fed_cdp_utility.statements()
    assert statements["fedsgd_is_fedaveraging"]["difference"] < 1e-6
    # a sum of 5 models, divided by 4
    assert statements["fedsgd_is_fedaveraging"]["difference_of_the_code"] > 0.2
    assert statements["decay_costs_no_privacy"]["excess"] == 0
    # s = tanh 4, and each unit has the slope 1/(4 cosh² 4)
    counter = statements["proposition_2"]
    slopes = math.sqrt(2) / (4 * math.cosh(4) ** 2)
    assert counter["bound"] == pytest.approx(math.tanh(4) / slopes)
    assert counter["margin"] == pytest.approx(-math.tanh(0.5))
    assert counter["change"] == pytest.approx(9 * math.sqrt(2))
    assert counter["change"] < 0.01 * counter["bound"]
    # no unit is steeper than 1/4 anywhere, and within that bound the class stays
    assert math.tanh(4) / (math.sqrt(2) / 4) < 8 * math.sqrt(2) < counter["change"]


def test_signal_and_noise_of_a_round(tmp_path):
    arm = replace(SMALL, local_lr=1e-5, setting="printed", participants=4, local_iterations=3)
    result = fed_cdp_utility.measure_utility(fed_cdp_utility.Utility(arm, 0, 50), CPU)
    # the norm of d normal draws has a relative deviation of 1/√(2d): 288 is the smallest tensor,
    # five deviations
    np.testing.assert_allclose(
        result["noise"], result["predicted_noise"], rtol=5 / math.sqrt(2 * 288)
    )
    std = 1e-5 * 6 * 4 / math.sqrt(5) * math.sqrt(3 / 4)
    np.testing.assert_allclose(
        result["predicted_noise"], std * np.sqrt([288, 18432, 16000]), rtol=1e-6
    )
    assert result["gradient_noise"] == pytest.approx(24 / math.sqrt(5) * math.sqrt(34720))
    assert result["step_noise"] == pytest.approx(1e-5 * float(result["gradient_noise"]))
    doubled = fed_cdp_utility.measure_utility(
        fed_cdp_utility.Utility(replace(arm, local_lr=2e-5), 0, 50), CPU
    )
    # both grow with η alone
    np.testing.assert_allclose(doubled["signal"], 2 * result["signal"], rtol=0.02)
    values = fed_cdp_utility.utility_values(result)
    assert values["noise"]["mean"] == pytest.approx(math.sqrt((result["noise"] ** 2).sum()))
    assert values["signal_to_noise"]["mean"] == pytest.approx(
        values["signal"]["mean"] / values["noise"]["mean"]
    )


def test_looking_at_a_trained_model_leaves_the_next_look_alone():
    point = fed_cdp_utility.Utility(SMALL, 1, 20)
    first, second = (fed_cdp_utility.measure_utility(point, CPU) for _ in range(2))
    for name, values in first.items():
        np.testing.assert_array_equal(second[name], values)
    start = fed_cdp_utility.measure_utility(replace(point, at_round=0), CPU)
    assert not np.array_equal(start["signal"], first["signal"])


@pytest.mark.parametrize("shape", [(12, 12, 3), (28, 28)])
def test_a_readers_own_images_are_trained_on(shape, tmp_path):
    images = np.random.default_rng(0).random((60, *shape))
    labels = np.arange(60) % 3
    path = tmp_path / "mine.npz"
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    point = Training(
        f"npz:{path}", "fed_cdp", "code", clients=4, participants=2, rounds=1,
        local_iterations=2, batch_size=3,
    )  # fmt: skip
    result = fed_cdp.measure(point, CPU, tmp_path)
    assert 0 <= result["accuracy"][0] <= 1 and result["rounds_run"][0] == 1


def test_images_that_are_too_small_get_one_sentence():
    with pytest.raises(InputError, match="at least 10 × 10, not 9 × 12"):
        training_cnn((1, 9, 12), 3)


# ---- recording and ledger ------------------------------------------------------------------------


def test_recording_writes_rows_that_stand_when_it_is_run_again(tmp_path, monkeypatch, capsys):
    smoke = FedCdp.of_profile("smoke", dataset="cancer", device="cpu", seeds=3)
    monkeypatch.setattr(run, "point_cache", lambda chapter: tmp_path / "points")
    monkeypatch.setattr(experiment, "point_cache", lambda chapter: tmp_path / "points")
    monkeypatch.setattr(experiment.os, "cpu_count", lambda: 1)
    record(smoke, "table_1", tmp_path)
    assert "or its search has chosen no rate yet: record that first" in capsys.readouterr().err
    record(smoke, "search_table_1", tmp_path)
    tries = measured("fed_cdp/search", tmp_path).query("metric == 'accuracy'")
    rates = sorted(tries["local_lr"].astype(float))
    assert set(rates) >= {rate_at(step) for step in STEPS} and set(tries["held_out"]) == {"True"}
    record(smoke, "table_1", tmp_path)
    row = measured("fed_cdp/table_1", tmp_path).query("metric == 'accuracy'").iloc[0]
    keys = ["clients", "participants", "rounds", "seeds"]
    assert list(row[keys]) == ["1000", "100", "1", "3"] and float(row["local_lr"]) in rates
    assert list(run.recorded_rates(tmp_path).tried) == [
        replace(training_of(row), rounds=0, local_lr=0.0, held_out=True, seeds=1)
    ]
    before = (tmp_path / "fed_cdp" / "table_1.csv").read_text()
    record(smoke, "table_1", tmp_path)
    assert (tmp_path / "fed_cdp" / "table_1.csv").read_text() == before


def test_an_unknown_part_is_refused(tmp_path):
    with pytest.raises(
        InputError,
        match=r"no 'table_9' \(did you mean table_5\?\); it records fed_cdp/statements, "
        "fed_cdp/learning_rates, learning_rates",
    ):
        record(FULL, "table_9")
    with pytest.raises(InputError, match=r"learning rate of digits.* is not chosen yet"):
        record(FedCdp.of_profile("full", dataset="digits"), "variants", tmp_path)


def test_the_ledgers_tests_can_be_computed_from_what_is_recorded():
    cells: dict[str, list[Row]] = {}
    for part in PARTS.values():
        cells.setdefault(f"fed_cdp/{part.table}", []).extend(
            c for d in part.datasets for c in part.make(FULL, d, EVERYTHING)
        )
    for entry in load_claims():
        if (
            entry["chapter"] != "05"
            or "test" not in entry
            or entry["table"].endswith("/statements")
        ):
            continue
        rows = pd.DataFrame(
            [
                {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in c.key.items()}
                for c in cells[entry["table"]]
            ]
        )
        test = entry["test"]
        for wanted in (entry.get("rows", {}), test.get("rows", {}), test.get("than", {})):
            for column, values in wanted.items():
                if column == "local_lr":  # a rate that a search chooses
                    continue
                assert set(listed(values)) <= set(rows[column]), (entry["id"], column)
        assert set(test.get("on", [])) | set(published_setting(entry["table"])) <= set(
            rows.columns
        ), entry["id"]


def test_the_best_level_is_looked_for_in_whole_series():
    test = {
        "check": "best",
        "metric": "accuracy",
        "over": "clip",
        "levels": [1, 2, 4],
        "at": [2, 4],
        "on": ["dataset"],
    }

    def held(*scores, std=0.0):
        rows = [
            {"dataset": d, "clip": c, "metric": "accuracy", "mean": m, "std": std, "n": "3",
             "seeds": "3", "unfair": "", "learns": True}
            for d, c, m in scores
        ]  # fmt: skip
        return [o.held for o in check(test, "", pd.DataFrame(rows))]

    assert held(("a", "1", 0.5), ("a", "2", 0.6), ("a", "4", 0.1)) == [True]
    assert held(("a", "1", 0.7), ("a", "2", 0.6), ("a", "4", 0.1)) == [False]
    # no worse than the best
    assert held(("a", "1", 0.6), ("a", "2", 0.6), ("a", "4", 0.1)) == [True]
    assert held(("a", "1", 0.5), ("a", "2", 0.6)) == []
    assert held(
        *[("a", c, 0.1) for c in "124"], ("b", "1", 1.0), ("b", "2", 0.0), ("b", "4", 0.0)
    ) == [True, False]
    # who is higher by less than chance is neither the best nor beaten
    for one, other in ((0.7, 0.6), (0.6, 0.7)):
        assert held(("a", "1", one), ("a", "2", other), ("a", "4", 0.1), std=0.1) == [None]
    assert held(("a", "1", 0.1), ("a", "2", 0.9), ("a", "4", 0.1), std=0.1) == [True]
