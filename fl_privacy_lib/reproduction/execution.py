"""Running notebooks through papermill: parameters checked first, results whole or not at all."""

import hashlib
import re
import shutil
import sys
import tempfile
import time
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fl_privacy_lib._checks import InputError, one_of
from fl_privacy_lib._files import write_atomically
from fl_privacy_lib.data import DATASETS, available, fetch, first_available, verify
from fl_privacy_lib.reproduction.paths import ROOT, data_root
from fl_privacy_lib.reproduction.progress import report_progress
from fl_privacy_lib.reproduction.settings import Settings

NEEDED_MIB = 500  # free disk that executing and building ask for, with a margin
GLUED, ROLE = "application/papermill.record/text/plain", r"\{glue:text\}`[\w.]+`"
"""Where myst-nb keeps a value of `gluing.glue`, and what stands for it in a sentence."""


def check_disk(folder: Path) -> None:
    """Check that a run's results can be written to a folder; it is created where it is absent.

    Raises
    ------
    InputError
        If the folder cannot be written or its disk is too full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror}): make it a writable folder."
        ) from None
    free = shutil.disk_usage(folder).free // 2**20
    if free < NEEDED_MIB:
        raise InputError(
            f"only {free} MiB are free in {folder}, {NEEDED_MIB} MiB are needed: free some space."
        )


def allowed(kind: type[Settings], parameter: str) -> str:
    """Return the words or the range that a chapter's parameter may have; '' for no limit."""
    field, signs = kind.model_fields[parameter], {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    words = [str(word) for word in getattr(field.annotation, "__args__", ())]
    if parameter.endswith("dataset") and not words:
        words = [
            "auto",
            *(n for n, spec in DATASETS.items() if spec.kind == "image" or not kind.needs_images),
            "npz:PATH",
            *(["same"] if parameter == "batch_dataset" else []),
        ]
    limits = (f"{sign} {getattr(rule, name):g}" for rule in field.metadata
              for name, sign in signs.items() if hasattr(rule, name))  # fmt: skip
    return " | ".join(words) or ", ".join(limits)


def resolved(settings: Settings) -> Settings:
    """Return the settings with 'auto' replaced by a data set that is there; verify all files.

    Raises
    ------
    InputError
        For an unknown, missing, unreadable or damaged data set, before anything heavy is imported.
    """
    if getattr(settings, "device", None) == "cuda":
        from fl_privacy_lib.reproduction.devices import pick_device

        pick_device("cuda")
    if not settings.auto_datasets:  # a chapter that reads no data
        return settings
    root, name = data_root(), getattr(settings, "dataset", "auto")
    name = first_available(list(settings.auto_datasets), root) if name == "auto" else name
    batch = getattr(settings, "batch_dataset", "same")
    if batch in ("auto", "same"):
        batch = "lfw" if batch == "auto" and available("lfw", root) else name
    names = {
        field: value
        for field, value in (("dataset", name), ("batch_dataset", batch))
        if hasattr(settings, field)
    }
    for field, value in names.items():
        one_of(
            [value] if value.startswith("npz:") else allowed(type(settings), field).split(" | "),
            **{field: value},
        )
    for dataset in dict.fromkeys((name, batch)):
        fetch(dataset, root)
        verify(dataset, root)
    return settings.model_copy(update=names)


def timed(step: str, action: Callable[[], Any]) -> Any:
    """Run a step, report how long it took, and return its result."""
    report_progress(f"{step} …")
    started = time.perf_counter()
    result = action()
    report_progress(f"{step}: {time.perf_counter() - started:.0f} s")
    return result


def execute(settings: Settings, target: Path) -> Path:
    """Execute a chapter's notebook with these settings and put the result at `target`, whole.

    Papermill writes beside the target while cells finish; only a notebook that ran to its end takes
    its place. Finished points are kept by the library, so that the same command goes on where it
    stopped.

    Raises
    ------
    InputError
        If a cell fails: the cell's own last line, and where the unfinished notebook can be read.
    """
    import papermill.exceptions
    from nbclient.exceptions import DeadKernelError

    check_disk(target.parent)
    partial = target.with_suffix(".partial.ipynb")
    try:
        papermill.execute_notebook(
            str(ROOT / "notebooks" / f"{settings.notebook}.ipynb"),
            str(partial),
            parameters=settings.model_dump(),
            cwd=str(ROOT),
            kernel_name="python3",
            progress_bar=False,
            stderr_file=sys.stderr,
            # the kernel's own messages concern no reader
            extra_arguments=["--IPKernelApp.log_level=50"],
        )
    except (papermill.exceptions.PapermillExecutionError, DeadKernelError) as error:
        kind = "" if (n := getattr(error, "ename", "InputError")) == "InputError" else f"{n}: "
        # an assertion of a notebook, without a message, guards a sentence
        reason = (
            getattr(error, "evalue", "its kernel was killed, most often for want of memory")
            or "a sentence of the chapter no longer agrees with the records"
        )
        raise InputError(
            f"{settings.notebook} stopped: {kind}{reason.rstrip('.')} (how far it came: {partial})."
        ) from None
    partial.replace(target)
    return target


def run(kind: type[Settings], profile: str, overrides: dict[str, Any]) -> Path:
    """Execute one chapter with a reader's parameters and return the finished notebook's path.

    Raises
    ------
    InputError
        If a parameter, a data file or a cell is wrong.
    """
    settings = resolved(kind.of_profile(profile, **overrides))
    words = [
        f"{k}={v}"
        for k, v in sorted((overrides | settings.model_dump(include={"dataset"})).items())
    ]
    safe = "_".join([profile, *words]).replace("/", "-").replace(":", "-")
    if len(safe) > 120:  # cut names would meet
        safe = f"{safe[:110]}_{hashlib.sha256(safe.encode()).hexdigest()[:8]}"
    target = ROOT / "runs" / f"{kind.notebook}__{safe}.ipynb"
    report_progress(
        f"{kind.notebook} with " + ", ".join(f"{k}={v}" for k, v in settings.model_dump().items())
    )
    timed(f"run {kind.notebook} {profile}", lambda: execute(settings, target))
    _finish_text(target, ", ".join(f"`{word}`" for word in (f"PROFILE={profile}", *words)))
    return target


def _finish_text(path: Path, changes: str) -> None:
    """Put the run's values into its sentences, and a first cell that says what the run has.

    The page's sentences were written for the usual settings.
    """
    import nbformat

    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    glued = {
        f"{{glue:text}}`{output.metadata.scrapbook.name}`": str(literal_eval(output.data[GLUED]))
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if GLUED in output.get("data", ())
    }
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(
        f"**This run has** {changes}. It ended on {time.strftime('%Y-%m-%d')}. What is computed "
        "here is of this run. Recorded numbers, and the sentences about them, belong to the "
        "settings named beside them."
    ))  # fmt: skip
    for cell in notebook.cells:
        cell.source = re.sub(ROLE, lambda role: glued.get(role[0], role[0]), cell.source)
    write_atomically(path, nbformat.writes(notebook).encode())
