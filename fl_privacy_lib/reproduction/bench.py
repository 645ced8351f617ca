"""What private training costs: engines interleaved in one run, one thread, medians of process time.

Times on a shared machine drift, so every engine is measured in every repetition and only ratios are compared.
Run with ``make bench`` or ``python -m fl_privacy_lib.reproduction.bench [workload …]``.
"""

import argparse
import datetime
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fl_privacy_lib
from fl_privacy_lib.accounting.rdp import PAPER_ORDERS, integer_rdp
from fl_privacy_lib.data import iid
from fl_privacy_lib.defenses import Defense, fed_cdp, non_private
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.models import init_glorot, mlp, training_cnn
from fl_privacy_lib.reproduction.paths import MEASURED
from fl_privacy_lib.reproduction.progress import say
from fl_privacy_lib.reproduction.records import write_atomically
from fl_privacy_lib.sampling import Plan

CLIP_NORM, NOISE_SCALE = 4.0, 6.0
COLUMNS = ["workload", "engine", "participants", "workers", "ms_per_client_iteration", "peak_mib", "version", "date"]


@dataclass(frozen=True)
class Workload:
    """A network, its batch size and the shape of its synthetic examples."""

    build: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    batch_size: int
    classes: int = 10

    def scene(self, participants: int, iterations: int) -> "Scene":
        """Return the model, data, partition and plan of one round."""
        generator = torch.Generator().manual_seed(0)
        model = init_glorot(self.build(), generator)
        size = iterations * self.batch_size
        x = torch.rand(participants * size, *self.shape, generator=generator)
        y = torch.randint(self.classes, (len(x),), generator=generator)
        plan = Plan(participants, participants, 1, iterations, self.batch_size, local_lr=0.01)
        return Scene(model, x, y, iid(len(x), participants, size, np.random.default_rng(0)), plan)


WORKLOADS = {
    "mnist_cnn": Workload(lambda: training_cnn((1, 28, 28), 10), (1, 28, 28), 5),
    "cifar10_cnn": Workload(lambda: training_cnn((3, 32, 32), 10), (3, 32, 32), 4),
    "adult_mlp": Workload(lambda: mlp(105, 2), (105,), 3, 2),
}


@dataclass(frozen=True)
class Scene:
    """One round's work, the same for every engine."""

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    partition: object
    plan: Plan

    def batches(self) -> list[list[np.ndarray]]:
        """Return every client's batches as positions in x."""
        own = self.partition.indices  # type: ignore[attr-defined]
        return [[own[c][b] for b in self.plan.batches(c, len(own[c]), 0)] for c in range(self.plan.clients)]


def local_training(scene: Scene, step: Callable[[nn.Module, torch.Tensor, torch.Tensor], None]) -> None:
    """Run a round as people write it: a loop over clients and batches, and the mean of the results."""
    start = [p.detach().clone() for p in scene.model.parameters()]
    total = [torch.zeros_like(p) for p in start]
    for batches in scene.batches():
        with torch.no_grad():
            for p, w in zip(scene.model.parameters(), start, strict=True):
                p.copy_(w)
        for batch in batches:
            step(scene.model, scene.x[batch], scene.y[batch])
        for t, p in zip(total, scene.model.parameters(), strict=True):
            t += p.detach() / scene.plan.participants
    with torch.no_grad():
        for p, w in zip(scene.model.parameters(), start, strict=True):
            p.copy_(w)


def naive(scene: Scene) -> None:
    """Run Fed-CDP as printed: one backward pass, one clip and one draw of noise for every example."""

    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        parameters = list(model.parameters())
        total = [torch.zeros_like(p) for p in parameters]
        for i in range(len(x)):
            gradients = torch.autograd.grad(cross_entropy(model(x[i : i + 1]), y[i : i + 1]), parameters)
            for t, g in zip(total, gradients, strict=True):
                t += g / max(1.0, float(g.norm()) / CLIP_NORM) + NOISE_SCALE * CLIP_NORM * torch.randn_like(g)
        with torch.no_grad():
            for p, t in zip(parameters, total, strict=True):
                p.sub_(t, alpha=scene.plan.local_lr / len(x))

    local_training(scene, step)


def plain_non_private(scene: Scene) -> None:
    """Run plain federated averaging: a PyTorch loop with SGD."""
    optimiser = torch.optim.SGD(scene.model.parameters(), lr=scene.plan.local_lr)

    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        optimiser.zero_grad()
        cross_entropy(model(x), y).backward()
        optimiser.step()

    local_training(scene, step)


def opacus(mode: str) -> Callable[[Scene], None]:
    """Return the round with Opacus' per-layer optimiser in one of its modes, 'hooks' or 'ew'."""

    def run(scene: Scene) -> None:
        from opacus.grad_sample.utils import wrap_model
        from opacus.optimizers import DPPerLayerOptimizer

        wrapped = wrap_model(scene.model, grad_sample_mode=mode, loss_reduction="mean", batch_first=True)
        count = len(list(scene.model.parameters()))
        optimiser = DPPerLayerOptimizer(
            torch.optim.SGD(scene.model.parameters(), lr=scene.plan.local_lr), noise_multiplier=NOISE_SCALE,
            max_grad_norm=[CLIP_NORM] * count, expected_batch_size=scene.plan.batch_size,
        )  # fmt: skip

        def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
            optimiser.zero_grad()
            cross_entropy(wrapped(x), y).backward()
            optimiser.step()

        local_training(scene, step)
        if hasattr(wrapped, "remove_hooks"):
            wrapped.remove_hooks()
        for p in scene.model.parameters():
            p.grad_sample, p.summed_grad, p.grad = None, None, None  # type: ignore[attr-defined]

    return run


def ours(defense: Defense, workers: int = 1, chunk: int | None = None) -> Callable[[Scene], None]:
    """Return the round through the library's fast engine."""

    def run(scene: Scene) -> None:
        simulate(scene.model, (scene.x, scene.y), scene.partition, scene.plan, defense,  # type: ignore[arg-type]
                 engine="stacked", workers=workers, clients_per_chunk=chunk)  # fmt: skip

    return run


def noise_alone(scene: Scene) -> None:
    """Draw the fast engine's noise and nothing else."""
    row = torch.empty(sum(p.numel() for p in scene.model.parameters()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(scene.plan.participants * scene.plan.local_iterations):
        row.normal_(0, 1, generator=generator)


ENGINES: dict[str, Callable[[Scene], None]] = {
    "naive": naive,
    "opacus_hooks": opacus("hooks"),
    "opacus_ew": opacus("ew"),
    "plain_non_private": plain_non_private,
    "ours_private": ours(fed_cdp(clip_norm=CLIP_NORM, noise_scale=NOISE_SCALE)),
    "ours_non_private": ours(non_private()),
    "noise_alone": noise_alone,
}


def measured_ms(workload: str, participants: int, iterations: int, repetitions: int) -> dict[str, float]:
    """Return each engine's median process time in ms per (client, local iteration), all engines interleaved."""
    scene = WORKLOADS[workload].scene(participants, iterations)
    times: dict[str, list[float]] = {name: [] for name in ENGINES}
    for repetition in range(repetitions + 1):
        for name, run in ENGINES.items():
            started = time.process_time()
            run(scene)
            if repetition:  # the first one warms the caches up
                times[name].append(time.process_time() - started)
    return {name: 1000 * median(t) / (participants * iterations) for name, t in times.items()}


def peak_mib(workload: str, engine: str, participants: int) -> float:
    """Return the peak memory of a fresh process that runs one round of two iterations, in MiB."""
    command = [sys.executable, "-m", "fl_privacy_lib.reproduction.bench", "--peak", workload, engine, str(participants)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _own_peak_mib() -> float:
    """Return this process's peak memory; getrusage would also count the parent that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) / 1024  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ratios(ms: dict[str, float]) -> dict[str, float]:
    """Return the ratios by which the engine is judged."""
    best = min(ms[name] for name in ms if name.startswith("opacus"))
    return {
        "naive / ours private": ms["naive"] / ms["ours_private"],
        "best Opacus / ours private": best / ms["ours_private"],
        "ours private / plain non-private": ms["ours_private"] / ms["plain_non_private"],
        "ours private / ours non-private": ms["ours_private"] / ms["ours_non_private"],
        "ours private / (ours non-private + noise)": ms["ours_private"] / (ms["ours_non_private"] + ms["noise_alone"]),
    }


def bench(workloads: list[str], repetitions: int, path: Path) -> None:
    """Measure, print the ratios, and write one row an engine, as soon as its workload is done."""
    old = pd.read_csv(path, dtype=str).to_dict("records") if path.exists() else []
    rows: list[dict[Any, Any]] = list(old)
    for workload in workloads:
        rows = [row for row in rows if row["workload"] != workload]
        ms = measured_ms(workload, 20, 10, repetitions)
        ms["opacus"] = min(ms["opacus_hooks"], ms["opacus_ew"])
        for name, value in ms.items():
            if not name.startswith("opacus_"):
                engine = min(("opacus_hooks", "opacus_ew"), key=ms.__getitem__) if name == "opacus" else name
                rows.append(_row(workload, name, 20, 1, value, peak_mib(workload, engine, 20)))
        for participants in (100, 1000):
            scene = WORKLOADS[workload].scene(participants, 2)
            started = time.process_time()
            ENGINES["ours_private"](scene)
            value = 1000 * (time.process_time() - started) / (participants * 2)
            memory = peak_mib(workload, "ours_private", participants)
            rows.append(_row(workload, "ours_private", participants, 1, value, memory))
        write_atomically(path, pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False, lineterminator="\n").encode())
        say(f"{workload}: " + ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items()))
        for name, value in ratios(ms).items():
            say(f"  {name}: {value:.2f}")


def accounting_seconds(distinct: int = 10_000) -> float:
    """Return the process time of Rényi accounting over a schedule in which no two steps share a σ."""
    noise = np.linspace(15.0, 4.85, distinct)
    started = time.process_time()
    integer_rdp(np.full(distinct, 0.01), noise, tuple(o for o in PAPER_ORDERS if o == int(o)))
    return time.process_time() - started


def _row(workload: str, engine: str, participants: int, workers: int, ms: float, peak: float) -> dict[Any, Any]:
    return {
        "workload": workload, "engine": engine, "participants": participants, "workers": workers,
        "ms_per_client_iteration": f"{ms:.4f}", "peak_mib": f"{peak:.0f}", "version": fl_privacy_lib.__version__,
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def main() -> None:
    """Run the bench from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=MEASURED / "performance.csv")
    parser.add_argument("--peak", nargs=3, metavar=("WORKLOAD", "ENGINE", "PARTICIPANTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        workload, engine, participants = options.peak
        ENGINES[engine](WORKLOADS[workload].scene(int(participants), 2))
        print(_own_peak_mib())
        return
    bench(options.workloads, options.repetitions, options.out)
    say(f"accounting: 10,000 distinct σ in {accounting_seconds():.2f} s")


if __name__ == "__main__":
    main()
