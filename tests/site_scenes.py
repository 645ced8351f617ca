"""The pages of the built book, and a browser's tab that notes what goes wrong."""

import contextlib
import json
import re

import yaml

from fl_privacy_lib.reproduction.paths import ROOT


def pages_of() -> list[str]:
    """Return the pages of the table of contents, relative to the built book."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    listed = [c for part in toc["parts"] for c in part["chapters"]]
    inner = [c for page in listed for c in page.get("sections", [])]
    return [f"{c['file']}.html" for c in ({"file": toc["root"]}, *listed, *inner)]


def explorer_data(page):
    """Return the sliders, the start and the values that an explorer's HTML carries."""
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])


@contextlib.contextmanager
def noting_tab(browser, address):
    """Open a page that notes every console error, failed request and request to another host."""
    context = browser.new_context()
    tab = context.new_page()
    tab.troubles = []
    tab.on(
        "console", lambda m: tab.troubles.append(m.text) if m.type in ("error", "warning") else None
    )
    tab.on("pageerror", lambda e: tab.troubles.append(str(e)))

    def note_failure(request):
        # the next page may cut off an icon; that it is there is checked beside every page
        if not (request.url.endswith("favicon.svg") and request.failure == "net::ERR_ABORTED"):
            tab.troubles.append(f"failed: {request.url}")

    tab.on("requestfailed", note_failure)
    tab.on(
        "response",
        lambda r: tab.troubles.append(f"{r.status}: {r.url}") if r.status >= 400 else None,
    )
    tab.on(
        "request",
        lambda r: None if r.url.startswith((address, "data:")) else tab.troubles.append(r.url),
    )
    yield tab
    context.close()
