"""The house: set-up files agree, imports run downwards, nothing is there that is not public."""

import ast
import json
import re
import subprocess
import tokenize
import tomllib
from collections import Counter
from importlib.metadata import version as version_of

import pytest
import yaml
from packaging.markers import Marker

from fl_privacy_lib.chapters import chapter
from fl_privacy_lib.reproduction.paths import ROOT

LOCK = (ROOT / "requirements.lock").read_text()
FLOORS = [
    {"_checks", "_files", "__init__"},
    {"models", "metrics", "sampling", "data"},
    {"accounting"},
    {"defenses"},
    {"federated"},
    {"attacks"},
    {"audit"},
    {"reproduction"},
    {"chapters"},
    {"__main__"},
]


def tracked(*patterns: str) -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("this is no git checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def locked() -> dict[str, str]:
    pins = {}
    for line in LOCK.splitlines():
        if line and not line.startswith("#"):
            requirement, _, marker = line.partition(";")
            if marker and not Marker(marker).evaluate():
                continue  # a pin of another platform
            name, _, version = requirement.strip().partition("==")
            assert version, f"{line} pins no version"
            pins[re.sub(r"[-_.]+", "-", name).lower()] = version
    return pins


def test_every_dependency_is_locked_and_every_pin_agrees():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras) == {"book", "fast", "tf-privacy", "dev"}
    pins = locked()
    for wish in [*project["dependencies"], *(w for e in extras.values() for w in e)]:
        name, exact = re.match(r"([A-Za-z0-9_.-]+)(?:==([\w.*]+))?", wish).groups()
        version = pins[re.sub(r"[-_.]+", "-", name).lower()]
        if exact:
            assert re.fullmatch(exact.replace(".", r"\.").replace(r"\.*", r"(\..*)?"), version), (
                wish
            )


def test_conda_uses_the_same_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert "python=3.11" in environment["dependencies"] and "pip" in environment["dependencies"]
    assert environment["dependencies"][-1] == {"pip": ["-r requirements.lock"]}


def test_the_installed_environment_is_the_locked_one():
    for name, pin in locked().items():
        installed = version_of(name).partition("+")[0]
        assert installed == pin, f"{name} is {installed}, the lock says {pin}: run make setup"


def floor(module: str) -> int:
    part = module.removeprefix("fl_privacy_lib").strip(".").partition(".")[0] or "__init__"
    return next(i for i, names in enumerate(FLOORS) if part in names)


def imported(source: str) -> set[str]:
    """Return the modules that a source imports; ``from a import b`` counts as ``a.b`` too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module in full"
            names |= {node.module or ""} | {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
    return names - {"fl_privacy_lib"}


def modules() -> dict[str, set[str]]:
    paths = sorted((ROOT / "fl_privacy_lib").rglob("*.py"))
    named = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in paths
    }
    return {name: imported(path.read_text()) for name, path in named.items()}


def test_imports_run_downwards_only():
    for module, names in modules().items():
        for name in names:
            assert name.partition(".")[0] != "tools", (
                f"{module} imports {name}, which is no part of the package"
            )
            if name.startswith("fl_privacy_lib."):
                assert floor(name) <= floor(module), (
                    f"{module} imports {name}, which stands above it"
                )


def chapters_in(names: set[str]) -> set[str]:
    folders = {
        path.name for path in (ROOT / "fl_privacy_lib" / "chapters").iterdir() if path.is_dir()
    }
    return {
        name.split(".")[2] for name in names if name.startswith("fl_privacy_lib.chapters.")
    } & folders


def test_no_chapter_imports_another():
    parts = {
        module: names
        for module, names in modules().items()
        if module.startswith("fl_privacy_lib.chapters.")
    }
    assert len(chapters_in(set(parts))) >= 6
    for module, names in parts.items():
        assert chapters_in(names) <= chapters_in({module}), f"{module} imports {chapters_in(names)}"


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_imports_its_chapter_and_no_other(path):
    code = [c["source"] for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    folders = chapters_in(set().union(*(imported("".join(source)) for source in code)))
    assert [chapter(folder).notebook for folder in folders] == [path.stem]


# chapters above their budget of 290: no line more
LARGER = {"fed_cdp": 400, "fedsel": 520, "what_works": 322}
LIBRARY, COMPILED, COMPENSATION, CHAPTER = 6586, 731, 500, 290
OF_COMPENSATION = {
    f"{folder}/{name}.py"
    for folder, names in {
        "defenses": ("compensation", "descent", "representation", "risk", "slices"),
        "attacks": ("convnet", "slice_aware"),
    }.items()
    for name in names
}
"""Modules with the mechanisms of the paper on compensation and the attacks on them."""


def logical_lines(path):
    """Count a module's statements: tokens NEWLINE, without those that end a string alone."""
    count, first = 0, None
    with path.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            if token.type == tokenize.NEWLINE:
                count += first != tokenize.STRING
                first = None
            elif first is None and token.type not in IGNORED:
                first = token.type
    return count


IGNORED = {tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT}


def test_the_library_stays_small():
    package = ROOT / "fl_privacy_lib"
    modules = [*package.rglob("*.py"), *(ROOT / "book").rglob("*.py")]
    lines = {p: p.read_text().count("\n") for p in modules}
    assert max(lines.values()) <= 350, max(lines, key=lines.get)
    sizes = {p.relative_to(package): logical_lines(p) for p in package.rglob("*.py")}
    chapters = Counter()
    for path, size in sizes.items():
        if path.parts[0] == "chapters" and len(path.parts) > 2:
            chapters[path.parts[1]] += size
    compiled = sum(s for p, s in sizes.items() if p.parts[:2] == ("federated", "compiled"))
    compensation = sum(s for p, s in sizes.items() if p.as_posix() in OF_COMPENSATION)
    assert all(size <= LARGER.get(name, CHAPTER) for name, size in chapters.items()), chapters
    assert compiled <= COMPILED
    assert compensation <= COMPENSATION
    assert sum(sizes.values()) - compiled - compensation - chapters.total() <= LIBRARY


def test_a_logical_line_is_a_statement(tmp_path):
    path = tmp_path / "m.py"
    path.write_text(
        '"""Doc."""\n\n\ndef f(x):  # why\n    """Doc\n    more."""\n    return (x +\n  1)\n'
    )
    assert logical_lines(path) == 2


def test_no_two_modules_of_the_library_share_a_name():
    twins = Counter(
        p.stem
        for p in (ROOT / "fl_privacy_lib").rglob("*.py")
        if "chapters" not in p.parts and p.stem != "__init__"
    )
    allowed = {"statements"}  # of an audit, and as the records hold them
    assert {name for name, count in twins.items() if count > 1} <= allowed


def test_only_paths_and_the_command_line_read_the_environment():
    # the last: where a launcher says who is who
    allowed = {
        "paths.py",
        "__main__.py",
        "groups.py",
    }
    for path in (ROOT / "fl_privacy_lib").rglob("*.py"):
        if path.name not in allowed:
            assert "os.environ" not in path.read_text() and "os.getenv" not in path.read_text(), (
                path
            )


def test_nothing_below_reproduction_prints():
    for path in (ROOT / "fl_privacy_lib").rglob("*.py"):
        if "reproduction" in path.parts or path.name == "__main__.py":
            continue
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path


def test_no_registry_host_and_no_private_path_is_named():
    # written in pieces, so that this file does not name them either
    pieces = [
        ("pypi", r"\.org"),
        ("python", "hosted"),
        ("registry", r"\.npmjs"),
        ("deb", r"\.debian"),
    ]
    pieces += [("/ro", "ot/"), ("/work", "/main")]
    hosts = re.compile("|".join(a + b for a, b in pieces))
    for name in tracked():
        path = ROOT / name
        if path.suffix in {".png"}:
            continue
        host = hosts.search(path.read_text(encoding="utf-8", errors="ignore"))
        assert not host, f"{name} names {host.group()}"


def test_no_large_file_and_no_data_set_is_tracked():
    for name in tracked():
        assert (ROOT / name).stat().st_size < 1_500_000, name
        assert not name.endswith((".gz", ".npz", ".parquet", ".pkl", ".pt")), name


def test_make_help_has_one_line_for_each_target():
    quiet = ["make", "--no-print-directory", "help"]
    done = subprocess.run(quiet, cwd=ROOT, capture_output=True, text=True, check=True)
    targets = {line.split()[1] for line in done.stdout.splitlines()}
    assert {"help", "setup", "book", "run", "record", "test", "lint", "serve", "clean"} <= targets
    assert targets == set(
        re.search(r"\.PHONY: (.*)", (ROOT / "Makefile").read_text()).group(1).split()
    )
