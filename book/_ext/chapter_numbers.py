"""Numbers of figures, exercises and definitions by chapter: Fig. 5.3 is the third of chapter 5.

Sphinx numbers them over the whole book, so that a new chapter would renumber all that follow. The
number of a chapter is that of its file; an appendix counts A.1, A.2, … (Fig. 5.A.1).
"""

import re

CHAPTER = re.compile(r"notebooks/0*(\d+)_\w+?(_appendix)?$")


def renumber(app, env):
    """Give what a chapter numbers the chapter's number and a count of its own."""
    for name, kinds in env.toc_fignumbers.items():
        page = CHAPTER.match(name)
        if page:
            chapter, appendix = page.groups()
            prefix = (chapter, "A") if appendix else (chapter,)
            for numbers in kinds.values():
                numbers.update({k: (*prefix, n) for n, k in enumerate(numbers, 1)})
    return []


def setup(app):
    """Run after Sphinx's own collector, which is called by the same event."""
    app.connect("env-get-updated", renumber, priority=900)
    return {"version": "1", "parallel_read_safe": True}
