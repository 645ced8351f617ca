"""Progress of long work: lines on standard error, where they disturb no output."""

import sys
import time


def report_progress(text: str) -> None:
    """Write one line of progress."""
    print(f"· {text}", file=sys.stderr, flush=True)


def time_left(started: float, done: int, total: int) -> str:
    """Return the time left in words, judged by the time that the finished part took.

    Parameters
    ----------
    started : `time.perf_counter` at the start
    done, total : numbers of points
    """
    seconds = (time.perf_counter() - started) / max(done, 1) * (total - done)
    words = f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
    return f"about {words} left" if done < total else "the last of these"
