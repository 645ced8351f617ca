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
from fl_privacy_lib.reproduction.progress import say
from fl_privacy_lib.reproduction.records import MeasuredTable

KEYS = ("dataset", "method", "engine", "batch_size", "participants", "local_iterations", "repetitions")


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
            own = {"dataset": dataset, "repetitions": settings.repetitions}
            known = record.rows_of(own).drop_duplicates(["engine", "method"])
            if len(known) == len(chapter.WRITTEN[table]) + len(chapter.STACKED[table]):
                say(f"{table} {dataset}: recorded already")
                continue
            started = time.perf_counter()
            cells = list(chapter.measure(table, dataset, settings.repetitions))
            seconds = (time.perf_counter() - started) / len(cells)
            for cost, metrics in cells:  # all cells of a data set belong to one interleaved run
                values = asdict(cost)
                point = {k: values[k] for k in KEYS}
                if record.rows_of(point).empty:
                    record.add(point, metrics, seeds=1, profile=settings.profile,
                               device=device_name(torch.device("cpu")), seconds=seconds)  # fmt: skip
            say(f"{table} {dataset}: {len(cells)} cells in {seconds * len(cells):.0f} s")
