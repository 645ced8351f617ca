"""How long each chapter's notebook takes, and its memory: ``python -m tools.run_times [01 …]``.

A chapter is executed at `smoke` and `quick`, nothing cached; its rows of
``results/measured/run_times.csv`` are written at its end, and those of other chapters stay.
"""

import datetime
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pandas as pd
import psutil

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters import CHAPTERS, chapter
from fl_privacy_lib.reproduction.devices import device_name, pick_device
from fl_privacy_lib.reproduction.execution import execute, resolved
from fl_privacy_lib.reproduction.paths import BUILD, MEASURED, point_cache
from fl_privacy_lib.reproduction.progress import report_progress
from fl_privacy_lib.reproduction.records import write_table
from fl_privacy_lib.reproduction.settings import Settings
from tools.rows import other_rows


def measure_times(names: list[str]) -> None:
    """Execute some chapters, by default all, and write each one's rows at its end."""
    path = MEASURED / "run_times.csv"
    for kind in [chapter(name) for name in names or CHAPTERS]:
        rows: list[Any] = other_rows(path, "chapter", [kind.notebook[:2]])
        rows += [time_chapter(kind, profile) for profile in ("smoke", "quick")]
        rows.sort(key=lambda row: (str(row["chapter"]), row["profile"] != "smoke"))
        write_table(path, pd.DataFrame(rows))


def time_chapter(kind: type[Settings], profile: str) -> dict[str, object]:
    """Execute a chapter and return its row."""
    notebook, number = kind.notebook, kind.notebook[:2]
    settings = resolved(kind.of_profile(profile))
    shutil.rmtree(point_cache(number), ignore_errors=True)
    started, done = time.perf_counter(), threading.Event()
    with ThreadPoolExecutor() as pool:
        peak = pool.submit(peak_memory, done)
        try:
            execute(settings, BUILD / "timing" / f"{notebook}.ipynb")
        finally:
            done.set()
    seconds = time.perf_counter() - started
    report_progress(f"{notebook} {profile}: {seconds:.0f} s, {peak.result()} MiB")
    return {
        "chapter": number,
        "profile": profile,
        "data": getattr(settings, "dataset", "none"),
        "seconds": f"{seconds:.0f}",
        "peak_mib": peak.result(),
        "device": device_name(pick_device("auto")),
        "date": datetime.date.today().isoformat(),
    }


def peak_memory(done: threading.Event) -> int:
    """Return the most MiB that this process and its children hold together until `done` is set."""
    me, peak = psutil.Process(), 0
    while not done.wait(0.5):
        total = 0
        for process in (me, *me.children(recursive=True)):
            with suppress(psutil.Error):  # it has just ended
                memory = process.memory_full_info()
                # shared pages once, where the system can tell
                total += getattr(memory, "pss", memory.rss)
        peak = max(peak, total)
    return peak // 2**20


if __name__ == "__main__":
    try:
        measure_times(sys.argv[1:])
    except InputError as error:
        sys.exit(f"error: {error}")
