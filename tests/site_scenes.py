"""The pages of the built book."""

import yaml

from fl_privacy_lib.reproduction.paths import ROOT


def pages_of() -> list[str]:
    """Return the pages of the table of contents, relative to the built book."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    listed = [c for part in toc["parts"] for c in part["chapters"]]
    inner = [c for page in listed for c in page.get("sections", [])]
    return [f"{c['file']}.html" for c in ({"file": toc["root"]}, *listed, *inner)]
