"""Checkpoints: a stopped run goes on bit by bit, from the last round that was saved."""

import pytest
import torch
from defense_scenes import plan_of, setting
from dynamic_parameters_scenes import BATCH, ENGINES, FALLING

from fl_privacy_lib.defenses import quantile_clipped
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.sampling import Plan


class Interrupted(Exception):
    """The reader's Ctrl-C."""


def finished_in(path):
    return len(torch.load(path, weights_only=True)["history"]) if path.exists() else 0


STATEFUL = quantile_clipped(clip_norm=0.5, noise_scale=1.0, scope="layer", count_scale=1.0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["batch", "largest", "stateful"])
@pytest.mark.parametrize("stop", [0, 2, 5])
def test_a_run_goes_on_bit_identically_at_its_last_saved_round(kind, stop, engine, tmp_path):
    """Of 7 rounds, the third, the sixth and the last are saved."""
    if (kind, engine) == ("stateful", "stacked"):
        return  # it knows no such rule
    defense = STATEFUL if kind == "stateful" else FALLING[kind]
    model, train, partition = setting()
    path, rounds = tmp_path / "state.pt", []
    plan = Plan(4, 3, 7, 2, BATCH, batch_sampling="poisson", local_lr=0.5)
    about = (model, train, partition, plan, defense)
    options = {"engine": engine, "evaluation": train, "evaluate_every": 2}
    whole = simulate(*about, **options)

    def note(report):
        rounds.append((report.round, finished_in(path)))
        if report.round == stop:
            raise Interrupted

    saved = {"checkpoint": path, "save_every": 3, "resume": True}
    with pytest.raises(Interrupted):
        simulate(*about, **options, **saved, on_round=note)
    last = {0: 0, 2: 3, 5: 6}[stop]
    first, rounds[:], stop = list(rounds), [], None
    again = simulate(*about, **options, **saved, on_round=note)
    written = {0: 0, 1: 0, 2: 3, 3: 3, 4: 3, 5: 6, 6: 7}
    assert first == [(t, written[t]) for t in range(len(first))]
    assert rounds == [(t, written[t]) for t in range(last, 7)]
    assert again.history == whole.history
    assert all(torch.equal(again.weights[n], w) for n, w in whole.weights.items())
    start = dict(model.named_parameters())
    assert not any(torch.equal(w, start[n]) for n, w in again.weights.items())


def test_between_two_saves_the_file_is_left_alone(tmp_path):
    model, train, partition = setting()
    path, seen = tmp_path / "state.pt", []

    def note(report):
        seen.append(path.exists() and path.stat().st_mtime_ns + path.stat().st_ino)

    plan = plan_of(BATCH, rounds=5, local_iterations=1)
    simulate(model, train, partition, plan, FALLING["batch"], on_round=note, checkpoint=path,
             save_every=2)  # fmt: skip
    assert not seen[0] and seen[1] == seen[2] and seen[3] != seen[2] and seen[4] != seen[3]


def test_an_interruption_between_two_saves_costs_the_rounds_since(tmp_path):
    model, train, partition = setting()
    path, rounds = tmp_path / "state.pt", []
    plan = plan_of(BATCH, rounds=5, local_iterations=1)
    about = (model, train, partition, plan, FALLING["batch"])

    def stop(report):
        if report.round == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        simulate(*about, checkpoint=path, save_every=2, on_round=stop)
    simulate(*about, checkpoint=path, save_every=2, resume=True,
             on_round=lambda r: rounds.append(r.round))  # fmt: skip
    assert rounds == [2, 3, 4]
