"""Recording chapter 04: the papers' tables of time, as ratios to non-private training on this machine."""

import time
from dataclasses import asdict
from pathlib import Path

import torch

from fl_privacy_lib._checks import one_of
from fl_privacy_lib.chapters.fast_training import engines as chapter
from fl_privacy_lib.chapters.fast_training.parameters import FastTraining
from fl_privacy_lib.reproduction.devices import device_name
from fl_privacy_lib.reproduction.paths import MEASURED
from fl_privacy_lib.reproduction.progress import report_progress
from fl_privacy_lib.reproduction.records import MeasuredTable

KEYS = (
    "dataset",
    "method",
    "engine",
    "batch_size",
    "participants",
    "local_iterations",
    "repetitions",
)


def record(settings: FastTraining, only: str | None = None, folder: Path = MEASURED) -> None:
    """Record Fed-CDP's Table III, Fed-αCDP's Table 9 and dynamic parameters' Table X on one CPU core.

    Parameters
    ----------
    settings : gives the repetitions
    only : 'paper/table' or None for all
    folder : where the measured tables lie
    """
    if only is not None:
        one_of(list(chapter.WRITTEN), only=only)
    torch.set_num_threads(1)
    for table in chapter.WRITTEN:
        if only not in (None, table):
            continue
        record = MeasuredTable(folder / f"{table}.csv", [*KEYS, "metric"])
        for dataset in chapter.datasets_of(table):
            rows = record.rows_of({"dataset": dataset, "repetitions": settings.repetitions})
            recorded = {f"{row['engine']}:{row['method']}" for _, row in rows.iterrows()}
            kinds = [
                kind
                for kind in _kinds()
                if not chapter.engines_of(table, [kind]).keys() <= recorded
            ]
            if not kinds:
                report_progress(f"{table} {dataset}: recorded already")
                continue
            started = time.perf_counter()
            cells = list(chapter.measure(table, dataset, settings.repetitions, kinds))
            seconds = (time.perf_counter() - started) / len(cells)
            for (
                cost,
                metrics,
            ) in cells:  # one interleaved run, beside the same plain loop as written
                if f"{cost.engine}:{cost.method}" not in recorded:
                    values = asdict(cost)
                    record.add(
                        {k: values[k] for k in KEYS},
                        metrics,
                        seeds=1,
                        profile=settings.profile,
                        device=device_name(torch.device("cpu")),
                        seconds=seconds,
                    )
            report_progress(
                f"{table} {dataset}: {len(cells)} cells of {', '.join(kinds)} in {seconds * len(cells):.0f} s"
            )


def _kinds() -> list[str]:
    return ["as_written", "stacked", *(["compiled"] if chapter.compiled_here() else [])]
