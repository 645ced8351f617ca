"""The compiled engine stands for the earlier one: twelve cells of Table II, trained again.

The table itself has been recorded anew since, with the compiled engine and at searched rates.
"""

import math

import pandas as pd
import pytest

from fl_privacy_lib.reproduction.paths import MEASURED
from tools.engine_agreement import ARMS, standard_errors

ROWS = pd.read_csv(MEASURED / "engine_agreement.csv")


def test_every_cell_is_there_and_within_three_standard_errors():
    keys = set(zip(ROWS["method"], ROWS["setting"], ROWS["participants"], strict=True))
    assert (
        keys == {(*arm, participants) for arm in ARMS for participants in (5, 10)}
        and len(ROWS) == 12
    )
    for _, row in ROWS.iterrows():
        recorded, measured = (row["recorded"], row["recorded_std"]), (row["mean"], row["std"])
        apart = standard_errors(recorded, measured, row["seeds"])
        assert apart == pytest.approx(row["standard_errors"], rel=1e-3) and apart <= 3


def test_standard_errors():
    assert standard_errors((0.5, 0.3), (0.9, 0.4), 25) == pytest.approx(4.0)  # 0.4 over 0.5 / 5
    assert standard_errors((0.5, 0.0), (0.5, 0.0), 3) == 0 and math.isinf(
        standard_errors((0.5, 0.0), (0.6, 0.0), 3)
    )
