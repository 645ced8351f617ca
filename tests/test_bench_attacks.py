"""The attacks' bench: both engines take the same steps; its file is whole. Nothing is timed."""

import pandas as pd
import pytest
import torch

from fl_privacy_lib.attacks import Attack, reconstruct
from fl_privacy_lib.reproduction.paths import MEASURED
from tools import bench_attacks


def test_both_engines_take_the_same_steps(double):
    view = bench_attacks.scene("digits", 2)
    attack = Attack(max_iterations=2, stop_loss=1e-30, restarts=0)
    alone, evaluations = bench_attacks.one_at_a_time(view, 2, attack)
    ours = reconstruct(
        view.model, view.observations, view.shape, attack, labels=view.labels[:, None]
    )
    assert evaluations == 2 * 2 * (attack.steps + 1), (
        "the optimiser's own, and one that reads the objective"
    )
    torch.testing.assert_close(ours.images[:, 0], alone.clamp(0, 1), rtol=0, atol=1e-9)
    assert (alone - view.images).abs().max() > 0.1, (
        "still on its way: that both have arrived would say less"
    )


def test_a_bench_writes_every_engine_and_keeps_other_data_sets(tmp_path):
    path = tmp_path / "bench.csv"
    other_row = dict.fromkeys(bench_attacks.COLUMNS, "1") | {"dataset": "other"}
    pd.DataFrame([other_row]).to_csv(path, index=False)
    bench_attacks.bench(["digits"], victims=2, iterations=1, repetitions=1, path=path, counts=(2,))
    frame = pd.read_csv(path)
    assert list(frame.columns) == bench_attacks.COLUMNS
    assert list(frame["dataset"]) == ["other", "digits", "digits"]
    digits = frame[frame["dataset"] == "digits"]
    assert list(digits["engine"]) == ["one_at_a_time", "ours"]
    assert (digits["ms_per_victim_evaluation"] > 0).all() and digits["success_rate"].between(
        0, 1
    ).all()


@pytest.mark.parametrize("dataset", bench_attacks.DATASETS)
def test_the_record_has_both_engines_at_every_number_of_victims(dataset):
    frame = pd.read_csv(MEASURED / "attack_performance.csv")
    assert list(frame.columns) == bench_attacks.COLUMNS
    rows = frame[frame["dataset"] == dataset]
    counts = set(rows[["engine", "victims"]].itertuples(index=False, name=None))
    assert counts == {
        (engine, count) for engine in ("one_at_a_time", "ours") for count in bench_attacks.COUNTS
    }
    assert (rows["paired_victims"] >= 100).all(), "a rate of fewer says too little"
    rates = rows.groupby("engine")["success_rate"].first()
    assert abs(rates["ours"] - rates["one_at_a_time"]) <= 0.05
