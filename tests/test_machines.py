"""More than one machine: what processes compare, where they resume, and how they fail."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from federated_scenes import plan_of, same, setting
from hypothesis import given
from hypothesis import strategies as st
from machine_scenes import (
    ENVIRONMENT,
    PLAN,
    ROOT,
    SERVER_STATE,
    TAPS,
    TESTS,
    scaling,
    started,
    stop_after_round_1,
    torchrun,
    trained,
    wait_for,
    write_stale,
)

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses import fed_cdp, non_private
from fl_privacy_lib.defenses.noise import add_noise, keyed_generator
from fl_privacy_lib.federated import Tap, simulate, simulation
from fl_privacy_lib.federated.checkpoints import digest

# ---- two processes of torchrun


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return what each of two processes met, scene by scene."""
    folder = tmp_path_factory.mktemp("machines")
    write_stale(folder)
    torchrun(TESTS / "machine_scenes.py", folder)
    return [torch.load(folder / f"outcomes_{rank}", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def alone():
    return trained()


def equal(one, other):
    """Return whether two runs have the same bits, but for accuracies, of the first process only."""
    tables = []
    for run in (one, other):
        rounds = [(r.round, r.participants) for r in run["history"]]
        at_taps = [sorted(run[what].items(), key=str) for what in ("observations", "truth")]
        tables.append([run["weights"], rounds, at_taps])
    return digest(tables[0]) == digest(tables[1]) and same(one["weights"], other["weights"])


@pytest.mark.long
@pytest.mark.parametrize(
    "scene", ["right", "resumed", "resumed beside a stale file", "right again"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_process_ends_with_the_bits_of_one(outcomes, alone, scene, rank):
    assert set(alone["observations"]) == set(TAPS)
    assert equal(outcomes[rank][scene], alone), outcomes[rank][scene]


@pytest.mark.long
@pytest.mark.parametrize(
    "part", ["plan", "defence", "training data", "partition", "initial weights", "taps", "engine"]
)
def test_processes_that_were_given_different_runs_say_in_what(outcomes, part):
    for kind, message in (outcome[part] for outcome in outcomes):
        assert kind == "InputError"
        assert f"not given the same run (process 1 differs from process 0 in its {part})" in message


def test_all_that_differs_is_named(outcomes):
    for outcome in outcomes:
        assert "differs from process 0 in its plan, taps)" in outcome["two parts"][1]


def test_the_guard_for_clients_with_a_memory_counts_the_processes(outcomes):
    for kind, message in (outcome["state of clients"] for outcome in outcomes):
        assert kind == "InputError" and "'counting' keeps a state" in message and "now 2" in message


def test_an_error_of_one_process_is_every_process_s(outcomes):
    first, second = (outcome["an error in one"] for outcome in outcomes)
    assert first == second and first[0] == "InputError" and "lies outside the plan" in first[1]
    first, second = (outcome["a broken client"] for outcome in outcomes)
    assert second == ("ValueError", "client 3 is broken")
    assert first == ("WorkerError", "worker 1 ended with ValueError: client 3 is broken")
    first, second = (outcome["stopped by the first"] for outcome in outcomes)
    assert first == ("Stopped", "seen enough")
    assert (
        second[0] == "WorkerError"
        and second[1].startswith("worker 0 ended with")
        and "seen enough" in second[1]
    )


def test_workers_are_not_started_inside_of_workers(outcomes):
    for outcome in outcomes:
        assert outcome["too many workers"] == (
            "InputError",
            "workers = 3, but 2 processes have been started from outside: use workers = 1.",
        )


def test_only_the_first_process_writes_and_reads_a_checkpoint(outcomes):
    assert outcomes[0]["files"] == ["0/run.pt", "stale.pt"]
    for kind, message in (outcome["damaged"] for outcome in outcomes):
        assert kind == "InputError" and re.search(r"0/run\.pt is damaged .* delete it", message)


def test_one_process_of_a_launcher_that_cannot_be_joined_says_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(
        InputError, match=r"WORLD_SIZE = 2 .* MASTER_ADDR .* start them with torchrun, or unset"
    ):
        trained()


# ---- the page's own script


def script_of_the_page():
    """Return the one Python block of the page."""
    (block,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "book" / "machines.md").read_text(), re.M | re.S
    )
    return block


@pytest.mark.long
def test_the_page_s_script_gives_the_same_weights_with_torchrun_and_without(tmp_path):
    weights = []
    for way in ("alone", "torchrun"):
        folder = tmp_path / way
        folder.mkdir()
        (folder / "train.py").write_text(script_of_the_page())
        if way == "alone":
            subprocess.run(
                [sys.executable, "train.py"], cwd=folder, env=ENVIRONMENT, check=True, timeout=300
            )
        else:
            torchrun("train.py", cwd=folder)
        assert {path.name for path in folder.iterdir()} == {
            "train.py",
            "weights.pt",
            "checkpoint.pt",
        }
        weights.append(torch.load(folder / "weights.pt"))
    assert same(*weights)


def test_who_knows_the_seed_subtracts_the_noise():
    """The warning at the page's end."""
    defense, tap = fed_cdp("batch"), Tap("batch", 1)
    plan = plan_of(participants=4)
    noisy, clean = (
        simulate(*setting("mlp"), plan, d, taps=[tap]) for d in (defense, defense.noiseless())
    )
    released, secret = (run.observations[tap].values for run in (noisy, clean))
    zeros = {name: torch.zeros_like(v)[None] for name, v in released.items()}
    noise = add_noise(
        zeros, 6.0 * 4.0 / plan.batch_size, [keyed_generator(torch.device("cpu"), plan.seed, 0, 1)]
    )
    for name, value in released.items():
        assert (value - secret[name]).abs().mean() > 1
        assert torch.allclose(value - noise[name][0], secret[name], atol=1e-4)


# ---- how processes end

SLOW = """
import sys, time
from dataclasses import dataclass
from federated_scenes import plan_of, setting
from fl_privacy_lib.defenses import Defense
from fl_privacy_lib.defenses import fed_cdp, non_private
from fl_privacy_lib.defenses.noise import add_noise, keyed_generator
from fl_privacy_lib.federated import Tap, simulate, simulation

@dataclass(frozen=True)
class Slow:
    def __call__(self, values, ctx):
        open(sys.argv[1] + f"/{ctx.clients[0]}", "w").close()
        time.sleep(600)
        return values

if __name__ == "__main__":
    slow = Defense("slow", per_client=Slow())
    simulate(*setting("mlp"), plan_of(participants=4), slow, workers=2)
"""


@pytest.mark.long
@pytest.mark.parametrize("stop", ["ctrl_c", "kill"])
def test_whatever_ends_the_first_process_ends_every_worker(tmp_path, stop):
    (tmp_path / "slow.py").write_text(SLOW)
    marks = tmp_path / "marks"
    marks.mkdir()
    with started("slow.py", str(marks), cwd=tmp_path, env=ENVIRONMENT) as process:
        wait_for(process, lambda: len(list(marks.iterdir())) >= 2)
        assert len(list(marks.iterdir())) == 2, "one client in each process"
        if stop == "ctrl_c":
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        else:
            process.kill()
        _, stderr = process.communicate(timeout=60)
        assert process.returncode != 0 and ("KeyboardInterrupt" in stderr) == (stop == "ctrl_c")
        with pytest.raises(ProcessLookupError):  # nobody of the session is left
            for _ in range(100):
                os.killpg(process.pid, 0)
                time.sleep(0.1)


def test_no_worker_is_started_that_would_have_no_client(monkeypatch):
    started_with = []
    monkeypatch.setattr(simulation, "launch", lambda workers, *_: started_with.append(workers))
    with pytest.raises(TypeError):  # what is patched in starts nothing
        simulate(*setting("mlp"), plan_of(participants=2), non_private(), workers=50)
    assert started_with == [2]


@pytest.mark.long
def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    unguarded = SLOW.replace('if __name__ == "__main__":', "if True:")
    assert unguarded != SLOW
    (tmp_path / "unguarded.py").write_text(unguarded)
    done = subprocess.run(
        [sys.executable, "unguarded.py", str(tmp_path)],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (
        done.returncode == 1
        and "keeps what it runs under `if __name__ == '__main__':`" in done.stderr
    )


# ---- checkpoints


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Return the bytes of a checkpoint after two rounds of four."""
    path = tmp_path_factory.mktemp("checkpoint") / "run.pt"
    with pytest.raises(Exception, match="seen enough"):
        trained(checkpoint=path, on_round=stop_after_round_1)
    return path.read_bytes()


def truncated(path, content):
    path.write_bytes(content[: len(content) // 3])


def empty(path, content):
    path.write_bytes(b"")


def text(path, content):
    path.write_text("no checkpoint")


def other_tensors(path, content):
    torch.save({"weights": torch.zeros(2)}, path)


def code(path, content):
    torch.save(
        {"weights": SERVER_STATE}, path
    )  # a class of one's own could run anything while it is loaded


def folder(path, content):
    path.mkdir()


@pytest.mark.parametrize(
    "damage", [truncated, empty, text, other_tensors, code, folder], ids=lambda d: d.__name__
)
def test_a_damaged_checkpoint_is_named_with_a_remedy(tmp_path, interrupted, damage):
    path = tmp_path / "run.pt"
    damage(path, interrupted)
    remedy = "a file in it" if damage is folder else "delete it, or name another one"
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))} is .*{remedy}\.$"):
        trained(checkpoint=path, resume=True)


def test_a_folder_is_no_checkpoint_to_write_either(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        trained(checkpoint=tmp_path)
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*"))


OTHERS = {
    "plan": lambda: {"plan": plan_of(participants=4, rounds=4, seed=1)},
    "defence": lambda: {"defense": scaling(2.0), "taps": ()},
    "training data": lambda: {"train": tuple(t.flip(0) for t in setting("mlp")[1])},
    "engine": lambda: {"engine": "stacked"},
}


@pytest.mark.parametrize("part", OTHERS)
def test_a_checkpoint_says_in_what_another_run_differs(tmp_path, interrupted, part):
    path = tmp_path / "run.pt"
    path.write_bytes(interrupted)
    with pytest.raises(
        InputError, match=rf"belongs to a run with other settings \({part}.*\): delete it"
    ):
        trained(checkpoint=path, resume=True, **OTHERS[part]())
    assert equal(trained(checkpoint=path, resume=True), trained())


# ---- fingerprints

values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values, values)
def test_digests_are_equal_where_the_written_values_are(one, other):
    assert (digest(one) == digest(other)) == (repr(one) == repr(other))


class Plain:
    """A stage with neither fields nor a repr of its own."""

    def __init__(self, bound):
        self.bound = bound
        self.itself = self


def adding(amount):
    return lambda value: value + amount


PAIRS = {
    "the last value of a long tensor": (
        torch.zeros(5000),
        torch.zeros(5000).index_fill(0, torch.tensor([4999]), 1e-9),
    ),
    "a kind of number": (torch.zeros(4, dtype=torch.float32), torch.zeros(2, dtype=torch.float64)),
    "a shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "an attribute": (Plain(1.0), Plain(2.0)),
    "what a function closes over": (adding(1), adding(2)),
    "what a function says": (lambda value: value + 1, lambda value: value + 2),
    "a default": (lambda value=1: value, lambda value=2: value),
    "a set": ({1, 2}, {1, 3}),
    "where a list ends": ([[1], 2], [[1, 2]]),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_digest_sees_what_a_repr_may_hide(pair):
    one, other = PAIRS[pair]
    assert digest(one) != digest(other) and digest(one) == digest(one)


def test_a_digest_does_not_see_where_a_value_lies():
    assert digest(Plain(1.0)) == digest(Plain(1.0)) and digest(adding(1)) == digest(adding(1))
    assert digest(torch.arange(6).reshape(2, 3).T) == digest(
        torch.arange(6).reshape(2, 3).T.contiguous()
    )
    assert digest({"b", "a", "c"}) == digest({"c", "b", "a"})


def test_a_run_of_one_process_needs_no_fingerprint(monkeypatch):
    monkeypatch.setattr("fl_privacy_lib.federated.checkpoints.fingerprint", None)
    simulate(*setting("mlp"), PLAN, SERVER_STATE)
