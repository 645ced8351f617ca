"""Building the book: execute notebooks into a staging copy, build the HTML."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fl_privacy_lib._checks import InputError
from fl_privacy_lib._files import write_atomically
from fl_privacy_lib.reproduction.execution import (
    check_disk,
    execute,
    report_progress,
    resolved,
    timed,
)
from fl_privacy_lib.reproduction.paths import BUILD, ROOT
from fl_privacy_lib.reproduction.settings import Settings

STAGE = BUILD / "stage"
HTML = BUILD / "html"


def fold_parameters(notebook: dict[str, Any], profile: str) -> None:
    """Show an executed notebook's parameters once, folded: the table of the values that ran."""
    for cell in notebook["cells"]:
        tags = cell["metadata"].setdefault("tags", [])
        if {"parameters", "injected-parameters"} & set(tags):
            tags.append("remove-cell")
        if cell["cell_type"] == "code" and ".checked(" in "".join(cell["source"]):
            tags += ["remove-input", "hide-output"]
            cell["metadata"]["mystnb"] = {
                "code_prompt_show": f"Show the parameters of this run (profile: {profile}"
                f"{', whose numbers mean nothing' if profile == 'smoke' else ''})"
            }


def make_pages(path: Path, profile: str) -> None:
    """Make an executed notebook a chapter's two pages: what it argues, and its appendix beside it.

    The cells from the heading '# Appendix' on are the appendix; opened in Jupyter, a notebook is
    whole. The folded parameters name the profile that ran.

    Raises
    ------
    InputError
        If no Markdown cell begins with that heading.
    """
    notebook = json.loads(path.read_text())
    fold_parameters(notebook, profile)
    # others may get the page: without this machine's folders, which warnings name as well
    for name in ("input_path", "output_path"):
        notebook["metadata"].get("papermill", {}).pop(name, None)
    cells = [
        cell | {"outputs": [out for out in cell["outputs"] if out.get("name") != "stderr"]}
        if "outputs" in cell else cell
        for cell in notebook["cells"]
    ]  # fmt: skip
    heads = ["".join(cell["source"]).startswith("# Appendix") for cell in cells]
    if True not in heads:
        raise InputError(f"{path} has no cell that begins with '# Appendix': add one at its end.")
    at, appendix = heads.index(True), path.with_name(f"{path.stem}_appendix.ipynb")
    for target, part in ((appendix, cells[at:]), (path, cells[:at])):
        whole = notebook | {"cells": part}
        write_atomically(target, json.dumps(whole, indent=1, ensure_ascii=False).encode())


def stage(chapters: Iterable[type[Settings]], profile: str, overrides: dict[str, Any]) -> None:
    """Fill the staging copy: prose and executed notebooks.

    A notebook is executed into the copy of the last build and takes its place only when it is
    whole.

    Parameters
    ----------
    chapters : the settings classes of those that are built
    profile, overrides : their parameters; a chapter takes those overrides that it knows

    Raises
    ------
    InputError
        If a parameter, a data file or a cell is wrong.
    """
    chosen = [  # all are checked before the first is run
        resolved(kind.of_profile(
            profile, **{k: v for k, v in overrides.items() if k in kind.model_fields}
        ))
        for kind in chapters
    ]  # fmt: skip
    STAGE.mkdir(parents=True, exist_ok=True)
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(ROOT / name, STAGE / name)
    shutil.rmtree(STAGE / "book", ignore_errors=True)
    shutil.copytree(ROOT / "book", STAGE / "book")
    for settings in chosen:
        target = STAGE / "notebooks" / f"{settings.notebook}.ipynb"
        timed(f"execute {settings.notebook} at {profile}", partial(execute, settings, target))
        make_pages(target, settings.profile)


def build(
    chapters: Mapping[str, type[Settings]],
    profile: str = "quick",
    overrides: dict[str, Any] | None = None,
) -> None:
    """Execute the notebooks and build the HTML, strictly.

    Parameters
    ----------
    chapters : number → settings class
    profile, overrides : see `stage`

    Raises
    ------
    InputError
        If a parameter, a data file or a cell is wrong, or the strict build finds a warning.
    """
    check_disk(BUILD)
    stage(chapters.values(), profile, overrides or {})
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build",
               str(STAGE), "--path-output", str(BUILD.parent),
               "-n", "-W", "--keep-going", "--all"]  # fmt: skip

    def sphinx() -> None:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        log = process.stdout + process.stderr
        write_atomically(BUILD / "jupyter-book.log", log.encode())
        warnings = [line for line in log.splitlines() if "WARNING" in line or "ERROR" in line]
        if process.returncode or warnings:
            raise InputError(
                "the strict build found: "
                f"{warnings[0] if warnings else process.stderr.strip()[-300:]} "
                f"(all of it in {BUILD / 'jupyter-book.log'})."
            )

    timed("build the HTML", sphinx)
    report_progress(f"the book is at {HTML / 'index.html'}")
