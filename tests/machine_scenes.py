"""What two processes of a launcher do in turn, right and wrong: machine_scenes.py FOLDER."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from federated_scenes import plan_of, setting

from fl_privacy_lib.data.partition import iid
from fl_privacy_lib.defenses import Defense, fed_cdp
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.models import build

TESTS = Path(__file__).parent
ROOT = TESTS.parent
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]),
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node=2",
    "--master-addr=127.0.0.1",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:0",
    "--local-addr=127.0.0.1",
]


@contextmanager
def started(*command, **options):
    """Start Python with a command, in a session of its own, and kill what is left of it."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # whoever runs the tests may ignore Ctrl-C (nohup does), and a process inherits that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(process, ready, seconds=200):
    """Wait until something is ready, or the process or the time has ended."""
    until = time.monotonic() + seconds
    while not ready() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)


def torchrun(script, *arguments, cwd=None):
    """Run a script in two processes that meet at a free port, and return what they print."""
    command = [*TORCHRUN, str(script), *map(str, arguments)]
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


TAPS = (Tap("update", 1, 0), Tap("example", 2, 1), Tap("example", 0, 3), Tap("aggregate", round=2))
PLAN = plan_of(participants=4, rounds=4)


@dataclass(frozen=True)
class Momentum:
    """A server with a memory."""

    def __call__(self, values, ctx):
        velocity = ctx.state["velocity"] if "velocity" in ctx.state else dict.fromkeys(values, 0.0)
        ctx.state["velocity"] = {name: 0.5 * velocity[name] + v for name, v in values.items()}
        return ctx.state["velocity"]


@dataclass(frozen=True)
class Counting:
    """Clients with a memory."""

    def __call__(self, values, ctx):
        seen = ctx.state["participations"] = ctx.state.get("participations", 0) + 1
        return {name: v / seen for name, v in values.items()}


@dataclass(frozen=True)
class Broken:
    """Fails at the last client, which the last process simulates."""

    def __call__(self, values, ctx):
        if ctx.clients[0] == 3:
            raise ValueError("client 3 is broken")
        return values


def scaling(factor):
    return Defense(
        "scaling", per_client=lambda values, ctx: {name: factor * v for name, v in values.items()}
    )


SERVER_STATE = replace(fed_cdp(clip_norm=0.5), on_aggregate=Momentum(), initial_state=dict)
CLIENT_STATE = Defense("counting", per_client=Counting(), initial_state=dict)


class Stopped(Exception):
    pass


def stop_after_round_1(report):
    if report.round == 1:
        raise Stopped("seen enough")


def trained(
    plan=PLAN, defense=SERVER_STATE, model=None, train=None, partition=None, taps=TAPS, **options
):
    """Return the weights, observations and truths of a small run; its parts can be replaced."""
    usual = setting("mlp")
    parts = [
        usual_part if part is None else part
        for part, usual_part in zip((model, train, partition), usual, strict=True)
    ]
    run = simulate(*parts, plan, defense, taps=taps, **options)
    observations = {
        tap: (o.values, o.weights, o.defense["name"]) for tap, o in run.observations.items()
    }
    return {
        "weights": run.weights,
        "observations": observations,
        "truth": run.truth,
        "history": run.history,
    }


def outcome(run, *arguments, **options):
    """Return what a run gives, or the kind and the sentence of its error."""
    try:
        return run(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)


def relabelled(rank):
    _, (x, y), _ = setting("mlp")
    return x, (y + rank * (torch.arange(len(y)) == 0)) % 5


def scenes(rank, folder):
    """Return name → outcome, in one process of two that have the folders 0 and 1."""
    saved = folder / str(rank) / "run.pt"
    outcomes = {
        "right": outcome(trained),
        "state of clients": outcome(trained, defense=CLIENT_STATE),
        "plan": outcome(trained, replace(PLAN, seed=rank)),
        "defence": outcome(trained, defense=scaling(1.0 + rank), taps=()),
        "training data": outcome(trained, train=relabelled(rank)),
        "partition": outcome(trained, partition=iid(24, 4, 6, np.random.default_rng(rank))),
        "initial weights": outcome(
            trained, model=build("mlp", (30,), 5, torch.Generator().manual_seed(rank))
        ),
        "taps": outcome(trained, taps=TAPS[: 2 + rank]),
        "engine": outcome(trained, engine=("generic", "stacked")[rank]),
        "two parts": outcome(trained, replace(PLAN, seed=rank), taps=TAPS[: 2 + rank]),
        "an error in one": outcome(trained, taps=(Tap("update", round=9 * rank),)),
        "too many workers": outcome(trained, workers=3),
        "a broken client": outcome(trained, defense=Defense("broken", per_client=Broken())),
        "stopped by the first": outcome(trained, checkpoint=saved, on_round=stop_after_round_1),
    }
    if rank == 0:
        outcomes["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pt"))
        content = saved.read_bytes()
    outcomes["resumed"] = outcome(trained, checkpoint=saved, resume=True)
    if rank == 0:
        saved.write_bytes(content)
    else:
        saved.parent.mkdir()
        saved.write_bytes((folder / "stale.pt").read_bytes())
    outcomes["resumed beside a stale file"] = outcome(trained, checkpoint=saved, resume=True)
    if rank == 0:
        saved.write_bytes(content[: len(content) // 2])
    outcomes["damaged"] = outcome(trained, checkpoint=saved, resume=True)
    outcomes["right again"] = outcome(trained)
    return outcomes


def write_stale(folder):
    """Leave the checkpoint of another run in a folder."""
    with suppress(Stopped):
        trained(replace(PLAN, seed=7), checkpoint=folder / "stale.pt", on_round=stop_after_round_1)


if __name__ == "__main__":
    import torch.distributed as dist

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    trained_first = outcome(
        trained, taps=()
    )  # joins the launcher's processes; nobody has called init_process_group
    rank = dist.get_rank()
    torch.save(scenes(rank, folder), folder / f"outcomes_{rank}")
