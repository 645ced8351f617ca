"""Fed-αCDP's recorded cells: the trainings of each table, and what is read off them (chapter 07).

Nothing is computed here. Every setting below was written down before the first recording. Rows of
Fed-SDP and Fed-CDP that chapter 05 records at the same setting are read there (`settings.yml`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from scipy.optimize import brentq

from fl_privacy_lib.accounting.conventions import NOISE_MULTIPLIER, ROUNDS
from fl_privacy_lib.accounting.recompute import recompute
from fl_privacy_lib.chapters.fed_alpha_cdp.parameters import FedAlphaCdp
from fl_privacy_lib.chapters.fed_alpha_cdp.training import (
    ALPHA,
    DIVISORS,
    FALLING,
    AlphaTraining,
    Levels,
    level_values,
)
from fl_privacy_lib.reproduction.experiment import Result, Row
from fl_privacy_lib.reproduction.experiments.searching import (
    Cell,
    Tried,
    judged,
    reached_values,
    row_of,
    stopped_values,
)
from fl_privacy_lib.reproduction.experiments.setups import setup_of
from fl_privacy_lib.reproduction.experiments.spending import spent
from fl_privacy_lib.reproduction.published import load_published
from fl_privacy_lib.reproduction.records import Values, numbers
from fl_privacy_lib.reproduction.verdict import TAKEN_OVER_FROM

PAPER = "fed_alpha_cdp"
MIDDLE, OTHER_CLIPS = (4.0,), (0.1, 0.5, 1.0, 2.0, 8.0, 16.0, 32.0)
FED_CDP_RECORDED = (0.5, 1.0, 2.0, 4.0, 8.0)  # in chapter 05
Z_SCORED, BY_RANGE, IMAGES = ("cancer_z", "adult_z"), ("cancer", "adult"), ("cifar10", "lfw")
FACTORS = (
    "fed_cdp", ALPHA, "fed_cdp_sigma_exponential", f"{ALPHA}_sigma_exponential"
)  # fmt: skip
"""ℓ2-max and a falling σ, neither, each, and both."""
Cells = Callable[[FedAlphaCdp, str], list[Cell]]


def training(settings: FedAlphaCdp, dataset: str, method: str, **changes: Any) -> AlphaTraining:
    """Return a cell at the paper's settings for a data set, cut to the profile's T and L.

    Unless a change says otherwise: C = 4, σ = 6, a hundred of a thousand clients a round, and noise
    as section 5.2 prints it.
    """
    setup = setup_of(dataset)
    published: dict[str, Any] = {
        "setting": "not_applicable" if method == "non_private" else "printed",
        "clients": setup.clients, "participants": min(100, setup.clients),
        "batch_size": setup.batch_size, "rounds": min(setup.rounds, settings.rounds),
        "local_iterations": min(100, settings.local_iterations), "seeds": settings.seeds,
    }  # fmt: skip
    return AlphaTraining(dataset, method, **published | changes)


def table_5(clips: tuple[float, ...], settings: FedAlphaCdp, dataset: str) -> list[Cell]:
    """Return Table 5's cells with these bounds that chapter 05 does not record.

    The cell C = 4 has a search of its own. The others try three rates around its choice: a clipped
    step is as long as C, and an update is clipped whatever the rate was.
    """
    cells = []
    for method in ("fed_sdp", "fed_cdp", ALPHA):
        middle = training(settings, dataset, method)
        for clip in clips:
            if method == "fed_cdp" and clip in FED_CDP_RECORDED:
                continue
            point = replace(middle, clip_norm=clip)
            factor = 1.0 if method == "fed_sdp" else middle.clip_norm / clip
            around = None if point == middle else middle
            cells.append(Cell(point, {"clip": f"{clip:g}"}, around, factor))
    return cells


def readings(settings: FedAlphaCdp, dataset: str) -> list[Cell]:
    """Return Fed-αCDP at C = 4 in the other readings, each with a search of its own."""
    return [
        Cell(training(settings, dataset, ALPHA, setting=setting), {"clip": "4"})
        for setting in ("algorithm_1", "code", "released")
    ]


def noise_scales(schedule: str, settings: FedAlphaCdp, dataset: str) -> list[Cell]:
    """Return Fed-αCDP[σ] under every policy; three rates around the fixed scale's are tried."""
    middle = training(settings, dataset, ALPHA)
    points = [replace(middle, method=m, schedule=schedule) for m in FALLING]
    return [Cell(point, {"clip": "4"}, middle, 1.0) for point in points]


def table_4(
    clients: int, shares: tuple[float, ...], settings: FedAlphaCdp, dataset: str
) -> list[Cell]:
    """Return Fed-αCDP in populations of K clients.

    From 200 clients a round on, one seed takes the rate that K = 1,000 and K_t = 100 chose.
    """
    cells = []
    for share in shares:
        participants = round(share * clients)
        few = participants < TAKEN_OVER_FROM
        sizes = {"clients": clients, "participants": participants}
        point = training(settings, dataset, ALPHA, **sizes)
        around = None if few else training(settings, dataset, ALPHA)
        point = point if few else replace(point, seeds=1)
        cells.append(Cell(point, {"participation": f"{share:.2f}"}, around))
    return cells


def table_10(settings: FedAlphaCdp, dataset: str) -> list[Cell]:
    """Return the two adaptive clippings with the noise of the others.

    AdaClip needs whole gradients, and is trained at a reduced setting.
    """
    cell = partial(training, settings, dataset)
    less = {"clients": 100, "participants": 5, "rounds": min(10, setup_of(dataset).rounds)}
    return [Cell(cell("quantile_clip"), {}), Cell(cell("adaclip", **less), {})]


def figure_3(settings: FedAlphaCdp, dataset: str) -> list[Cell]:
    """Return Fig. 3's trainings but for noisy DSSGD, whose noise is not printed; K = 100, K_t = 10.

    Pruning, selection and random noise change the update that a client sends.
    """
    cell = partial(training, settings, dataset, clients=100, participants=10)
    arms = {
        "no defence": cell("non_private"),
        "10 % pruned": cell("non_private", pruned=0.1),
        "90 % pruned": cell("non_private", pruned=0.9),
        "without noise": cell("dssgd"),
        "variance 0.001": cell("gaussian", noise_scale=0.0316228),
        "variance 0.01": cell("gaussian", noise_scale=0.1),
        "at the server": cell("fed_sdp_server"),
        "at the client": cell("fed_sdp"),
        "C = 1, σ = 2": cell("fed_cdp", clip_norm=1.0, noise_scale=2.0),
        "C = 4, σ = 6": cell("fed_cdp"),
    }
    return [Cell(point, {"arm": arm}) for arm, point in arms.items()]


def ablation(settings: FedAlphaCdp, dataset: str) -> list[Cell]:
    """Return every combination of placement, ℓ2-max and falling σ, at equal ε; K = 100, K_t = 20.

    'claimed' : all have the counted ε of Fed-CDP at σ = 6, and beside them two sound ways to lower
        the noise, a falling bound and a private quantile
    'proved' : those that have a proof, with the proved ε of Fed-CDP at σ = 6, noise over B. There
        the placement changes nothing that is released: σ/√B per example is σ on the batch.
    """
    cell = partial(training, settings, dataset, clients=100, participants=20)
    falling = {"clip_norm": 6.0, "clip_end": 2.0}
    points = [("claimed", cell(m, setting=reading)) for reading in DIVISORS for m in FACTORS]
    for panel in ("claimed", "proved"):
        points += [(panel, cell("fed_cdp_decay", setting="code", **falling)),
                   (panel, cell("quantile_clip", setting="code"))]  # fmt: skip
    points += [("proved", cell(m, setting="code")) for m in FACTORS if ALPHA not in m]
    return [Cell(at_budget(point, panel), {"panel": panel}) for panel, point in points]


@cache
def at_budget(point: AlphaTraining, panel: str) -> AlphaTraining:
    """Return a training with the noise scale that spends what Fed-CDP does at σ = 6.

    Parameters
    ----------
    panel : 'claimed', the ε that papers count, or 'proved'
    """
    same = replace(point, noise_scale=NOISE_MULTIPLIER)
    budget = replace(same, method="fed_cdp", setting="code", clip_norm=4.0, clip_end=0.0)

    def excess(noise_scale: float) -> float:
        both = spent(replace(same, noise_scale=noise_scale)), spent(budget)
        one, other = ((s.paper if panel == "claimed" else s.proved).epsilon for s in both)
        return one - other

    if abs(excess(NOISE_MULTIPLIER)) < 1e-9:
        return same
    return replace(same, noise_scale=float(f"{brentq(excess, 2.0, 30.0, rtol=1e-4):.4g}"))


@dataclass(frozen=True)
class Column:
    """A part of the recording: a table, its data sets and its cells."""

    table: str
    datasets: tuple[str, ...]
    cells: Cells

    def rows(self, kind: Any, settings: FedAlphaCdp, dataset: str, tried: Tried) -> list[Row]:
        """Return the rows of one kind, `searches` or `judged`, of a data set."""
        return kind(self.cells(settings, dataset), tried)


SHARES = (0.05, 0.1, 0.2, 0.5)
COLUMNS = {
    "table_5": Column("table_5", Z_SCORED, partial(table_5, MIDDLE + OTHER_CLIPS)),
    "table_5_by_range": Column("table_5", BY_RANGE, partial(table_5, MIDDLE)),
    "readings": Column("table_5", Z_SCORED, readings),
    "table_8": Column("noise_scales", Z_SCORED, partial(noise_scales, "epsilon")),
    "table_10": Column("table_10", Z_SCORED, table_10),
    "ablation": Column("ablation", ("mnist",), ablation),
    "table_5_mnist": Column("table_5", ("mnist",), partial(table_5, MIDDLE)),
    "readings_mnist": Column("table_5", ("mnist",), readings),
    "table_5_images": Column("table_5", IMAGES, partial(table_5, MIDDLE)),
    "table_8_images": Column("noise_scales", ("mnist", *IMAGES), partial(noise_scales, "epsilon")),
    "table_4_100": Column("table_4", ("mnist",), partial(table_4, 100, SHARES)),
    "figure_3": Column("figure_3", ("lfw",), figure_3),
    "table_4_1000": Column("table_4", ("mnist",), partial(table_4, 1000, SHARES)),
    "table_4_10000": Column("table_4", ("mnist",), partial(table_4, 10_000, SHARES[:1])),
    "table_10_mnist": Column("table_10", ("mnist",), table_10),
    "table_5_mnist_clips": Column("table_5", ("mnist",), partial(table_5, OTHER_CLIPS)),
    "printed": Column("noise_scales", (*Z_SCORED, "mnist"), partial(noise_scales, "printed")),
}
"""Part → its table, data sets and cells, in the order in which they are recorded."""


def finished(settings: FedAlphaCdp, dataset: str, tried: Tried) -> dict[str, Row]:
    """Return the judged rows at C = 4 of Fed-SDP, Fed-αCDP and Fed-αCDP[σ], by method."""
    cells = table_5(MIDDLE, settings, dataset) + noise_scales("epsilon", settings, dataset)
    rows = judged(cells, tried)
    return {row.points[0].method: row for row in rows}


@cache
def stops(table: str) -> dict[tuple[str, ...], int]:
    """Return (data set, method, accounting, budget) → the round at which a table stops, ours."""
    printed: Any = load_published(f"{PAPER}/{table}").to_dict("records")
    names = ("dataset", "method", "accounting", "target_epsilon")
    return {tuple(c.keys.get(n, "moments_accountant") for n in names): int(c.ours)
            for c in recompute(PAPER, table, printed) if c.kind == "rounds"}  # fmt: skip


def stopped(settings: FedAlphaCdp, dataset: str, tried: Tried) -> list[Row]:
    """Return Tables 8 and 11: each finished training, stopped where a budget is spent."""
    name, rows = dataset.removesuffix("_z"), finished(settings, dataset, tried)
    ends = stops("table_8") | {k: v for k, v in stops("table_11").items() if k[2] in OTHERS}
    ends |= {("mnist", ALPHA, "all", "all"): ROUNDS["mnist"]}
    return [
        Row({"accounting": accounting, "target_epsilon": budget, "stopped_at": str(end)}
            | rows[method].key, rows[method].points,
            partial(stopped_values, min(1.0, end / ROUNDS[name])), rows[method].seeds)
        for (of, method, accounting, budget), end in ends.items()
        if of == name and method in rows
    ]  # fmt: skip


OTHERS = ("base", "advanced", "zcdp")
"""The accountants of Table 11 beside that of Table 8."""


def reached(settings: FedAlphaCdp, dataset: str, tried: Tried) -> list[Row]:
    """Return Table 7: when Fed-SDP and Fed-αCDP first reach Fed-SDP's accuracy.

    The accuracy is that of our own Fed-SDP, or the printed one.
    """
    rows, found = finished(settings, dataset, tried), []
    printed = load_published(f"{PAPER}/table_7")
    printed = printed[printed["dataset"] == dataset.removesuffix("_z")]
    for method in ("fed_sdp", ALPHA):
        if "fed_sdp" not in rows or method not in rows:
            continue
        row = rows[method]
        (line,) = printed[(printed["method"] == method) & (printed["metric"] == "rounds")].to_dict(
            "records"
        )
        for target, accuracy in (("measured", None), ("printed", float(line["target_accuracy"]))):
            values = partial(_reached, row.points[0].rounds, accuracy, int(line["value"]))
            points = (rows["fed_sdp"].points[0], row.points[0])
            found.append(Row({"target": target} | row.key, points, values, row.seeds))
    return found


def _reached(rounds: int, target: float | None, printed: int, results: list[Result]) -> Values:
    """Return when a training reaches a target, beside the printed round."""
    return reached_values(rounds, results, "rounds", target) | {
        "printed_rounds": numbers([printed])
    }


def levels(settings: FedAlphaCdp, dataset: str, tried: Tried) -> list[Row]:
    """Return S over the rounds of Fed-αCDP, K = 100 and K_t = 5, for two bounds.

    At the rate that Fed-CDP chose there, without noise at that of non-private training, and at the
    released code's rate and a tenth of it, where the noise breaks the training.
    """
    cell = partial(training, settings, dataset, clients=100, participants=5, seeds=1)
    of_noise = {NOISE_MULTIPLIER: cell("fed_cdp", setting="code"), NO_NOISE: cell("non_private")}
    chosen = [(s, Cell(point, {}).search(tried).rate) for s, point in of_noise.items()]
    arms = [(NOISE_MULTIPLIER, 0.05), (NOISE_MULTIPLIER, 0.005), *chosen]
    points = [Levels(cell(ALPHA, setting="code", clip_norm=c, noise_scale=s, local_lr=rate))
              for c in (4.0, 32.0) for s, rate in arms if rate is not None]  # fmt: skip
    return [row_of(p, partial(level_values, p)) for p in points]


NO_NOISE = 1e-6
"""A noise scale at which S is read and nothing is felt."""
