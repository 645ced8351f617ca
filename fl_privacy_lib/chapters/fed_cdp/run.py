"""Recording chapter 05: Fed-CDP's tables and figures of accuracy, part by part."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters.fed_cdp import training as fed_cdp
from fl_privacy_lib.chapters.fed_cdp import utility as fed_cdp_utility
from fl_privacy_lib.chapters.fed_cdp.grid import PARTS, Cell, Part, Rates, best_rates
from fl_privacy_lib.chapters.fed_cdp.parameters import FedCdp
from fl_privacy_lib.chapters.fed_cdp.utility import Statement, Utility
from fl_privacy_lib.data import DATASETS, available
from fl_privacy_lib.reproduction.claims import measured
from fl_privacy_lib.reproduction.devices import device_name, pick_device
from fl_privacy_lib.reproduction.paths import MEASURED, data_root, point_cache
from fl_privacy_lib.reproduction.points import Result, finished, record_points
from fl_privacy_lib.reproduction.progress import report_progress
from fl_privacy_lib.reproduction.records import numbers

PAPER = "fed_cdp"
STATEMENTS = "statements"


def chosen_rates(folder: Path = MEASURED) -> Rates:
    """Return the learning rate of every arm whose grid is recorded."""
    return best_rates(measured(f"{PAPER}/learning_rates", folder))


def finished_points(
    points: Sequence[Any], device: torch.device, label: str = "", workers: int | None = None
) -> Iterator[tuple[Any, Result]]:
    """Yield every point of chapter 05 with its result; on a GPU a single process."""
    count = 1 if device.type == "cuda" else workers
    key = partial(_key, device)
    return finished(
        "05", points, partial(_measure, device), key=key, words=_words, label=label, workers=count
    )


def _key(device: torch.device, point: Any) -> dict[str, object]:
    return asdict(point) | {"kind": type(point).__name__, "device": device.type}


def _measure(device: torch.device, point: Any) -> Result:
    if isinstance(point, Utility):
        return fed_cdp_utility.measure_utility(point, device)
    return fed_cdp.measure(point, device, point_cache("05") / "under_way")


def _words(point: Any, result: Result) -> str:
    arm = point.arm if isinstance(point, Utility) else point
    what = f"{arm.dataset} {arm.method} {arm.setting} C={arm.clip_norm:g} σ={arm.noise_scale:g} K_t={arm.participants}"
    if isinstance(point, Utility):
        return f"{what}: bound and noise at round {point.at_round}"
    state = ", diverged" if result["diverged"].any() else ""
    engines = "/".join(sorted({str(name) for name in result["engine"]} - {""}))
    return f"{what} η={arm.local_lr:g}: accuracy {float(result['accuracy'].mean()):.3f}{state}, {engines} engine"


def record(settings: FedCdp, only: str | None = None, folder: Path = MEASURED) -> None:
    """Record the chapter at these settings, part by part; rows that stand already are kept.

    Parameters
    ----------
    settings : usually the `full` profile. `rounds` and `local_iterations` cap the published ones,
        `seeds` repeats what is repeated, `dataset` restricts the parts to one data set; populations
        are the grid's own.
    only : a part's name, 'paper/table', or None for all but the long ones (on a CUDA device: all)
    folder : where the measured tables lie
    """
    device = pick_device(settings.device)
    names = [name for name, part in PARTS.items() if only in (name, f"{PAPER}/{part.table}")]
    if only is None:
        names = [name for name, part in PARTS.items() if device.type == "cuda" or not part.long]
    if not names and only != f"{PAPER}/{STATEMENTS}":
        known = ", ".join((*PARTS, f"{PAPER}/{STATEMENTS}"))
        raise InputError(f"chapter 05 records no part {only!r}; it records {known}.")
    wanted = {name: _datasets(PARTS[name], settings.dataset) for name in names}
    if names and not any(wanted.values()):
        there = f"dataset = {settings.dataset} of {', '.join(names)} is not in {data_root()}"
        raise InputError(
            f"{there}: set FL_PRIVACY_DATA to a folder that holds it, or name another."
        )
    torch.set_num_threads(1)
    meta = {"profile": settings.profile, "device": device_name(device)}
    if only in (None, f"{PAPER}/{STATEMENTS}"):
        _record_statements(folder, meta)
    for name in names:
        for dataset in wanted[name]:
            cells = PARTS[name].make(settings, dataset, chosen_rates(folder))
            record_points(
                f"{PAPER}/{PARTS[name].table}",
                folder,
                cells,
                Cell.key,
                partial(_finished_cells, device=device, label=f"{name} "),
                lambda cell, result: cell.values(result),
                lambda cell: {"seeds": getattr(cell.point, "seeds", 1), **meta},
            )


def _finished_cells(
    cells: Sequence[Cell], device: torch.device, label: str
) -> Iterator[tuple[Cell, Result]]:
    found = finished_points([cell.point for cell in cells], device, label)
    return ((cell, result) for cell, (_, result) in zip(cells, found, strict=True))


def _datasets(part: Part, wanted: str) -> list[str]:
    names = [name for name in part.datasets if wanted in ("auto", name)]
    missing = [name for name in names if name not in DATASETS or not available(name, data_root())]
    if missing:
        report_progress(
            f"not recorded, since their files are not in {data_root()}: {', '.join(missing)}"
        )
    return [name for name in names if name not in missing]


def _record_statements(folder: Path, meta: dict[str, Any]) -> None:
    def run(missing: Sequence[Statement]) -> Iterator[tuple[Statement, Any]]:
        return ((statement, {"seconds": 0.0}) for statement in missing)

    record_points(
        f"{PAPER}/{STATEMENTS}",
        folder,
        fed_cdp_utility.statements(),
        lambda s: {"claim": s.claim},
        run,
        lambda s, _: {name: numbers([value]) for name, value in s.metrics.items()},
        lambda s: {"seeds": 1, **meta},
    )
