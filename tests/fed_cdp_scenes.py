"""What the tests of Fed-CDP's cells share."""

from fl_privacy_lib.chapters.fed_cdp.rates import Recorded
from fl_privacy_lib.reproduction.experiments.searching import Try, step_near


class EveryRate(dict):
    """Learning rates as if every arm had been tuned."""

    def __contains__(self, arm):
        return True

    def __missing__(self, arm):
        return 0.01


class EveryTry(dict):
    """Searches as if every rate had been tried in every cell, and 0.0158 was the best."""

    def get(self, cell, default=None):
        return EveryTry()

    def __contains__(self, point):
        return True

    def __missing__(self, point):
        return Try(0.5 - 0.01 * abs(step_near(point[1]) + 1), 0.001, True)


EVERYTHING = Recorded(EveryRate(), EveryTry())
NOTHING = Recorded({}, {})
