"""Threat types: what an adversary at each tap reconstructs under each defence (chapter 01).

A point is one cell: data set, threat type, method, attacker. `grid` lists the cells of the live
table, `recorded_grid` those of Fed-CDP's Table VII and the data sets of its Fig. 1.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from fl_privacy_lib.chapters.threat_types.parameters import ThreatTypes
from fl_privacy_lib.defenses import STAGES, TAPS, THREAT_TYPES, Defense
from fl_privacy_lib.defenses.registry import METHODS, build
from fl_privacy_lib.reproduction.experiments.setups import setup_of

RECORDED = (
    "non_private", "fed_sdp_client", "fed_sdp_server", "fed_cdp_example", "fed_cdp_batch",
    "fed_cdp_decay_example", "fed_cdp_decay_batch", "dssgd",
)  # fmt: skip
THREATS = THREAT_TYPES | {"type_0_curious": "update"}
"""Threat type → tap.

Type 0 reads after the server's own noise, as the papers assume; a curious server reads before it.
"""


@dataclass(frozen=True)
class Point:
    """One cell of the table, with every setting that its numbers depend on."""

    dataset: str
    threat_type: str
    method: str
    attacker: str  # 'naive' or 'clip_aware'
    victims: int = 16  # clients attacked, for each seed
    batch_size: int = 1
    local_iterations: int = 1
    local_lr: float = 0.05
    clip_norm: float = 4.0
    noise_scale: float = 6.0
    start: str = "patterned"
    optimiser: str = "lbfgs"
    max_iterations: int = 300
    clients: int = 1000
    seed: int = 0
    seeds: int = 1

    @property
    def tap(self) -> str:
        """The tap that this threat type reads."""
        return THREATS[self.threat_type]

    @property
    def defense(self) -> Defense:
        """The defence under which the point is measured; DSSGD's share is not printed."""
        strength = {"clip_norm": self.clip_norm, "noise_scale": self.noise_scale}
        return build(self.method, level=0.5, **strength)

    @property
    def view(self) -> "Point":
        """The point that is attacked for this one: its observation is the same, bit for bit.

        A stage changes nothing at a tap that stands before it, and without clipping there is
        nothing to be aware of. The notebook and a test check the equality on the observed tensors.
        """
        defense, point = self.defense, self
        before_tap = STAGES[: TAPS.index(self.tap) + 1]
        if all(getattr(defense, stage) is None for stage in before_tap):
            point = replace(point, method="non_private")
        if self.tap != "example" and (self.tap == "update" or defense.on_arrival is None):
            point = replace(point, threat_type="type_1")
        if not any(
            part.says and part.says.clip for stage in STAGES for part in point.defense.parts(stage)
        ):
            point = replace(point, attacker="naive", clip_norm=4.0, noise_scale=6.0)
        return point


SHARED = (
    "local_lr",
    "clip_norm",
    "noise_scale",
    "start",
    "optimiser",
    "max_iterations",
    "batch_size",
    "seed",
    "seeds",
)


def grid(settings: ThreatTypes, dataset: str, clients: int) -> list[Point]:
    """Return the cells of the live table: threat type × method × attacker, on one data set.

    Types 0 and 1 read the same values under every method but one, noise at the server, so they
    share their cells as in the papers' tables. Type 2 attacks `victims` clients, the others
    `batch_victims` with a whole batch each. The clip-aware attacker stands only where something is
    clipped.
    """
    shared = {name: getattr(settings, name) for name in SHARED} | {"clients": clients}
    live = [name for name, method in METHODS.items() if method.live]
    late = [name for name in live if build(name).on_arrival is not None]
    threats = {"type_2": live, "type_1": live, "type_0": late}
    points = []
    for threat, methods in threats.items():
        victims = min(settings.victims if threat == "type_2" else settings.batch_victims, clients)
        for method in methods:
            naive = Point(dataset, threat, method, "naive", victims=victims, **shared)
            aware = replace(naive, attacker="clip_aware")
            points += [naive, aware] if aware.view.attacker == "clip_aware" else [naive]
    return points


def threat_name(point: Point) -> str:
    """Return the reader's name for the adversaries that a point stands for."""
    if point.threat_type == "type_1":
        server = point.method == "fed_sdp_server"
        return "type 1 (0 before noise)" if server else "types 0, 1"
    return "type 2" if point.threat_type == "type_2" else "type 0 (after noise)"


TABLE_7 = ("type_2", "type_1", "type_0", "type_0_curious")


def recorded_grid(settings: ThreatTypes, datasets: tuple[str, ...]) -> dict[str, list[Point]]:
    """Return the points of Fed-CDP's Table VII and Fig. 1, the cheap ones first."""
    values = {name: getattr(settings, name) for name in SHARED if name != "batch_size"}

    def point(dataset: str, threat: str, method: str, attacker: str = "naive") -> Point:
        victims = settings.victims if threat == "type_2" else settings.batch_victims
        size = setup_of(dataset).batch_size
        # a decaying bound is attacked at its first value, of 6 → 2
        decay = {"clip_norm": 6.0} if method.startswith("fed_cdp_decay") else {}
        return Point(dataset, threat, method, attacker, victims=victims, batch_size=size,
                     **(values | decay))  # fmt: skip

    cells = [
        (d, t, m, a)
        for t in TABLE_7
        for d in datasets
        for m in RECORDED
        for a in ("naive", "clip_aware")
        if m != "dssgd" or d == "lfw"
    ]
    table = [point(*cell) for cell in cells if cell[0] != "cifar10"]
    table = [p for p in table if p.attacker == "naive" or p.view.attacker == "clip_aware"]
    # at the curious server only the method that relies on the server's noise is of interest
    table = [
        p for p in table if p.threat_type in ("type_2", "type_1") or p.method == "fed_sdp_server"
    ]
    figure = [point(d, "type_2", "non_private") for d in datasets]
    figure += [point("lfw", "type_1", "non_private")] if "lfw" in datasets else []
    expensive = [p for p in table if p.tap == "update" and p.view.method == "non_private"]
    cheap = [p for p in table if p not in expensive]
    return {"fed_cdp/table_7": cheap + expensive, "fed_cdp/figure_1": figure}


def record_key(point: Point) -> dict[str, Any]:
    """Return a row's key: the published table's own keys, then the settings that really ran."""
    both = point.threat_type == "type_1" and point.method != "fed_sdp_server"
    threat = "type_0_1" if both else point.threat_type
    published = {
        "dataset": point.dataset,
        "threat_type": threat,
        "method": METHODS[point.method].published or point.method,
    }
    settings = {name: value for name, value in asdict(point).items() if name not in published}
    return published | {"arm": point.method, "tap": point.tap} | settings
