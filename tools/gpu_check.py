"""One script for a bare CUDA machine: tests, a point of every chapter, the bench, saturation.

No Jupyter is needed. Every part writes what it has as it goes, and a part that fails does not stop
the next. Run with ``make gpu-check PYTHON=…`` or ``python -m tools.gpu_check [--out folder]``.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters import CHAPTERS, experiment
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.reproduction.devices import device_name, pick_device
from fl_privacy_lib.reproduction.experiment import record
from fl_privacy_lib.reproduction.paths import BUILD, ROOT
from fl_privacy_lib.reproduction.progress import report_progress
from fl_privacy_lib.reproduction.records import write_table

PARTICIPANTS = (1, 4, 16, 64, 256, 1024, 4096)


def tests(out: Path) -> None:
    """Run the tests that need the device."""
    import pytest

    report, file = out / "tests.xml", ROOT / "tests" / "test_cuda.py"
    code = pytest.main(["-m", "cuda", "-p", "no:cacheprovider", f"--junitxml={report}", str(file)])
    if code:
        raise RuntimeError(f"the tests on the device failed (exit {int(code)}): see {report}")


def points(out: Path) -> None:
    """Record every chapter's smallest grid on the device."""
    for number, kind in CHAPTERS.items():
        report_progress(f"chapter {number} at smoke")
        record(experiment(kind), kind.of_profile("smoke", device="cuda"), None, out / "measured")


def bench(out: Path) -> None:
    """Run the bench's table; its engines run on the CPU of this machine."""
    from tools import bench as script

    script.bench(list(script.WORKLOADS), 3, out / "performance.csv")


def saturation(out: Path) -> None:
    """Time the private engine on the device, all clients stacked in one round, by their number."""
    from tools.bench import PRIVATE, WORKLOADS

    rows, device = [], pick_device("cuda")
    for name in WORKLOADS:
        for participants in PARTICIPANTS:
            scene = WORKLOADS[name].scene(participants, 5)
            model, data = scene.model.to(device), (scene.x.to(device), scene.y.to(device))
            seconds = []
            try:
                for _ in range(3):
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    simulate(model, data, scene.partition, scene.plan, PRIVATE, engine="stacked")
                    torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - started)
            except torch.cuda.OutOfMemoryError:
                report_progress(f"{name}: {participants} clients do not fit")
                break
            ms = 1000 * min(seconds) / (participants * 5)
            rows.append(
                {
                    "workload": name,
                    "participants": participants,
                    "ms_per_client_iteration": f"{ms:.5f}",
                    "device": device_name(device),
                }
            )
            report_progress(
                f"{name}: {participants} clients, {ms:.4f} ms per client and local iteration"
            )
            write_table(out / "saturation.csv", pd.DataFrame(rows))


def main() -> int:
    """Run all parts; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=BUILD / "gpu_check", help="where results are written"
    )
    out = parser.parse_args().out
    try:
        pick_device("cuda")
    except InputError as error:
        report_progress(f"error: {error}")
        return 2
    failed = 0
    parts: tuple[Callable[[Path], None], ...] = (tests, saturation, points, bench)
    for part in parts:
        out.mkdir(parents=True, exist_ok=True)
        report_progress(f"{part.__name__}: {(part.__doc__ or '').splitlines()[0]}")
        try:
            part(out)
        except Exception as error:  # the next part may still pass
            failed += 1
            report_progress(f"{part.__name__} failed: {type(error).__name__}: {error}")
    report_progress(f"{len(parts) - failed} of {len(parts)} parts passed; results in {out}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
