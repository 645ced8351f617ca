"""From the text to the code and back: the API pages, and the role that links to a line.

``.. package:: fl_privacy_lib.attacks`` documents a package's modules with all that is public in
them; beside each object stand the chapters whose code uses it. The role
``{source}`text <fl_privacy_lib.attacks.reconstruct.reconstruct>``` links to the lines themselves; a
name that does not exist ends the strict build.
"""

import ast
import importlib
import inspect
import json
import pkgutil
import re
from collections import defaultdict
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util import logging
from sphinx.util.docutils import ReferenceRole, SphinxDirective


def found(name):
    """Return the module and the object of a dotted name; the object is None for a module."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        target = module
        for part in parts[cut:]:
            target = getattr(target, part)
        return (module, None) if target is module else (module, target)
    raise AttributeError(name)


def full_name(module, target):
    """Return where a class or function is defined, 'module.name'; None for anything else."""
    if inspect.isroutine(target) or inspect.isclass(target):
        return f"{target.__module__}.{target.__qualname__}"
    return None


class Package(SphinxDirective):
    """``.. package:: name``: all modules of a package, with what is public in them."""

    required_arguments = 1

    def run(self):
        """Return autodoc's nodes, module after module."""
        package = importlib.import_module(self.arguments[0])
        names = [package.__name__]
        if hasattr(package, "__path__"):
            names += [m.name for m in pkgutil.walk_packages(package.__path__, f"{names[0]}.")]
        lines = []
        for name in names:
            if name.rpartition(".")[2].startswith("_"):
                continue
            lines += [f".. rubric:: {name}", "", f".. automodule:: {name}"]
            # a package shows its modules, which hold what it passes on
            lines += [
                "" if hasattr(importlib.import_module(name), "__path__") else "   :members:",
                "",
            ]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, "api"), self.content_offset, node)
        return node.children


class Source(ReferenceRole):
    """``{source}`text <name>```: a link to the lines of a module, class or function."""

    def run(self):
        """Return the link, or a warning where the name does not exist."""
        try:
            module, target = found(self.target)
            name = full_name(module, target) if target is not None else module.__name__
            name = name or self.target
        except AttributeError:
            logging.getLogger(__name__).warning(
                "no such code: %s", self.target, location=self.get_location()
            )
            return [nodes.literal(text=self.title)], []
        module_name = (
            module.__name__ if target is None else getattr(target, "__module__", module.__name__)
        )
        anchor = "" if target is None else "#" + name[len(module_name) + 1 :]
        up = "../" * self.env.docname.count("/")
        uri = f"{up}_modules/{module_name.replace('.', '/')}.html{anchor}"
        text = self.title if self.has_explicit_title else self.target.rpartition(".")[2]
        reference = nodes.reference("", "", internal=True, refuri=uri, classes=["source-link"])
        reference += nodes.literal(text=text) if not self.has_explicit_title else nodes.Text(text)
        return [reference], []


def used_names(notebook):
    """Return the full names of the library's objects that a notebook's code uses."""
    modules, used = {}, set()
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "fl_privacy_lib"
            ):
                for alias in node.names:
                    module, target = found(f"{node.module}.{alias.name}")
                    if target is None:
                        modules[alias.asname or alias.name] = module
                    else:
                        used.add(full_name(module, target))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id)
                if module is not None and hasattr(module, node.attr):
                    used.add(full_name(module, getattr(module, node.attr)))
    return used - {None}


def collect(app):
    """Note which chapters use which object."""
    app.used_in = defaultdict(list)
    for notebook in sorted(Path(app.srcdir, "notebooks").glob("[0-9][0-9]_*.ipynb")):
        if not notebook.stem.endswith(("_appendix", ".partial")):
            for name in used_names(notebook):
                app.used_in[name].append(notebook.stem)


SECTION = re.compile(r"-{3,}$")
MARKS = re.compile(r"``[^`]*``|`[^`]*`|[*|\\]|_(?!\w)")
LISTS = ("Parameters", "Attributes", "Returns", "Yields", "Raises")
VERBATIM = "doctests and tables"


def plain(text):
    """Return a line of a docstring with reST's marks escaped, but for its pieces of code."""
    return MARKS.sub(lambda m: m[0] if m[0][0] == "`" else "\\" + m[0], text)


def typeset(app, what, name, obj, options, lines):
    """Turn a docstring, which is plain text in numpydoc's sections, into reST; add its chapters."""
    result, section, bullet, i = [], "", False, 0
    while i < len(lines):
        line, after = lines[i], lines[i + 1] if i + 1 < len(lines) else ""
        if line and SECTION.fullmatch(after):
            section = line
            result += [f"**{section}**", ""]
            i += 2
            continue
        if line.lstrip().startswith((">>>", "====")):
            section = VERBATIM
        if not line:
            section = "" if section == VERBATIM else section
            result.append("")
        elif section == VERBATIM:
            result.append(line)
        elif (
            section in LISTS
            and not line.startswith(" ")
            and " : " not in line
            and not after.startswith(" ")
        ):
            section = ""  # a paragraph after the list
            result += ["", plain(line)]
        elif section in LISTS and not line.startswith(" "):
            term, _, meaning = line.partition(" : ")
            kind = f" ({plain(meaning)})" if meaning and after.startswith(" ") else ""
            result += ["", f"* ``{term}``{kind}:" + ("" if kind else f" {plain(meaning)}")]
        elif section in LISTS:
            result.append("  " + plain(line.strip()))
        else:
            bullet = line.startswith("- ") or (bullet and bool(line[:1].isspace()))
            result.append(("  " if bullet and line[0] == " " else "") + plain(line.strip()))
        i += 1
    pages = app.used_in.get(name, [])
    if pages:
        result += [
            "",
            "**Used in** " + ", ".join(f":doc:`/notebooks/{page}`" for page in pages) + ".",
        ]
    lines[:] = [*result, ""]


def setup(app):
    """Register the directive, the role and what typesets a docstring."""
    app.add_directive("package", Package)
    app.add_role("source", Source())
    app.connect("builder-inited", collect)
    app.connect("autodoc-process-docstring", typeset)
    return {"version": "1"}
