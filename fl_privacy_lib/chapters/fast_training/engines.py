"""Chapter 04: what private training costs, as the papers write it down and as the fast engine runs it.

Times belong to a machine; what is recorded and compared are ratios to the same machine's
non-private training, all engines interleaved in one run. The examples are random numbers: no time
here depends on what an image shows.
"""

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import mean, median, pstdev
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_privacy_lib.data import Partition, iid
from fl_privacy_lib.defenses import (
    Defense,
    fed_alpha_cdp,
    fed_cdp,
    fed_cdp_decay,
    fed_sdp,
    non_private,
)
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.models import Parameters, init_glorot, mlp, training_cnn
from fl_privacy_lib.sampling import Plan

CLIP_NORM, NOISE_SCALE = 4.0, 6.0


@dataclass(frozen=True)
class Workload:
    """A network, its batch size and the shape of its examples.

    Parameters
    ----------
    shape : of one example
    batch_size : B
    classes : number of logits
    """

    shape: tuple[int, ...]
    batch_size: int
    classes: int = 10

    def build(self) -> nn.Sequential:
        """Return the papers' CNN for images, their MLP for vectors."""
        if len(self.shape) == 3:
            return training_cnn(self.shape, self.classes)
        return mlp(self.shape[0], self.classes)

    def scene(self, participants: int, iterations: int, seed: int = 0) -> "Scene":
        """Return the model, data, partition and plan of one round in which every client takes part."""
        generator = torch.Generator().manual_seed(seed)
        model = init_glorot(self.build(), generator)
        size = iterations * self.batch_size
        x = torch.rand(participants * size, *self.shape, generator=generator)
        y = torch.randint(self.classes, (len(x),), generator=generator)
        plan = Plan(
            participants, participants, 1, iterations, self.batch_size, local_lr=0.01, seed=seed
        )
        return Scene(
            model, x, y, iid(len(x), participants, size, np.random.default_rng(seed)), plan
        )


FEDERATED = {
    "mnist": Workload((1, 28, 28), 5),
    "cifar10": Workload((3, 32, 32), 4),
    "lfw": Workload((3, 32, 32), 3, 62),
    "adult": Workload((105,), 3, 2),
    "cancer": Workload((30,), 4, 2),
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


@dataclass(frozen=True)
class Scene:
    """One round's work, the same for every engine."""

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    partition: Partition
    plan: Plan

    def batches(self) -> list[list[np.ndarray]]:
        """Return every client's batches as positions in x."""
        own = self.partition.indices
        return [
            [own[c][b] for b in self.plan.batches(c, len(own[c]), 0)]
            for c in range(self.plan.clients)
        ]


Engine = Callable[[Scene], Parameters]
Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]


def local_training(
    scene: Scene, step: Step, leave: Callable[[list[torch.Tensor]], None] = lambda _: None
) -> Parameters:
    """Run a round as people write it: a loop over clients and batches, and the mean of the updates.

    Parameters
    ----------
    step : changes the model by one batch
    leave : changes a client's update in place before it leaves
    """
    start = [p.detach().clone() for p in scene.model.parameters()]
    total = [torch.zeros_like(p) for p in start]
    for batches in scene.batches():
        with torch.no_grad():
            for p, w in zip(scene.model.parameters(), start, strict=True):
                p.copy_(w)
        for batch in batches:
            step(scene.model, scene.x[batch], scene.y[batch])
        update = [p.detach() - w for p, w in zip(scene.model.parameters(), start, strict=True)]
        leave(update)
        for t, u in zip(total, update, strict=True):
            t += u / scene.plan.participants
    with torch.no_grad():
        for p, w in zip(scene.model.parameters(), start, strict=True):
            p.copy_(w)
    return dict(zip(dict(scene.model.named_parameters()), total, strict=True))


@dataclass(frozen=True)
class Written:
    """A round as the papers write it down: one backward pass, one clip and one draw of noise for every example.

    Parameters
    ----------
    clip_norm : C in this round; None: plain training
    noise_scale : σ
    largest : whether the noise follows the batch's largest norm (ℓ2-max) instead of C
    on_batch : whether noise is drawn once, on the batch (dynamic parameters), instead of for every
        example
    at_update : whether only the update is clipped and noised (Fed-SDP)
    """

    clip_norm: float | None = CLIP_NORM
    noise_scale: float = NOISE_SCALE
    largest: bool = False
    on_batch: bool = False
    at_update: bool = False

    def __call__(self, scene: Scene) -> Parameters:
        """Return the round's mean update."""
        if self.clip_norm is None or self.at_update:
            optimiser = torch.optim.SGD(scene.model.parameters(), lr=scene.plan.local_lr)

            def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
                optimiser.zero_grad()
                cross_entropy(model(x), y).backward()
                optimiser.step()

            return local_training(scene, plain, self._leave if self.at_update else lambda _: None)

        def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
            total = self._summed(model, x, y)
            with torch.no_grad():
                for p, t in zip(model.parameters(), total, strict=True):
                    p.sub_(t, alpha=scene.plan.local_lr / len(x))

        return local_training(scene, step)

    def _summed(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        assert self.clip_norm is not None
        parameters = list(model.parameters())
        total, bound, kept = [torch.zeros_like(p) for p in parameters], self.clip_norm, []
        for i in range(len(x)):
            gradients = torch.autograd.grad(
                cross_entropy(model(x[i : i + 1]), y[i : i + 1]), parameters
            )
            norms = [float(g.norm()) for g in gradients]
            kept.append(max(norms))
            for t, g, norm in zip(total, gradients, norms, strict=True):
                t += g / max(1.0, norm / self.clip_norm)
        if self.largest:
            bound = min(self.clip_norm, max(kept))
        for _ in range(1 if self.on_batch else len(x)):
            for t in total:
                t += self.noise_scale * bound * torch.randn_like(t)
        return total

    def _leave(self, update: list[torch.Tensor]) -> None:
        assert self.clip_norm is not None
        for u in update:
            u /= max(1.0, float(u.norm()) / self.clip_norm)
            u += self.noise_scale * self.clip_norm * torch.randn_like(u)


def fast(defense: Defense, chunk: int | None = None, engine: str = "stacked") -> Engine:
    """Return the round through the stacked or the compiled engine."""

    def one_round(scene: Scene) -> Parameters:
        # read at the aggregate: the difference of weights would be lost in the weights' rounding
        tap = Tap("aggregate")
        run = simulate(
            scene.model,
            (scene.x, scene.y),
            scene.partition,
            scene.plan,
            defense,
            taps=[tap],
            engine=engine,
            clients_per_chunk=chunk,
        )
        return run.observations[tap].values

    return one_round


def noise_alone(scene: Scene) -> Parameters:
    """Draw the fast engine's noise and do nothing else."""
    row = torch.empty(sum(p.numel() for p in scene.model.parameters()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(scene.plan.participants * scene.plan.local_iterations):
        row.normal_(0, 1, generator=generator)
    return {}


def interleaved(
    engines: dict[str, Engine], scene: Scene, repetitions: int
) -> dict[str, list[float]]:
    """Return each engine's process times in ms per (client, local iteration), one a repetition.

    Every engine runs in every repetition, since times on a shared machine drift; a first one warms
    the caches up.
    """
    times: dict[str, list[float]] = {name: [] for name in engines}
    work = scene.plan.participants * scene.plan.local_iterations
    for repetition in range(repetitions + 1):
        for name, run in engines.items():
            started = time.process_time()
            run(scene)
            if repetition:
                times[name].append(1000 * (time.process_time() - started) / work)
    return times


def ratio(times: dict[str, list[float]], engine: str, base: str) -> tuple[float, float]:
    """Return the median and the standard deviation of an engine's times over another's, paired by repetition."""
    pairs = [a / b for a, b in zip(times[engine], times[base], strict=True)]
    return median(pairs), pstdev(pairs)


def distance(one: Parameters, other: Parameters) -> float:
    """Return ‖one − other‖ / ‖other‖ over all tensors."""
    square = sum(float((one[n].double() - other[n].double()).square().sum()) for n in other)
    return float((square / sum(float(o.double().square().sum()) for o in other.values())) ** 0.5)


def doubled(scene: Scene) -> Scene:
    """Return the same work in double precision."""
    return replace(scene, model=copy.deepcopy(scene.model).double(), x=scene.x.double())


@dataclass(frozen=True)
class Cost:
    """One cell of the tables of time: a data set's workload under one method."""

    table: str
    dataset: str
    method: str
    engine: str  # 'as_written', 'stacked' or 'compiled'
    batch_size: int
    participants: int
    local_iterations: int
    repetitions: int


BASE = {
    "fed_cdp/table_3": "fed_cdp",
    "fed_alpha_cdp/table_9": "fed_cdp",
    "dynamic_parameters/table_10": "dp_baseline",
}
"""Table → the method whose cost the paper compares its own with."""
PLAIN = "as_written:non_private"
SCHEDULED = 0.75 * CLIP_NORM  # a bound that has decayed: the value changes no time
WRITTEN: dict[str, dict[str, Written]] = {
    "fed_cdp/table_3": {
        "non_private": Written(None),
        "fed_sdp": Written(at_update=True),
        "fed_cdp": Written(),
        "fed_cdp_decay": Written(SCHEDULED),
    },
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
STACKED: dict[str, dict[str, Defense]] = {
    "fed_cdp/table_3": {"non_private": non_private(), "fed_sdp": fed_sdp(), "fed_cdp": fed_cdp()},
    "fed_alpha_cdp/table_9": {
        "non_private": non_private(),
        "fed_sdp": fed_sdp(),
        "fed_cdp": fed_cdp(),
    },
    "dynamic_parameters/table_10": {"non_private": non_private(), "dp_baseline": fed_cdp("batch")},
}


COMPILED: dict[str, dict[str, Defense]] = {
    "fed_cdp/table_3": STACKED["fed_cdp/table_3"] | {"fed_cdp_decay": fed_cdp_decay()},
    "fed_alpha_cdp/table_9": STACKED["fed_alpha_cdp/table_9"] | {
        "fed_alpha_cdp": fed_alpha_cdp(), "fed_alpha_cdp_sigma": fed_alpha_cdp(noise_scale=15.0),
    },
    "dynamic_parameters/table_10": STACKED["dynamic_parameters/table_10"] | {
        "dp_dyns_cdecay": fed_cdp_decay("batch"), "dp_dyns_l2max": fed_alpha_cdp("batch"),
    },
}  # fmt: skip
"""The compiled engine takes the rules that follow norms, too."""


def compiled_here() -> bool:
    """Return whether the compiled engine can run: numba is installed."""
    return find_spec("numba") is not None


def engines_of(table: str, kinds: Sequence[str]) -> dict[str, Engine]:
    """Return a table's engines, 'kind:method' → the round."""
    made: dict[str, dict[str, Engine]] = {
        "as_written": dict(WRITTEN[table]),
        "stacked": {name: fast(defense) for name, defense in STACKED[table].items()},
        "compiled": {
            name: fast(defense, engine="compiled") for name, defense in COMPILED[table].items()
        },
    }
    return {f"{kind}:{name}": run for kind in kinds for name, run in made[kind].items()}


def datasets_of(table: str) -> dict[str, Workload]:
    """Return the data sets of a table with their workloads."""
    return CENTRALISED if table == "dynamic_parameters/table_10" else FEDERATED


def measure(
    table: str, dataset: str, repetitions: int, kinds: Sequence[str]
) -> Iterable[tuple[Cost, dict[str, dict[str, Any]]]]:
    """Yield the cells of a table's data set with their times and ratios, all engines interleaved.

    Parameters
    ----------
    kinds : of engines; the plain loop as written runs beside them in any case, but is a cell only
        of its own kind
    """
    work = datasets_of(table)[dataset]
    participants, iterations = (1, 2) if datasets_of(table) is CENTRALISED else (5, 10)
    engines = {PLAIN: WRITTEN[table]["non_private"]} | engines_of(table, kinds)
    times = interleaved(engines, work.scene(participants, iterations), repetitions)
    for name, values in times.items():
        engine, _, method = name.partition(":")
        if engine not in kinds:
            continue
        metrics = {
            "milliseconds_per_iteration": (mean(values), pstdev(values)),
            "ratio_to_non_private": ratio(times, name, f"{engine}:non_private"),
            "ratio_to_plain_loop": ratio(times, name, PLAIN),
            f"ratio_to_{BASE[table]}": ratio(times, name, f"{engine}:{BASE[table]}"),
        }
        cost = Cost(
            table, dataset, method, engine, work.batch_size, participants, iterations, repetitions
        )
        yield cost, {m: {"mean": v, "std": s, "n": repetitions} for m, (v, s) in metrics.items()}
