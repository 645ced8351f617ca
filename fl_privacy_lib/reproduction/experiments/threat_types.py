"""Threat types: what an adversary at each tap reconstructs under each defence (chapter 01).

A point is one cell: data set, threat type, method, attacker. `grid` lists the cells of the live table,
`recorded_grid` those of Fed-CDP's Table VII and the data sets of its Fig. 1.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_privacy_lib import metrics
from fl_privacy_lib.attacks import Attack, reconstruct
from fl_privacy_lib.data import Dataset, Partition, iid, some_classes, two_shards
from fl_privacy_lib.defenses import THREAT_TYPES, Defense, dssgd, fed_cdp, fed_cdp_decay, fed_sdp, non_private
from fl_privacy_lib.federated import Observation, Tap, simulate
from fl_privacy_lib.models import build
from fl_privacy_lib.reproduction.experiments.scoring import first_successes, in_order, trivial_guesses
from fl_privacy_lib.reproduction.parameters import ThreatTypes
from fl_privacy_lib.sampling import Plan

METHODS: dict[str, Callable[..., Defense]] = {
    "non_private": lambda **settings: non_private(),
    "fed_sdp_client": lambda **settings: fed_sdp("client", **settings),
    "fed_sdp_server": lambda **settings: fed_sdp("server", **settings),
    "fed_cdp_example": lambda **settings: fed_cdp("example", **settings),
    "fed_cdp_batch": lambda **settings: fed_cdp("batch", **settings),
    "fed_cdp_decay_example": lambda **settings: fed_cdp_decay("example", **settings),
    "fed_cdp_decay_batch": lambda **settings: fed_cdp_decay("batch", **settings),
    "dssgd": lambda **settings: dssgd(0.5),  # the share is not printed
}
LIVE = ("non_private", "fed_sdp_client", "fed_sdp_server", "fed_cdp_example", "fed_cdp_batch")
"""The methods of the live table; the others are recorded beside them."""
THREATS = THREAT_TYPES | {"type_0_curious": "update"}
"""Threat type → tap. Type 0 reads after the server's own noise, as the papers assume; a curious server before it."""

PARTITIONS: dict[str, Callable[[Dataset, int, np.random.Generator], Partition]] = {
    "mnist": lambda d, k, rng: two_shards(d.train_y, k, 500, rng),
    "cifar10": lambda d, k, rng: two_shards(d.train_y, k, 400, rng),
    "lfw": lambda d, k, rng: some_classes(d.train_y, k, 300, 15, rng),
}
"""The papers' split of each image data set; any other is split at random, 50 examples a client."""


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
        """The defence under which the point is measured."""
        return METHODS[self.method](clip_norm=self.clip_norm, noise_scale=self.noise_scale)

    @property
    def view(self) -> "Point":
        """The point whose observation is the same, bit for bit, so that it need be attacked only once.

        A stage changes nothing at a tap that stands before it, and without clipping there is nothing to be aware
        of. The notebook and a test check the equality on the observed tensors.
        """
        late = ("fed_sdp_client", "fed_sdp_server", "dssgd")
        untouched = {"example": late, "update": ("fed_sdp_server",), "received": ()}
        point = self
        if self.method in untouched[self.tap]:
            point = replace(point, method="non_private")
        if self.tap == "update" or (self.tap == "received" and self.method != "fed_sdp_server"):
            point = replace(point, threat_type="type_1")
        if point.method in ("non_private", "dssgd"):
            point = replace(point, attacker="naive", clip_norm=4.0, noise_scale=6.0)
        return point


@dataclass(frozen=True)
class Scene:
    """What the adversary of one seed meets: observations, and the images behind them for the scoring."""

    model: nn.Module
    observations: list[Observation]
    truth: np.ndarray  # [V, B, C, H, W]
    labels: np.ndarray  # [V, B]


def clients_of(data: Dataset) -> int:
    """Return the number of clients K that a data set is split among: the papers' 1,000, fewer for small data."""
    return 1000 if data.name in PARTITIONS else 100


def scene(point: Point, data: Dataset, seed: int, device: torch.device) -> Scene:
    """Simulate the first round of federated training and keep what stands at the point's tap.

    Every participant is a victim. At the tap ``example`` the victim is the first example of the first batch.
    """
    rng = np.random.default_rng([seed, 1])
    split = PARTITIONS.get(data.name, lambda d, k, rng: iid(len(d.train_y), k, min(50, len(d.train_y)), rng))
    partition = split(data, point.clients, rng)
    generator = torch.Generator().manual_seed(seed)
    model = build("attacked_lenet", data.example_shape, data.n_classes, generator).to(device)
    plan = Plan(
        point.clients, point.victims, 1, point.local_iterations, point.batch_size, local_lr=point.local_lr, seed=seed
    )
    victims = [int(c) for c in plan.participants_of(0)]
    used = np.unique(np.concatenate([partition.indices[v] for v in victims]))  # only the victims' data is moved
    other = np.zeros(1, dtype=np.int64)  # stands in for the data of a client that takes no part
    own = [np.searchsorted(used, partition.indices[c]) if c in victims else other for c in range(point.clients)]
    small = Partition("victims", tuple(own), len(used))
    train = (torch.as_tensor(data.train_x[used]).to(device), torch.as_tensor(data.train_y[used]).to(device))
    taps = [Tap(point.tap, client) for client in victims]
    run = simulate(model, train, small, plan, point.defense, taps=taps)
    truth = [run.truth[t] for t in taps]
    keep = 1 if point.tap == "example" else point.batch_size * point.local_iterations
    images = np.stack([x[:keep].cpu().numpy() for x, _ in truth])
    labels = np.stack([y[:keep].cpu().numpy() for _, y in truth])
    return Scene(model, [run.observations[t] for t in taps], images, labels)


def attack_of(point: Point, seed: int) -> Attack:
    """Return the attack's settings at this point."""
    return Attack(
        start=point.start,
        optimiser=point.optimiser,
        learning_rate=1.0 if point.optimiser == "lbfgs" else 0.1,
        max_iterations=point.max_iterations,
        clip_aware=point.attacker == "clip_aware",
        seed=seed,
    )


def measure(
    point: Point,
    data: Dataset,
    device: torch.device,
    snapshots: tuple[int, ...] = (),
    scene: Callable[..., Scene] = scene,
    attack_of: Callable[..., Attack] = attack_of,
) -> dict[str, np.ndarray]:
    """Attack all victims of all seeds of a point and score them.

    `scene` and `attack_of` may be another chapter's, if they understand the point.

    Returns
    -------
    per image, [seeds·V, B]: mse, ssim, success, iterations (to success), label_right;
    per victim, [seeds·V]: attack_iterations (until the attack stopped), status;
    images, truth [V, B, C, H, W] of the first seed, and snapshots [S, V, B, C, H, W] where asked for;
    grey_mse, mean_mse, grey_success, mean_success: the two trivial guesses on the same victims
    """
    parts: dict[str, list[np.ndarray]] = {}
    first: dict[str, np.ndarray] = {}
    for seed in range(point.seed, point.seed + point.seeds):
        view = scene(point, data, seed, device)
        reached, score = first_successes(view.truth, point.max_iterations)
        result = reconstruct(
            view.model,
            view.observations,
            data.example_shape,
            attack_of(point, seed),
            batch_size=view.truth.shape[1],
            snapshots=snapshots if seed == point.seed else (),
            on_iteration=score,
        )
        matched = in_order(result.images, view.truth)
        scores = {
            "mse": metrics.mse(matched, view.truth),
            "ssim": metrics.ssim(matched, view.truth),
            "success": metrics.success(matched, view.truth),
            "iterations": reached,
            "label_right": result.labels.cpu().numpy() == np.sort(view.labels, axis=1),
            "attack_iterations": result.iterations.cpu().numpy(),
            "status": np.array(result.status),
        } | trivial_guesses(view.truth, view.labels, data)
        for name, values in scores.items():
            parts.setdefault(name, []).append(values)
        if seed == point.seed:
            first = {"images": matched, "truth": view.truth}
            if snapshots:
                first["snapshots"] = np.stack([in_order(result.snapshots[s], view.truth) for s in snapshots])
    return {name: np.concatenate(values) for name, values in parts.items()} | first


SHARED = (
    "local_lr", "clip_norm", "noise_scale", "start", "optimiser", "max_iterations", "batch_size", "seed", "seeds",
)  # fmt: skip


def grid(settings: ThreatTypes, dataset: str, clients: int) -> list[Point]:
    """Return the cells of the live table: threat type × method × attacker, on one data set.

    Types 0 and 1 read the same values under every method but one, noise at the server, so they share their cells as
    in the papers' tables. Type 2 attacks `victims` clients, the others `batch_victims` with a whole batch each. The
    clip-aware attacker stands only where something is clipped.
    """
    shared = {name: getattr(settings, name) for name in SHARED} | {"clients": clients}
    threats = {"type_2": list(LIVE), "type_1": list(LIVE), "type_0": ["fed_sdp_server"]}
    points = []
    for threat, methods in threats.items():
        victims = min(settings.victims if threat == "type_2" else settings.batch_victims, clients)
        for method in methods:
            naive = Point(dataset, threat, method, "naive", victims=victims, **shared)
            aware = replace(naive, attacker="clip_aware")
            points += [naive, aware] if aware.view.attacker == "clip_aware" else [naive]
    return points


def threat_name(point: Point) -> str:
    """Return which adversaries a point speaks for, in the reader's words."""
    if point.threat_type == "type_1":
        server = point.method == "fed_sdp_server"
        return "type 1 (0 before noise)" if server else "types 0, 1"
    return "type 2" if point.threat_type == "type_2" else "type 0 (after noise)"


def settings_of(point: Point) -> dict[str, Any]:
    """Return every setting of a point by name: the key of a record, or of a finished point."""
    return asdict(point)


PUBLISHED_BATCH = {"mnist": 5, "lfw": 3, "cifar10": 4, "digits": 5}
TABLE_7 = ("type_2", "type_1", "type_0", "type_0_curious")


def recorded_grid(settings: ThreatTypes, datasets: tuple[str, ...]) -> dict[str, list[Point]]:
    """Return the points of each recorded table: Fed-CDP's Table VII and Fig. 1, the cheap ones first."""
    values = {name: getattr(settings, name) for name in SHARED if name != "batch_size"}

    def point(dataset: str, threat: str, method: str, attacker: str = "naive") -> Point:
        victims = settings.victims if threat == "type_2" else settings.batch_victims
        size = PUBLISHED_BATCH[dataset]
        own = values | {"clip_norm": 6.0} if method.startswith("fed_cdp_decay") else values  # the first of 6 → 2
        return Point(dataset, threat, method, attacker, victims=victims, batch_size=size, **own)

    cells = [(d, t, m, a) for t in TABLE_7 for d in datasets for m in METHODS for a in ("naive", "clip_aware")
             if m != "dssgd" or d == "lfw"]  # fmt: skip
    table = [point(*cell) for cell in cells if cell[0] != "cifar10"]
    table = [p for p in table if p.attacker == "naive" or p.view.attacker == "clip_aware"]
    # at the curious server only the method that relies on the server's noise is of interest
    table = [p for p in table if p.threat_type in ("type_2", "type_1") or p.method == "fed_sdp_server"]
    figure = [point(d, "type_2", "non_private") for d in datasets]
    figure += [point("lfw", "type_1", "non_private")] if "lfw" in datasets else []
    expensive = [p for p in table if p.tap == "update" and p.view.method == "non_private"]
    cheap = [p for p in table if p not in expensive]
    return {"fed_cdp/table_7": cheap + expensive, "fed_cdp/figure_1": figure}


def record_key(point: Point) -> dict[str, Any]:
    """Return a recorded row's key: the published table's own keys, then the settings that really ran."""
    both = point.threat_type == "type_1" and point.method != "fed_sdp_server"
    threat = "type_0_1" if both else point.threat_type
    published = {"dataset": point.dataset, "threat_type": threat, "method": PUBLISHED_METHOD[point.method]}
    own = {name: value for name, value in asdict(point).items() if name not in published}
    return published | {"arm": point.method, "tap": point.tap} | own


PUBLISHED_METHOD = {
    "non_private": "non_private",
    "fed_sdp_client": "fed_sdp",
    "fed_sdp_server": "fed_sdp_server",  # Table VII's Fed-SDP has its noise at the client
    "fed_cdp_example": "fed_cdp",
    "fed_cdp_batch": "fed_cdp",
    "fed_cdp_decay_example": "fed_cdp_decay",
    "fed_cdp_decay_batch": "fed_cdp_decay",
    "dssgd": "dssgd",
}
