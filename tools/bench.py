"""What private training costs: engines interleaved in one run, one thread, medians of process time.

Times on a shared machine drift, so every engine is measured in every repetition and only ratios are compared. Rows of
100 clients are wall times, since two processes share the work; their memory is one process's.
Run with ``make bench`` or ``python -m tools.bench [workload …]``.
"""

import argparse
import datetime
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn.functional import conv2d, cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import fl_privacy_lib
from fl_privacy_lib.accounting.rdp import PAPER_ORDERS, integer_rdp
from fl_privacy_lib.chapters.fast_training.engines import (
    CENTRALISED,
    CLIP_NORM,
    FEDERATED,
    NOISE_SCALE,
    Engine,
    Scene,
    Written,
    fast,
    interleaved,
    local_training,
    noise_alone,
    ratio,
)
from fl_privacy_lib.defenses import fed_cdp, non_private
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.models import Parameters
from fl_privacy_lib.reproduction.paths import MEASURED, ROOT
from fl_privacy_lib.reproduction.progress import say
from fl_privacy_lib.reproduction.records import other_rows, write_table

COLUMNS = ["workload", "engine", "participants", "workers", "ms_per_client_iteration", "peak_mib", "version", "date"]


WORKLOADS = {"mnist_cnn": FEDERATED["mnist"], "cifar10_cnn": FEDERATED["cifar10"], "adult_mlp": FEDERATED["adult"]}


def opacus(mode: str) -> Engine:
    """Return the round with Opacus' per-layer optimiser in one of its modes, 'hooks' or 'ew'."""

    def run(scene: Scene) -> Parameters:
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

        update = local_training(scene, step)
        if hasattr(wrapped, "remove_hooks"):
            wrapped.remove_hooks()
        for p in scene.model.parameters():
            p.grad_sample, p.summed_grad, p.grad = None, None, None  # type: ignore[attr-defined]
        return update

    return run


PRIVATE = fed_cdp(clip_norm=CLIP_NORM, noise_scale=NOISE_SCALE)
ENGINES: dict[str, Engine] = {
    "naive": Written(),
    "opacus_hooks": opacus("hooks"),
    "opacus_ew": opacus("ew"),
    "plain_non_private": Written(None),
    "ours_private": fast(PRIVATE),
    "ours_non_private": fast(non_private()),
    "noise_alone": noise_alone,
}
COMPILED: dict[str, Engine] = {
    "compiled_private": fast(PRIVATE, engine="compiled"),
    "compiled_non_private": fast(non_private(), engine="compiled"),
}
"""Measured in the same run, where numba is installed."""


def engines() -> dict[str, Engine]:
    """Return the engines that can run here."""
    return ENGINES | (COMPILED if find_spec("numba") else {})


def measured_ms(workload: str, participants: int, iterations: int, repetitions: int) -> dict[str, float]:
    """Return each engine's median process time in ms per (client, local iteration), all engines interleaved."""
    times = interleaved(engines(), WORKLOADS[workload].scene(participants, iterations), repetitions)
    return {name: median(values) for name, values in times.items()}


def central_ms(dataset: str, repetitions: int) -> dict[str, list[float]]:
    """Return the process times in ms of a batch of one client that holds everything, noised once, by engine."""
    private = fed_cdp("batch", clip_norm=CLIP_NORM, noise_scale=NOISE_SCALE)
    both = {engine: fast(private, engine=engine) for engine in ("stacked", "compiled")}
    return interleaved(both, CENTRALISED[dataset].scene(1, 2), repetitions)


def worker_ms(workload: str, workers: int, rounds: int = 3, engine: str = "stacked") -> float:
    """Return the wall time of a (client, local iteration) of 100 clients, without the workers' start, in ms."""
    scene, stamps = WORKLOADS[workload].scene(100, 10), list[float]()
    plan = replace(scene.plan, rounds=rounds + 1)
    simulate(
        scene.model, (scene.x, scene.y), scene.partition, plan, PRIVATE, engine=engine, workers=workers,
        on_round=lambda _: stamps.append(time.perf_counter()),
    )  # fmt: skip
    return 1000 * (stamps[-1] - stamps[0]) / (rounds * 1000)


def peak_share(workload: str, ms: float) -> float:
    """Return the share of this machine's matrix-product peak that the private engine's own products reach.

    The peak is the best of products of 1,024 × 1,024 and of the library's convolution; counted are the forward pass and
    the two products of the backward pass (one in the first layer).
    """
    work = WORKLOADS[workload]
    model, x = work.build(), torch.rand(work.batch_size, *work.shape)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()
    a, images, kernel = torch.rand(1024, 1024), torch.rand(10, 64, 28, 28), torch.rand(64, 64, 3, 3)
    products: list[tuple[float, Callable[[], object]]] = [
        (2 * 1024**3, lambda: a @ a),
        (2 * 10 * 26 * 26 * 64 * 64 * 9, lambda: conv2d(images, kernel)),
    ]
    peak = 0.0
    for count, product in products:
        times = []
        for _ in range(20):
            started = time.process_time()
            product()
            times.append(time.process_time() - started)
        peak = max(peak, count / median(times))
    return counter.get_total_flops() / (peak * ms / 1000)


def peak_mib(workload: str, engine: str, participants: int) -> float:
    """Return the peak memory of a fresh process that runs one round of two iterations, in MiB."""
    command = [sys.executable, "-m", "tools.bench", "--peak", workload, engine, str(participants)]
    return float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def _own_peak_mib() -> float:
    """Return this process's peak memory; getrusage would also count the parent that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) / 1024  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ratios(ms: dict[str, float]) -> dict[str, float]:
    """Return the ratios by which the engine is judged."""
    best = min(ms[name] for name in ms if name.startswith("opacus"))
    compiled = ms.get("compiled_private")
    faster = {} if compiled is None else {
        "naive / compiled private": ms["naive"] / compiled,
        "best Opacus / compiled private": best / compiled,
        "compiled private / plain non-private": compiled / ms["plain_non_private"],
        "compiled private / compiled non-private": compiled / ms["compiled_non_private"],
        "ours private / compiled private": ms["ours_private"] / compiled,
    }  # fmt: skip
    return faster | {
        "naive / ours private": ms["naive"] / ms["ours_private"],
        "best Opacus / ours private": best / ms["ours_private"],
        "ours private / plain non-private": ms["ours_private"] / ms["plain_non_private"],
        "ours private / ours non-private": ms["ours_private"] / ms["ours_non_private"],
        "ours private / (ours non-private + noise)": ms["ours_private"] / (ms["ours_non_private"] + ms["noise_alone"]),
    }


def bench(workloads: list[str], repetitions: int, path: Path) -> None:
    """Measure, print the ratios, and write one row an engine, as soon as its workload is done."""
    for workload in workloads:
        rows = other_rows(path, "workload", [workload])
        ms = measured_ms(workload, 20, 10, repetitions)
        ms["opacus"] = min(ms["opacus_hooks"], ms["opacus_ew"])
        for name, value in ms.items():
            if not name.startswith("opacus_"):
                engine = min(("opacus_hooks", "opacus_ew"), key=ms.__getitem__) if name == "opacus" else name
                rows.append(_row(workload, name, 20, 1, value, peak_mib(workload, engine, 20)))
        scene = WORKLOADS[workload].scene(1000, 2)
        started = time.process_time()
        ENGINES["ours_private"](scene)
        value = 1000 * (time.process_time() - started) / 2000
        rows.append(_row(workload, "ours_private", 1000, 1, value, peak_mib(workload, "ours_private", 1000)))
        walls = [(worker_ms(workload, 1), worker_ms(workload, 2)) for _ in range(repetitions)]
        memory = peak_mib(workload, "ours_private", 100)
        for workers, wall in zip((1, 2), zip(*walls, strict=True), strict=True):
            rows.append(_row(workload, "ours_private", 100, workers, median(wall), memory))
        write_table(path, pd.DataFrame(rows, columns=COLUMNS))
        say(f"{workload}: " + ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items()))
        for name, value in ratios(ms).items():
            say(f"  {name}: {value:.2f}")
        say(f"  1 worker / 2 workers, wall, median of pairs: {median(a / b for a, b in walls):.2f}")
        say(f"  share of the matrix-product peak: {peak_share(workload, ms['ours_private']):.2f}")
        if "compiled_private" in ms:
            pairs = [[worker_ms(workload, n, engine="compiled") for n in (1, 2)] for _ in range(repetitions)]
            say(f"  compiled: 1 worker / 2 workers, wall, median of pairs: {median(a / b for a, b in pairs):.2f}")


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
        engines()[engine](WORKLOADS[workload].scene(int(participants), 2))
        print(_own_peak_mib())
        return
    bench(options.workloads, options.repetitions, options.out)
    if find_spec("numba"):
        for dataset in ("mnist", "cifar10"):
            value = ratio(central_ms(dataset, options.repetitions), "stacked", "compiled")[0]
            say(f"centralised {dataset}: stacked / compiled {value:.2f}")
    say(f"accounting: 10,000 distinct σ in {accounting_seconds():.2f} s")


if __name__ == "__main__":
    main()
