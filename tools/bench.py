"""The cost of private training: engines interleaved in one run, one thread, medians of times.

Times on a shared machine drift, so every engine is measured in every repetition and only ratios are
compared, repetition by repetition. What is shared by two processes or threads is timed by the clock
on the wall. Each row is written as soon as it is measured. Run with ``make bench`` or ``python -m
tools.bench [workload …] [--parts engines workers …]``.
"""

import argparse
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_privacy_lib.accounting.rdp import PAPER_ORDERS, integer_rdp
from fl_privacy_lib.chapters.fast_training.engines import (
    CLIP_NORM,
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
from fl_privacy_lib.chapters.fast_training.grid import CENTRALISED, FEDERATED, compiled_here
from fl_privacy_lib.chapters.fast_training.multiplications import multiplications
from fl_privacy_lib.defenses import fed_cdp, non_private
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.federated.compiled import compiled_form, compiled_hits
from fl_privacy_lib.models import Parameters, parameters_of
from fl_privacy_lib.reproduction.paths import MEASURED, ROOT
from fl_privacy_lib.reproduction.progress import report_progress
from tools.bench_record import Record, Times

WORKLOADS = {
    "mnist_cnn": FEDERATED["mnist"],
    "cifar10_cnn": FEDERATED["cifar10"],
    "adult_mlp": FEDERATED["adult"],
}
CENTRAL = {"mnist_cnn": CENTRALISED["mnist"], "cifar10_cnn": CENTRALISED["cifar10"]}
SIDE = 1024  # of the matrices whose product shows what the machine can do


def opacus(mode: str) -> Engine:
    """Return the round with Opacus' per-layer optimiser in one of its modes, 'hooks' or 'ew'."""

    def run(scene: Scene) -> Parameters:
        from opacus.grad_sample.utils import wrap_model
        from opacus.optimizers import DPPerLayerOptimizer

        wrapped = wrap_model(
            scene.model, grad_sample_mode=mode, loss_reduction="mean", batch_first=True
        )
        count = len(list(scene.model.parameters()))
        optimiser = DPPerLayerOptimizer(
            torch.optim.SGD(scene.model.parameters(), lr=scene.plan.local_lr),
            noise_multiplier=NOISE_SCALE,
            max_grad_norm=[CLIP_NORM] * count,
            expected_batch_size=scene.plan.batch_size,
        )

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


def products_alone(scene: Scene) -> Parameters:
    """Multiply two large matrices as fast as this machine can; the scene does not matter."""
    a = torch.ones(SIDE, SIDE)
    return {"product": a @ a}


def forward_alone(scene: Scene) -> Parameters:
    """Run all examples of the round through the compiled engine's forward pass, and no more."""
    form, weights = compiled_form(scene.model, (scene.x, scene.y)), parameters_of(scene.model)
    assert not isinstance(form, str), form
    compiled_hits(form, weights, (scene.x, scene.y))
    return {}


PRIVATE = fed_cdp(clip_norm=CLIP_NORM, noise_scale=NOISE_SCALE)
ENGINES: dict[str, Engine] = {
    "naive": Written(),
    "opacus_hooks": opacus("hooks"),
    "opacus_ew": opacus("ew"),
    "plain_non_private": Written(None),
    "ours_private": fast(PRIVATE),
    "ours_non_private": fast(non_private()),
    "noise_alone": noise_alone,
    "products_alone": products_alone,
}
COMPILED: dict[str, Engine] = {
    "compiled_private": fast(PRIVATE, engine="compiled"),
    "compiled_noiseless": fast(PRIVATE.noiseless(), engine="compiled"),
    "compiled_non_private": fast(non_private(), engine="compiled"),
    "compiled_forward": forward_alone,
}
"""Measured in the same run, where numba is installed."""
WEIGHED = ("naive", "opacus", "plain_non_private", "ours_private", "compiled_private")
"""Engines whose memory is measured, each in a process of its own; the others hold no more."""


def engines() -> dict[str, Engine]:
    """Return the engines that can run here."""
    return ENGINES | (COMPILED if compiled_here() else {})


def engine_times(
    workload: str, repetitions: int, participants: int = 20, iterations: int = 10
) -> Times:
    """Return each engine's process times in ms per (client, local iteration), interleaved.

    Beside the engines stand 'opacus', its faster mode, and sums of others:
    'ours_non_private_and_noise', and 'floor', the multiplications that the kernel needs, at the
    rate of large products, and its noise.

    Parameters
    ----------
    workload : one of `WORKLOADS`
    repetitions : of every engine
    participants, iterations : K_t and L of the round
    """
    scene = WORKLOADS[workload].scene(participants, iterations)
    times = interleaved(engines(), scene, repetitions)
    modes = [times.pop("opacus_hooks"), times.pop("opacus_ew")]
    times["opacus"] = min(modes, key=median)
    pairs = zip(times["ours_non_private"], times["noise_alone"], strict=True)
    times["ours_non_private_and_noise"] = [plain + noise for plain, noise in pairs]
    products = times.pop("products_alone")
    if compiled_here():
        needed = sum(work.kernel for work in multiplications(scene.model, scene.x[:100]))
        share = needed * scene.plan.batch_size * participants * iterations / SIDE**3
        noise = [
            p - q
            for p, q in zip(times["compiled_private"], times["compiled_noiseless"], strict=True)
        ]
        times["floor"] = [share * p + max(n, 0.0) for p, n in zip(products, noise, strict=True)]
    return times


def central_times(workload: str, repetitions: int) -> Times:
    """Return process times in ms, by engine, of a batch of one client that holds everything."""
    private = fed_cdp("batch", clip_norm=CLIP_NORM, noise_scale=NOISE_SCALE)
    both = {engine: fast(private, engine=engine) for engine in ("stacked", "compiled")}
    return interleaved(both, CENTRAL[workload].scene(1, 2), repetitions)


def worker_ms(workload: str, workers: int, rounds: int = 3, engine: str = "stacked") -> float:
    """Return the wall time in ms of a (client, local iteration) of 100 clients, after the start.

    Parameters
    ----------
    workload : one of `WORKLOADS`
    workers : processes that share the clients
    rounds : that are timed, after a first one
    """
    scene, stamps = WORKLOADS[workload].scene(100, 10), list[float]()
    plan = replace(scene.plan, rounds=rounds + 1)
    simulate(
        scene.model,
        (scene.x, scene.y),
        scene.partition,
        plan,
        PRIVATE,
        engine=engine,
        workers=workers,
        on_round=lambda _: stamps.append(time.perf_counter()),
    )
    return 1000 * (stamps[-1] - stamps[0]) / (rounds * 1000)


def thread_ms(workload: str, threads: int, rounds: int = 10) -> float:
    """Return the same time of the compiled engine in one process, with threads for the clients."""
    scenes = [WORKLOADS[workload].scene(100 // threads, 10, seed) for seed in range(threads)]

    def train(scene: Scene) -> None:
        plan = replace(scene.plan, rounds=rounds)
        simulate(scene.model, (scene.x, scene.y), scene.partition, plan, PRIVATE, engine="compiled")

    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(train, scenes))
        return 1000 * (time.perf_counter() - started) / (rounds * 1000)


@cache
def peak_mib(workload: str, engine: str, participants: int) -> float:
    """Return the peak memory of a fresh process that runs one round of two iterations, in MiB."""
    engine = "opacus_hooks" if engine == "opacus" else engine  # both modes hold the same gradients
    command = [sys.executable, "-m", "tools.bench", "--peak", workload, engine, str(participants)]
    process = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return float(process.stdout)


def _own_peak_mib() -> float:
    """Return this process's peak memory; getrusage would also count the parent that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) / 1024  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_engines(workload: str, record: Record) -> None:
    """Measure every engine in one interleaved run, and its memory."""
    times = engine_times(workload, record.repetitions)
    record.ratios(workload, times)
    if record.width != "native":
        return  # ratios only: the engines' rows are those of this CPU
    for name, values in times.items():
        if name == "ours_non_private_and_noise":
            continue
        peak = f"{peak_mib(workload, name, 20):.0f}" if name in WEIGHED else "none"
        record.engine(workload, name, 20, 1, median(values), peak)
        report_progress(f"  {workload} {name}: {median(values):.3f} ms, peak {peak} MiB")


def measure_memory(workload: str, record: Record) -> None:
    """Measure peak memory and time with a thousand clients in a round, beside twenty."""
    for name in ("ours_private", *(["compiled_private"] if compiled_here() else [])):
        scene = WORKLOADS[workload].scene(1000, 2)
        started = time.process_time()
        engines()[name](scene)
        value = 1000 * (time.process_time() - started) / 2000
        peak, small = (peak_mib(workload, name, participants) for participants in (1000, 20))
        record.engine(workload, name, 1000, 1, value, f"{peak:.0f}")
        kind = "compiled" if name == "compiled_private" else "stacked"
        record.ratio(workload, f"{kind}, memory at 1,000 / 20 clients", (peak / small, 0.0))


def measure_workers(workload: str, record: Record) -> None:
    """Measure one and two processes of both engines, and one and two threads of the compiled."""
    runs: dict[str, Callable[[], float]] = {
        f"stacked {n}": _workers(workload, n, "stacked", 3) for n in (1, 2)
    }
    if compiled_here():
        runs |= {f"compiled {n}": _workers(workload, n, "compiled", 10) for n in (1, 2)}
        runs |= {f"threads {n}": lambda n=n: thread_ms(workload, n) for n in (1, 2)}  # type: ignore[misc]
        thread_ms(workload, 1, 1)  # the kernel is read from the disk
    walls: Times = {name: [] for name in runs}
    for _ in range(record.repetitions):
        for name, run in runs.items():
            walls[name].append(run())
    for kind, engine in (("stacked", "ours_private"), ("compiled", "compiled_private")):
        if f"{kind} 1" in walls:
            peak = f"{peak_mib(workload, engine, 100):.0f}"
            for n in (1, 2):
                record.engine(workload, engine, 100, n, median(walls[f"{kind} {n}"]), peak)
            record.ratio(workload, f"{kind}, 1 / 2 workers", ratio(walls, f"{kind} 1", f"{kind} 2"))
    if "threads 1" in walls:
        record.ratio(workload, "compiled, 1 / 2 threads", ratio(walls, "threads 1", "threads 2"))


def _workers(workload: str, workers: int, engine: str, rounds: int) -> Callable[[], float]:
    return lambda: worker_ms(workload, workers, rounds, engine)


def measure_central(workload: str, record: Record) -> None:
    """Measure large batches at one client, with the stacked and the compiled engine."""
    if workload in CENTRAL and compiled_here():
        times = central_times(workload, record.repetitions)
        record.ratio(
            workload, "centralised, stacked / compiled", ratio(times, "stacked", "compiled")
        )


def measure_narrow(workload: str, record: Record) -> None:
    """Measure the engines again in a fresh process whose vectors have the width of AVX2."""
    if compiled_here() and record.width == "native":
        command = [
            sys.executable, "-m", "tools.bench", workload, "--parts", "engines", "--width", "8",
            "--repetitions", str(record.repetitions), "--out", str(record.path),
        ]  # fmt: skip
        subprocess.run(command, check=True)


PARTS: dict[str, Callable[[str, Record], None]] = {
    "engines": measure_engines,
    "central": measure_central,
    "memory": measure_memory,
    "workers": measure_workers,
    "narrow": measure_narrow,
}


def bench(
    workloads: Sequence[str],
    repetitions: int,
    path: Path,
    parts: Sequence[str] = tuple(PARTS),
    width: str = "native",
) -> None:
    """Measure parts of the bench for some workloads; each row is written once it is measured.

    Parameters
    ----------
    workloads, parts : of `WORKLOADS` and `PARTS`
    repetitions : of every measurement
    path : the engines' table; the ratios are written beside it
    width : of the compiled engine's vectors, or 'native'
    """
    record = Record(path, repetitions, width)
    for part in parts:
        for workload in workloads:
            started = time.perf_counter()
            PARTS[part](workload, record)
            report_progress(
                f"{part} of {workload}, vectors {width}: {time.perf_counter() - started:.0f} s"
            )


def _set_width(width: str) -> None:
    """Let the compiled engine use vectors of another width; call it before the first use."""
    from fl_privacy_lib.federated.compiled import target

    target.WIDTH = int(width)


def accounting_seconds() -> float:
    """Return the process time of Rényi accounting over a schedule in which every σ differs."""
    noise = np.linspace(15.0, 4.85, 10_000)
    started = time.process_time()
    integer_rdp(np.full_like(noise, 0.01), noise, tuple(o for o in PAPER_ORDERS if o == int(o)))
    return time.process_time() - started


def main() -> None:
    """Run the bench from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "workloads",
        nargs="*",
        default=list(WORKLOADS),
        help=f"of {', '.join(WORKLOADS)}; none: all",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=MEASURED / "performance.csv")
    parser.add_argument(
        "--width", choices=("native", "4", "8", "16"), default="native", help="of the vectors"
    )
    parser.add_argument(
        "--peak", nargs=3, metavar=("WORKLOAD", "ENGINE", "PARTICIPANTS"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.width != "native":
        _set_width(options.width)
    if options.peak:
        workload, engine, participants = options.peak
        engines()[engine](WORKLOADS[workload].scene(int(participants), 2))
        print(_own_peak_mib())
        return
    bench(options.workloads, options.repetitions, options.out, options.parts, options.width)
    if options.width == "native":
        report_progress(f"accounting: 10,000 distinct σ in {accounting_seconds():.2f} s")


if __name__ == "__main__":
    main()
