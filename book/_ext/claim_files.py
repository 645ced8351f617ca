"""The ledger and its compared cells as files that a reader can take along."""

import pandas as pd
from claim_rows import Claim
from claim_tables import command

from fl_privacy_lib.reproduction.figures import named
from fl_privacy_lib.reproduction.verdict import Status


def claims_csv(claims: list[Claim]) -> str:
    """Return the list as CSV, a line a claim."""
    rows = [
        {
            "id": c.id,
            "paper": named(c.entry["paper"]),
            "where": c.entry["where"],
            "kind": c.entry["kind"],
            "chapter": c.entry["chapter"],
            "statement": c.entry["statement"],
            "test": " ".join(c.tests),
            "status": str(c.status),
            "held": c.verdict.held,
            "cells": c.verdict.cells,
            "published": c.published,
            "measured": c.measured,
            "of": c.which,
            "deviation": c.deviation,
            "seeds": c.seeds,
            "data": ", ".join(c.data),
            "why": c.why,
            "more": " ".join(c.more),
            "record": f"results/measured/{c.entry['table']}.csv" if "table" in c.entry else "",
            "command": command(c.entry["table"]) if "table" in c.entry else "",
        }
        for c in claims
    ]
    return pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")


def cells_csv(claims: list[Claim]) -> str:
    """Return every compared cell as CSV."""
    words = {True: "yes", False: "no", None: "undecided"}
    against = words | {True: "counter-example"}
    rows = [
        {"id": c.id, "cell": cell.words, "asked": cell.asked, "found": f"{cell.found:.6g}",
         "spread": f"{cell.spread:.3g}", "deviation": f"{cell.gap:.3g}", "seeds": cell.seeds,
         "holds": (against if c.status is Status.REFUTED else words)[cell.held]}
        for c in claims for cell in c.cells
    ]  # fmt: skip
    return pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")
