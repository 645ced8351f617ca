"""Recording chapter 03: the papers' cells of ε, and the cases that the ledger's claims rest on.

Nothing is random here, so a row is one value: its standard deviation is 0 and its n is 1.
"""

from functools import partial
from pathlib import Path

from fl_privacy_lib.chapters.counting_privacy.grid import TABLES, cell_row, cells
from fl_privacy_lib.chapters.counting_privacy.parameters import CountingPrivacy
from fl_privacy_lib.chapters.counting_privacy.statements import STATEMENTS, statement_rows
from fl_privacy_lib.reproduction.experiment import Experiment, Part, Row, computed_row


class CountingExperiment(Experiment):
    """Chapter 03 measures nothing: every row is computed at once."""

    chapter = "03"
    on_cpu = True

    def parts(self, settings: CountingPrivacy, folder: Path) -> list[Part]:
        """Return the accounting tables and the statements; no setting changes them."""
        tables = [Part(table, partial(_cells, table)) for table in TABLES]
        return [*tables, Part(STATEMENTS, lambda _: [case.row() for case in statement_rows()])]


def _cells(table: str, _: tuple[str, ...]) -> list[Row]:
    rows = []
    for cell in cells(table):
        key = cell_row(table, cell)
        rows.append(computed_row(key, {key.pop("metric"): cell.ours}))
    return rows


EXPERIMENT = CountingExperiment()
