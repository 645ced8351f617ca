"""What the page on rerunning says of each chapter: its parameters, and how long this build took."""

import json
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

import fl_privacy_lib
from fl_privacy_lib.chapters import CHAPTERS
from fl_privacy_lib.reproduction.execution import allowed
from fl_privacy_lib.reproduction.settings import PROFILES
from fl_privacy_lib.reproduction.tables import Table


class Written(SphinxDirective):
    """A directive whose content is Markdown that `markdown` returns."""

    def run(self):
        """Parse that Markdown where the directive stands."""
        node = nodes.container()
        lines = StringList(self.markdown().splitlines(), "chapters")
        self.state.nested_parse(lines, self.content_offset, node, match_titles=1)
        return node.children


class Parameters(Written):
    """``{parameters}``: every notebook's parameters, and what each profile changes."""

    def markdown(self):
        """Return a section for each chapter."""
        parts = []
        for number, kind in CHAPTERS.items():
            values, profiles = kind().model_dump(), kind.profiles
            rows = [
                [f"`{name}`", f"`{values[name]!r}`", allowed(kind, name).replace(" | ", ", "),
                 field.description]
                for name, field in kind.model_fields.items()
            ]  # fmt: skip
            changed = [
                [f"`{n}`", *(f"`{profiles.get(p, {}).get(n, v)}`" for p in PROFILES)]
                for n, v in values.items()
                if any(n in profile for profile in profiles.values())
            ]
            parts += [
                f"### `NB={number}`\n\n{{doc}}`/notebooks/{kind.notebook}`:",
                Table(["parameter", "quick (default)", "allowed", "meaning"], rows).markdown(),
                "What the profiles change:",
                Table(["parameter", *PROFILES], changed).markdown(),
            ]
        return "\n\n".join(parts)


class RunTimes(Written):
    """``{run-times}``: how long each notebook took in this build."""

    def markdown(self):
        """Return the table."""
        rows = []
        for kind in CHAPTERS.values():
            path = Path(self.env.srcdir, "notebooks", f"{kind.notebook}.ipynb")
            seconds = json.loads(path.read_text())["metadata"]["papermill"]["duration"]
            page = f"{{doc}}`/notebooks/{kind.notebook}`"
            rows.append([page, f"`{seconds:.0f}` s", f"`{fl_privacy_lib.__version__}`"])
        return Table(["chapter", "this build", "library"], rows).markdown()


def setup(app):
    """Register the two directives."""
    app.add_directive("parameters", Parameters)
    app.add_directive("run-times", RunTimes)
    return {"version": "1"}
