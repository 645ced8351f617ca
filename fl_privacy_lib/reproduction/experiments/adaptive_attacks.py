"""Adaptive attacks: published and adaptive attackers against transformations, noise and clipping (chapters 01, 02).

A cell is one data set, defence, level, attack and arm. `LearnedCell` is a cell of the learned attacker, `ThreatCell`
one of the rest of Fed-αCDP's Table 3. `recorded_grid` lists the cells of every recorded table.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fl_privacy_lib import metrics
from fl_privacy_lib.attacks import PUBLISHED, Attack
from fl_privacy_lib.attacks.evidence import stacked
from fl_privacy_lib.attacks.labels import infer_labels
from fl_privacy_lib.attacks.learned import LearnedAttack, LearnedInverter, train
from fl_privacy_lib.data import Dataset, Partition, iid
from fl_privacy_lib.defenses import (
    Defense,
    adaclip,
    dssgd,
    fed_alpha_cdp,
    fed_cdp,
    non_private,
    pruned,
    quantile_clipped,
    random_noise,
)
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.models import build
from fl_privacy_lib.reproduction.experiments import threat_types
from fl_privacy_lib.reproduction.experiments.scoring import trivial_guesses
from fl_privacy_lib.reproduction.experiments.threat_types import PARTITIONS, PUBLISHED_BATCH, Scene
from fl_privacy_lib.reproduction.parameters import AdaptiveAttacks
from fl_privacy_lib.sampling import Plan

METHODS: dict[str, Callable[["Cell"], Defense]] = {
    "non_private": lambda c: non_private(),
    "clipped": lambda c: fed_cdp(clip_norm=c.clip_norm, noise_scale=0.0),
    "gaussian": lambda c: random_noise(c.level, "gaussian", at="per_example"),
    "laplace": lambda c: random_noise(c.level, "laplace", at="per_example"),
    "clipped_gaussian": lambda c: fed_cdp(clip_norm=c.clip_norm, noise_scale=c.level / c.clip_norm),
    "pruned": lambda c: pruned(c.level, at="per_example"),
    "dssgd": lambda c: dssgd(c.level, at="per_example"),
    "fed_cdp": lambda c: fed_cdp(clip_norm=c.clip_norm, noise_scale=c.noise_scale),
    "fed_alpha_cdp_example": lambda c: fed_alpha_cdp("example", clip_norm=c.clip_norm, noise_scale=c.noise_scale),
    "fed_alpha_cdp_batch": lambda c: fed_alpha_cdp("batch", clip_norm=c.clip_norm, noise_scale=c.noise_scale),
    "quantile_clip": lambda c: quantile_clipped(clip_norm=c.clip_norm, noise_scale=c.noise_scale),
    "adaclip": lambda c: adaclip(clip_norm=c.clip_norm, noise_scale=c.noise_scale),
}
"""Defences whose strength is one number, `level`: a standard deviation per coordinate, or a fraction pruned."""

ARMS: dict[str, dict[str, Any]] = {
    "naive": {},
    "clip_aware": {"clip_aware": True},
    "layer_cosine": {"objective": "layer_cosine"},
    "mask_aware": {"mask": "zeros"},
    "prior": {"tv": 1e-4, "objective": "relative"},
    "several": {},
    "batch_prior": {"tv": 3e-4, "objective": "relative"},  # best of five on six batches of LFW at another seed
    "patient": {"stall": (300, 0.0)},  # never given up
}
"""What the attacker adds to the published attack. The arm `learned` has no such line: it does not search."""


@dataclass(frozen=True)
class Cell:
    """One cell, with every setting that its numbers depend on.

    Parameters
    ----------
    level : what `method` is as strong as; 0 where it has no such number
    attack : one of the published attacks
    network, at_round : which model is attacked, and after how many rounds of training
    observations : R, rounds in which the same example is seen
    """

    dataset: str
    method: str
    level: float = 0.0
    arm: str = "naive"
    attack: str = "cpl"
    network: str = "attacked_lenet"
    at_round: int = 0
    observations: int = 1
    victims: int = 20
    seeds: int = 5
    seed: int = 0
    max_iterations: int = 300
    clip_norm: float = 4.0
    noise_scale: float = 6.0
    clients: int = 1000

    @property
    def defense(self) -> Defense:
        """The defence under which the cell is measured."""
        return METHODS[self.method](self)


@dataclass(frozen=True)
class LearnedCell(Cell):
    """A cell of the learned attacker; its fields are those of `LearnedAttack`."""

    arm: str = "learned"
    attack: str = "learned"
    public_images: int = 4000
    projection: int = 512
    views: int = 8
    hidden: int = 1000
    epochs: int = 20

    def attacker(self, seed: int) -> LearnedAttack:
        """Return the attacker's settings."""
        names = ("public_images", "projection", "views", "hidden", "epochs")
        return LearnedAttack(seed=seed, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class ThreatCell(Cell):
    """A cell that may read updates, attacked as the cells of chapter 01.

    Parameters
    ----------
    tap, batch_size : where the adversary reads, and B
    threat_type : the paper's name for it. The defences here do nothing behind the update, so types 0 and 1 read the
        same values; such cells are equal, and attacked once.
    """

    tap: str = "example"
    batch_size: int = 1
    local_iterations: int = 1
    local_lr: float = 0.05
    threat_type: str = field(default="type_2", compare=False)


def _clients_data(cell: Cell, data: Dataset, seed: int) -> list[np.ndarray]:
    """Return the positions of every attacked client's training examples."""
    rng = np.random.default_rng([seed, 1])
    split = PARTITIONS.get(data.name, lambda d, k, r: iid(len(d.train_y), k, min(50, len(d.train_y)), r))
    partition = split(data, cell.clients, rng)
    chosen = Plan(cell.clients, cell.victims, 1, 1, 1, local_lr=0.05, seed=seed).participants_of(0)
    return [partition.indices[int(c)] for c in chosen]


def scene(cell: Cell, data: Dataset, seed: int, device: torch.device) -> Scene:
    """Train for `at_round` rounds without a defence, then keep what stands at each victim's tap `example`.

    The victim is the first example of the first batch, the same in all R observed rounds.
    """
    own = _clients_data(cell, data, seed)
    model = build(cell.network, data.example_shape, data.n_classes, torch.Generator().manual_seed(seed)).to(device)
    used = np.unique(np.concatenate(own))
    few = Partition("victims", tuple(np.searchsorted(used, indices) for indices in own), len(used))
    train = (torch.as_tensor(data.train_x[used]).to(device), torch.as_tensor(data.train_y[used]).to(device))
    if cell.at_round:
        plan = Plan(cell.victims, cell.victims, cell.at_round, 20, 5, local_lr=0.05, seed=seed)
        trained = simulate(model, train, few, plan, non_private(), engine="auto").weights
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(trained[name])
    plan = Plan(cell.victims, cell.victims, cell.observations, 1, 1, local_lr=0.05, seed=seed)
    taps = [[Tap("example", client, r) for r in range(cell.observations)] for client in range(cell.victims)]
    run = simulate(model, train, few, plan, cell.defense, taps=[tap for row in taps for tap in row])
    truth = [run.truth[row[0]] for row in taps]
    images = np.stack([x[:1].cpu().numpy() for x, _ in truth])
    labels = np.stack([y[:1].cpu().numpy() for _, y in truth])
    seen: list[Any] = [[run.observations[tap] for tap in row] for row in taps]
    return Scene(model, [row[0] for row in seen] if cell.observations == 1 else seen, images, labels)


def attack_of(cell: Cell, seed: int) -> Attack:
    """Return the attack's settings at this cell."""
    published = PUBLISHED[cell.attack]()
    # the published budget of GradInv is its own; a smaller limit shortens it in proportion
    limit = min(cell.max_iterations, published.max_iterations)
    return replace(published, seed=seed, max_iterations=limit, **ARMS[cell.arm])


def measure(
    cell: Cell, data: Dataset, device: torch.device, snapshots: tuple[int, ...] = ()
) -> dict[str, np.ndarray]:
    """Attack all victims of all seeds of a cell and score them; see `threat_types.measure`."""
    if isinstance(cell, LearnedCell):
        return _measure_learned(cell, data, device)
    where = threat_types.scene if isinstance(cell, ThreatCell) else scene
    return threat_types.measure(cell, data, device, snapshots, where, attack_of)  # type: ignore[arg-type]


def public_images(cell: LearnedCell, data: Dataset, seed: int) -> np.ndarray:
    """Return positions of training images that no attacked client holds, in a random order."""
    held = np.concatenate(_clients_data(cell, data, seed))
    rest = np.setdiff1d(np.arange(len(data.train_y)), held)
    return np.random.default_rng([seed, 2]).permutation(rest)[: cell.public_images]


def taught(cell: LearnedCell, view: Scene, data: Dataset, seed: int) -> LearnedInverter:
    """Return the attacker, trained on public images at the weights that a scene was observed at."""
    public, observation = public_images(cell, data, seed), view.observations[0]
    device = next(view.model.parameters()).device
    images, labels = (torch.as_tensor(part[public]).to(device) for part in (data.train_x, data.train_y))
    return train(view.model, observation.weights, cell.defense, images, labels, cell.attacker(seed))


def _measure_learned(cell: LearnedCell, data: Dataset, device: torch.device) -> dict[str, np.ndarray]:
    """Train the attacker for every seed's weights and score its readings, in the columns of `threat_types.measure`.

    It takes no iterations and needs no label; the label is that which the others infer. As there, an image that does
    not succeed counts as `max_iterations`.
    """
    parts: dict[str, list[np.ndarray]] = {}
    first: dict[str, np.ndarray] = {}
    for seed in range(cell.seed, cell.seed + cell.seeds):
        view = scene(cell, data, seed, device)
        images = taught(cell, view, data, seed)(view.observations).cpu().numpy()  # [V, 1, C, H, W]
        success = metrics.success(images, view.truth)
        scores = {
            "mse": metrics.mse(images, view.truth),
            "ssim": metrics.ssim(images, view.truth),
            "success": success,
            "iterations": np.where(success, 0, cell.max_iterations),
            "label_right": infer_labels(stacked(view.observations), 1).cpu().numpy() == view.labels,
            "attack_iterations": np.zeros(cell.victims, dtype=int),
            "status": np.full(cell.victims, "read"),
        } | trivial_guesses(view.truth, view.labels, data)
        for name, values in scores.items():
            parts.setdefault(name, []).append(values)
        first = first or {"images": images, "truth": view.truth}
    return {name: np.concatenate(values) for name, values in parts.items()} | first


DATASETS = ("mnist", "cifar10", "lfw")
NOISE = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0, 10.0)
PRUNED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def recorded_grid(settings: AdaptiveAttacks, datasets: tuple[str, ...]) -> dict[str, list[Cell]]:
    """Return the cells of every recorded table, the ones that most depends on first."""
    shared: dict[str, Any] = {"victims": settings.victims, "seeds": settings.seeds, "seed": settings.seed,
              "max_iterations": settings.max_iterations}  # fmt: skip
    first = datasets[0]

    def cells(method: str, **changes: Any) -> list[Cell]:
        return [Cell(first, method, **(shared | changes))]

    clipping = [c for arm in ("naive", "clip_aware", "layer_cosine") for c in cells("clipped", arm=arm)]
    clipping += [c for bound in (0.5, 1.0, 2.0) for arm in ("naive", "clip_aware", "layer_cosine")
                 for c in cells("clipped", arm=arm, clip_norm=bound)]  # fmt: skip
    pruning = [c for p in PRUNED for arm in ("naive", "mask_aware") for c in cells("pruned", level=p, arm=arm)]
    noise = [c for std in NOISE for arm in ("naive", "prior") for c in cells("gaussian", level=std, arm=arm)]
    noise += [c for std in NOISE for c in cells("clipped_gaussian", level=std, arm="clip_aware")]
    several = [c for std in (3e-3, 1e-2, 3e-2) for r in (1, 4, 16)
               for c in cells("gaussian", level=std, arm="several", observations=r)]  # fmt: skip
    attacks = [Cell(d, "non_private", attack=a, **shared) for a in ("cpl", "dlg", "grad_inversion") for d in datasets]
    training = [c for network in ("attacked_lenet", "training_cnn") for r in (0, 1, 10, 50)
                for c in cells("non_private", network=network, at_round=r)]  # fmt: skip
    return {
        "fed_alpha_cdp/table_1": attacks,
        "attacks/clipping": clipping,
        "fed_cdp/figure_5": pruning,
        "attacks/noise": noise,
        "fed_alpha_cdp/section_4": _section_4(datasets, shared),
        "fed_alpha_cdp/table_3": _alpha(datasets, shared),
        "attacks/learned": _learned(first, shared),
        "fed_alpha_cdp/table_3_rest": _table_3_rest(datasets, shared),
        "attacks/control": cells("clipped", arm="patient") + cells("gaussian", level=3e-2, arm="patient"),
        "attacks/batches": _batches(datasets, shared),
        "attacks/training_round": training,
        "attacks/several_observations": several,
    }


def _section_4(datasets: tuple[str, ...], shared: dict[str, Any]) -> list[Cell]:
    """Return the thresholds and noise levels that Fed-αCDP's section 4 and Fig. 3 quote."""
    thresholds = {"cifar10": (0.5, 0.6), "lfw": (0.1, 0.8, 0.9)}
    cells = [Cell(d, "pruned", p, arm, **shared) for d, levels in thresholds.items() if d in datasets
             for p in levels for arm in ("naive", "mask_aware")]  # fmt: skip
    if "lfw" in datasets:
        cells += [Cell("lfw", "gaussian", std, arm, **shared) for std in (1e-3, 1e-2, 0.0316228, 0.1)
                  for arm in ("naive", "prior")]  # fmt: skip
        cells += [Cell("lfw", "dssgd", 0.5, arm, **shared) for arm in ("naive", "mask_aware")]
        cells += [Cell("lfw", "fed_cdp", arm=arm, clip_norm=c, noise_scale=s, **shared)
                  for c, s in ((1.0, 2.0), (4.0, 6.0)) for arm in ("naive", "clip_aware")]  # fmt: skip
    return cells


def _alpha(datasets: tuple[str, ...], shared: dict[str, Any]) -> list[Cell]:
    """Return Fed-αCDP[σ] in both printed readings at the first round, where σ = 15."""
    return [Cell(d, f"fed_alpha_cdp_{reading}", arm=arm, noise_scale=15.0, **shared) for d in datasets if d != "cifar10"
            for reading in ("example", "batch") for arm in ("naive", "clip_aware")]  # fmt: skip


def _learned(dataset: str, shared: dict[str, Any]) -> list[Cell]:
    """Return the learned attacker at the noise levels of the others, and under clipping without and with noise."""
    levels = [("gaussian", std) for std in NOISE] + [("clipped", 0.0), ("clipped_gaussian", 1e-2),
              ("clipped_gaussian", 1e-1)]  # fmt: skip
    return [LearnedCell(dataset, method, level, **shared) for method, level in levels]


def _table_3_rest(datasets: tuple[str, ...], shared: dict[str, Any]) -> list[Cell]:
    """Return Table 3's quantile clipping and AdaClip for all types, and Fed-αCDP[σ] for types 0 and 1.

    Rows without a defence and of Fed-SDP are those of Fed-CDP's Table VII, in chapter 01.
    """
    adaptive = dict.fromkeys(("quantile_clip", "adaclip"), 6.0)
    alpha = {f"fed_alpha_cdp_{reading}": 15.0 for reading in ("example", "batch")}
    types = {"type_2": ("example", adaptive), "type_1": ("update", adaptive | alpha),
             "type_0": ("update", adaptive | alpha)}  # fmt: skip
    return [
        ThreatCell(d, method, arm=arm, noise_scale=scale, tap=tap, threat_type=threat, batch_size=PUBLISHED_BATCH[d],
                   **shared)
        for d in datasets if d != "cifar10" for threat, (tap, methods) in types.items()
        for method, scale in methods.items() for arm in ("naive", "clip_aware")
    ]  # fmt: skip


def _batches(datasets: tuple[str, ...], shared: dict[str, Any]) -> list[Cell]:
    """Return undefended updates of several images: batches of the papers' sizes, and several local iterations."""
    update: dict[str, Any] = {"arm": "batch_prior", "tap": "update", "threat_type": "type_1", **shared}
    batches = [ThreatCell(d, "non_private", batch_size=PUBLISHED_BATCH[d], **update) for d in datasets
               if d in ("lfw", "mnist")]  # fmt: skip
    return [*batches, *(ThreatCell(datasets[0], "non_private", local_iterations=n, **update) for n in (1, 3, 5))]


def record_key(cell: Cell) -> dict[str, Any]:
    """Return a recorded row's key: the published table's own keys, then the settings that really ran."""
    method = "fed_alpha_cdp_sigma" if cell.method.startswith("fed_alpha_cdp") else cell.method
    published = {"dataset": cell.dataset, "method": method, "attack": PRINTED.get(cell.attack, cell.attack),
                 "threat_type": getattr(cell, "threat_type", "type_2"), "defense": cell.method}  # fmt: skip
    return published | {name: value for name, value in asdict(cell).items() if name not in published}


PRINTED = {"grad_inversion": "gradinv"}
"""Attack → its name in the published tables."""
