"""The command line: run, record, build. All is checked before anything heavy is imported."""

import argparse
import os
import signal
import sys
import threading
from types import FrameType

from fl_privacy_lib._checks import InputError
from fl_privacy_lib._files import write_atomically
from fl_privacy_lib.chapters import CHAPTERS, chapter, experiment
from fl_privacy_lib.reproduction.settings import PROFILES, parse_assignments

CHAPTER_FORMS = "01, threat_types or 01_threat_types"


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar; `make` targets are thin wrappers over it."""
    top = argparse.ArgumentParser(prog="python -m fl_privacy_lib", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name, help_, default in (
        ("run", "execute one chapter with parameters of your own, into runs/", "quick"),
        ("record", "record one chapter's grid into results/measured/, resumable", "full"),
        ("book", "execute every chapter and build the book, into _build/html", "quick"),
    ):
        command = commands.add_parser(name, help=help_)
        if name != "book":
            command.add_argument("chapter", nargs="?", help=CHAPTER_FORMS)
        command.add_argument("parameters", nargs="*", help="name=value over the profile's values")
        command.add_argument(
            "--profile", default=default, help=f"{', '.join(PROFILES)} (default {default})"
        )
        if name == "record":
            command.add_argument(
                "--only",
                help="one part or table, e.g. fed_cdp/table_7; an unknown name lists the parts",
            )
    for name, help_ in (
        ("params", "list a chapter's parameters with what each may be"),
        ("lab", "open a copy of a chapter of your own, in runs/, in JupyterLab"),
    ):
        command = commands.add_parser(name, help=help_)
        command.add_argument("chapter", nargs="?", help=CHAPTER_FORMS)
    serve = commands.add_parser("serve", help="serve the built book on this machine")
    serve.add_argument("--port", type=int, default=8000)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Returns
    -------
    int
        The exit status: 0, 2 for an input to mend; 130 or 143 when it is interrupted.
    """
    options, late = parser().parse_known_args(arguments)
    # an interrupted pool ends at once, and its tracker would warn that it clears up after it;
    # a running one replaces a worker that has grown, and would warn that it stopped
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker,ignore:A worker stopped")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        if hasattr(options, "parameters"):
            # argparse takes positional words only before the first option
            options.parameters += [word for word in late if not word.startswith("-")]
            late = [word for word in late if word.startswith("-")]
        if late:
            raise InputError(
                f"{options.command} does not know {late[0]!r}: see python -m fl_privacy_lib "
                f"{options.command} --help."
            )
        if getattr(options, "chapter", "") is None:
            raise InputError(
                f"name a chapter, for example python -m fl_privacy_lib {options.command} 01."
            )
        return _dispatch(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(
            "interrupted: finished points are kept; the same command continues.",
            file=sys.stderr,
            flush=True,
        )
        # at once: a clean exit would wait for the workers' points under way
        os._exit(stop.args[0])


def _stop(number: int, frame: FrameType | None) -> None:
    threading.excepthook = lambda _: None  # the pool's own thread may stumble over its end
    raise KeyboardInterrupt(128 + number)


def _dispatch(options: argparse.Namespace) -> int:
    values = parse_assignments(getattr(options, "parameters", []))
    match options.command:
        case "serve":
            _serve(options.port)
        case "params":
            _show_parameters(options.chapter)
        case "lab":
            return _open_copy(options.chapter)
        case "book":
            names = sorted({name for kind in CHAPTERS.values() for name in kind.model_fields})
            if unknown := sorted(set(values) - set(names)):
                raise InputError(
                    f"no notebook has a parameter {unknown[0]!r}; there are {', '.join(names)}."
                )
            from fl_privacy_lib.reproduction.book import build

            build(CHAPTERS, options.profile, values)
        case "run":
            kind = chapter(options.chapter)
            kind.of_profile(options.profile, **values)  # refuses before the import, which is heavy
            from fl_privacy_lib.reproduction.execution import run

            print(run(kind, options.profile, values))
        case "record":
            kind = chapter(options.chapter)
            settings = kind.of_profile(options.profile, **values)
            from fl_privacy_lib.reproduction.experiment import record

            record(experiment(kind), settings, options.only, plain=kind.of_profile(options.profile))
    return 0


def _serve(port: int) -> None:
    import contextlib
    import functools
    import http.server

    from fl_privacy_lib.reproduction.paths import BUILD

    folder = BUILD / "html"
    if not (folder / "index.html").exists():
        raise InputError(f"there is no book at {folder} yet: build it with `make book`.")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"port {port} cannot be used ({getattr(error, 'strerror', 'it is none')}): "
            "name another with --port."
        ) from None
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"the book: http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C stops)", flush=True)
        server.serve_forever()


def _open_copy(name: str) -> int:
    """Open a reader's copy of a chapter; it is made once, so that work in it stays."""
    import subprocess

    from fl_privacy_lib.reproduction.paths import ROOT

    notebook = chapter(name).notebook
    copy = ROOT / "runs" / f"{notebook}__mine.ipynb"
    if not copy.exists():
        write_atomically(copy, (ROOT / "notebooks" / f"{notebook}.ipynb").read_bytes())
    print(f"your copy: {copy} (delete it to begin anew; Ctrl-C here stops)", flush=True)
    return subprocess.call([
        sys.executable, "-m", "jupyterlab",
        *["--allow-root"] * (hasattr(os, "geteuid") and os.geteuid() == 0),  # in a container
        str(copy),
    ])  # fmt: skip


def _show_parameters(name: str) -> None:
    """Print a chapter's parameters: default, allowed words or range, meaning."""
    from fl_privacy_lib.reproduction.execution import allowed

    kind = chapter(name)
    print(f"{kind.notebook}: write name=value; defaults are the quick profile's")
    others = {profile: vars(kind.of_profile(profile)) for profile in ("smoke", "full")}
    for parameter, field in kind.model_fields.items():
        limits = (f" [{words}]" if (words := allowed(kind, parameter)) else "") + "".join(
            f" ({profile}: {values[parameter]})"
            for profile, values in others.items()
            if values[parameter] != field.default
        )
        print(f"  {parameter} = {field.default}{limits}  {field.description}")


if __name__ == "__main__":
    sys.exit(main())
