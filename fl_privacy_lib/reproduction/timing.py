"""How long each chapter takes: measured from nothing, written where the chapters read it."""

import datetime
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from fl_privacy_lib.reproduction.devices import device_name, pick_device
from fl_privacy_lib.reproduction.execution import execute, resolved
from fl_privacy_lib.reproduction.paths import BUILD, MEASURED, point_cache
from fl_privacy_lib.reproduction.progress import report_progress
from fl_privacy_lib.reproduction.records import other_rows, write_table
from fl_privacy_lib.reproduction.settings import Settings


class PeakMemory:
    """Watches the memory of this process and its children, all together, twice a second."""

    def __init__(self) -> None:
        self.mebibytes, self._running = 0, True
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._running = False
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while self._running:
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    memory = process.memory_full_info()
                    # shared pages once, where the system can tell
                    total += getattr(memory, "pss", memory.rss)
                except psutil.Error:  # it has just ended
                    continue
            self.mebibytes = max(self.mebibytes, total // 2**20)
            time.sleep(0.5)


def measure_times(
    chapters: Iterable[type[Settings]], path: Path = MEASURED / "run_times.csv"
) -> None:
    """Execute chapters at `smoke` and `quick`, nothing cached; write each one's rows at its end.

    Parameters
    ----------
    chapters : their settings classes. The rows of others stay.
    """
    for kind in chapters:
        rows: list[Any] = other_rows(path, "chapter", [kind.notebook[:2]])
        rows += [_time_chapter(kind, profile) for profile in ("smoke", "quick")]
        rows.sort(key=lambda row: (str(row["chapter"]), row["profile"] != "smoke"))
        write_table(path, pd.DataFrame(rows))


def _time_chapter(kind: type[Settings], profile: str) -> dict[str, object]:
    notebook, number = kind.notebook, kind.notebook[:2]
    settings = resolved(kind.of_profile(profile))
    shutil.rmtree(point_cache(number), ignore_errors=True)
    started = time.perf_counter()
    with PeakMemory() as peak:
        execute(settings, BUILD / "timing" / f"{notebook}.ipynb")
    seconds = time.perf_counter() - started
    report_progress(f"{notebook} {profile}: {seconds:.0f} s, {peak.mebibytes} MiB")
    return {
        "chapter": number,
        "profile": profile,
        "data": getattr(settings, "dataset", "none"),
        "seconds": f"{seconds:.0f}",
        "peak_mib": peak.mebibytes,
        "device": device_name(pick_device("auto")),
        "date": datetime.date.today().isoformat(),
    }
