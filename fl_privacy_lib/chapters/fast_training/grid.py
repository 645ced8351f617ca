"""The papers' tables of time: their methods, and the engines that run them (chapter 04)."""

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import mean, pstdev

import numpy as np

from fl_privacy_lib.chapters.fast_training.engines import (
    CLIP_NORM,
    Engine,
    Workload,
    Written,
    fast,
    interleaved,
    ratio,
)
from fl_privacy_lib.defenses import (
    Defense,
    fed_alpha_cdp,
    fed_cdp,
    fed_cdp_decay,
    fed_sdp,
    non_private,
)
from fl_privacy_lib.reproduction.experiment import Result, Row
from fl_privacy_lib.reproduction.experiments.setups import PAPER, SETUPS
from fl_privacy_lib.reproduction.records import Values

FEDERATED = {
    name: Workload(SETUPS[name].shape, SETUPS[name].batch_size, SETUPS[name].classes)
    for name in PAPER
}
"""Fed-CDP's and Fed-αCDP's data sets, with the local batch sizes of Fed-CDP's Table I."""
CENTRALISED = {
    "mnist": Workload((1, 28, 28), 600),
    "fashion_mnist": Workload((1, 28, 28), 600),
    "cifar10": Workload((3, 32, 32), 500),
    "lfw": Workload((3, 32, 32), 22, 62),
    "purchase": Workload((600,), 100),
}
"""The dynamic-parameters paper's, with the batch sizes of its Table II."""
PARTICIPATION = "fed_cdp/table_3_participation"
"""What acts once a participation, timed over a whole one: the paper's hundred local iterations."""
SCHEDULED = 0.75 * CLIP_NORM  # a bound that has decayed: the value changes no time
WRITTEN: dict[str, dict[str, Written]] = {
    "fed_cdp/table_3": {
        "non_private": Written(None),
        "fed_sdp": Written(at_update=True),
        "fed_cdp": Written(),
        "fed_cdp_decay": Written(SCHEDULED),
    },
    PARTICIPATION: {"non_private": Written(None), "fed_sdp": Written(at_update=True)},
    "fed_alpha_cdp/table_9": {
        "non_private": Written(None),
        "fed_sdp": Written(at_update=True),
        "fed_cdp": Written(),
        "fed_alpha_cdp": Written(largest=True),
        "fed_alpha_cdp_sigma": Written(noise_scale=15.0, largest=True),
    },
    "dynamic_parameters/table_10": {
        "non_private": Written(None),
        "dp_baseline": Written(on_batch=True),
        "dp_dyns_cdecay": Written(SCHEDULED, on_batch=True),
        "dp_dyns_l2max": Written(largest=True, on_batch=True),
        "dp_dyns": Written(SCHEDULED, largest=True, on_batch=True),
        "dp_dyns_sigma": Written(SCHEDULED, 15.0, largest=True, on_batch=True),
    },
}
"""Table → method → its round as the paper writes it down."""
SIZES = {PARTICIPATION: (5, 100), "dynamic_parameters/table_10": (1, 2)}
"""Table → K_t and L of its runs; the others have 5 and 10."""
COMPILED: dict[str, Defense] = {
    "non_private": non_private(),
    "fed_sdp": fed_sdp(),
    "fed_cdp": fed_cdp(),
    "fed_cdp_decay": fed_cdp_decay(),
    "fed_alpha_cdp": fed_alpha_cdp(),
    "fed_alpha_cdp_sigma": fed_alpha_cdp(noise_scale=15.0),
    "dp_baseline": fed_cdp("batch"),
    "dp_dyns_cdecay": fed_cdp_decay("batch"),
    "dp_dyns_l2max": fed_alpha_cdp("batch"),
}
"""Method → the defence that the compiled engine trains; rules that follow norms are among them."""
STACKED = ("non_private", "fed_sdp", "fed_cdp", "dp_baseline")
BASE = {PARTICIPATION: "non_private", "dynamic_parameters/table_10": "dp_baseline"}
"""Table → the method whose cost the paper compares its own with; the others' is Fed-CDP."""
PLAIN = "as_written:non_private"


def workloads(table: str) -> dict[str, Workload]:
    """Return a table's data sets, with the network and the batch of each."""
    return CENTRALISED if table.startswith("dynamic_parameters") else FEDERATED


@dataclass(frozen=True)
class Timing:
    """One interleaved run: all engines and methods of a table on a data set's workload."""

    table: str
    data: str
    repetitions: int
    compiled: bool = True

    @property
    def workload(self) -> Workload:
        """The network and the batch."""
        return workloads(self.table)[self.data]

    @property
    def sizes(self) -> tuple[int, int]:
        """K_t and L of the run."""
        return SIZES.get(self.table, (5, 10))


def compiled_here() -> bool:
    """Return whether the compiled engine can run: numba is installed."""
    return find_spec("numba") is not None


def engines_of(table: str) -> dict[str, Engine]:
    """Return a table's engines, 'kind:method' → the round."""
    engines: dict[str, Engine] = {}
    for method, written in WRITTEN[table].items():
        engines[f"as_written:{method}"] = written
        if method in STACKED:
            engines[f"stacked:{method}"] = fast(COMPILED[method])
        if method in COMPILED and compiled_here():
            engines[f"compiled:{method}"] = fast(COMPILED[method], engine="compiled")
    return engines


def measure(point: Timing) -> Result:
    """Return 'kind:method' → its times [repetitions] in ms per client and local iteration."""
    scene = point.workload.scene(*point.sizes)
    times = interleaved(engines_of(point.table), scene, point.repetitions)
    return {name: np.array(values) for name, values in times.items()}


def rows_of(table: str, repetitions: int) -> list[Row]:
    """Return the rows of a table: one for each data set, engine and method."""
    rows = []
    for data in workloads(table):
        point = Timing(table, data, repetitions, compiled_here())
        participants, iterations = point.sizes
        for name in engines_of(table):
            engine, _, method = name.partition(":")
            key = {
                "dataset": data, "method": method, "engine": engine,
                "batch_size": point.workload.batch_size, "participants": participants,
                "local_iterations": iterations, "repetitions": repetitions,
            }  # fmt: skip

            rows.append(Row(key, (point,), partial(_metrics, table, name)))
    return rows


def _metrics(table: str, name: str, results: list[Result]) -> Values:
    """Return an engine's time, and its ratios to three others, pair by pair."""
    engine, base = name.partition(":")[0], BASE.get(table, "fed_cdp")
    times = {key: list(value) for key, value in results[0].items() if ":" in key}
    pairs = {
        "milliseconds_per_iteration": (mean(times[name]), pstdev(times[name])),
        "ratio_to_non_private": ratio(times, name, f"{engine}:non_private"),
        "ratio_to_plain_loop": ratio(times, name, PLAIN),
        f"ratio_to_{base}": ratio(times, name, f"{engine}:{base}"),
    }
    return {m: {"mean": v, "std": s, "n": len(times[name])} for m, (v, s) in pairs.items()}
