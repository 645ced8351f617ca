"""The cost of private training: as the papers write it down, and with fast engines (chapter 04).

Times belong to a machine; what is recorded and compared are ratios to the same machine's
non-private training, all engines interleaved in one run. The examples are random numbers: no time
here depends on what an image shows.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median, pstdev

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_privacy_lib.data import Partition, iid
from fl_privacy_lib.defenses import Defense
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
        """Return the work of one round in which every client takes part.

        Parameters
        ----------
        participants : clients in all and in the round, K = K_t
        iterations : local iterations of each client, L
        seed : of weights, examples and partition
        """
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
        return [
            [positions[b] for b in self.plan.batches(client, len(positions), 0)]
            for client, positions in enumerate(self.partition.indices)
        ]


Engine = Callable[[Scene], Parameters]
Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]


def local_training(
    scene: Scene, step: Step, leave: Callable[[list[torch.Tensor]], None] = lambda _: None
) -> Parameters:
    """Run a round the plain way: loop over clients and batches, and average the updates.

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
    """A round as the papers write it down: backward pass, clipping and noise example by example.

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
        total, bound, largest = [torch.zeros_like(p) for p in parameters], self.clip_norm, 0.0
        for i in range(len(x)):
            gradients = torch.autograd.grad(
                cross_entropy(model(x[i : i + 1]), y[i : i + 1]), parameters
            )
            norms = [float(g.norm()) for g in gradients]
            largest = max(largest, *norms)
            for t, g, norm in zip(total, gradients, norms, strict=True):
                t += g / max(1.0, norm / self.clip_norm)
        if self.largest:
            bound = min(self.clip_norm, largest)
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
    """Return the round through the stacked or the compiled engine.

    Parameters
    ----------
    defense : under which the clients train
    chunk : clients that are stacked at a time; None: the engine's choice
    engine : 'stacked' or 'compiled'
    """

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

    Parameters
    ----------
    engines : name → the round
    scene : the work
    repetitions : that are counted
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
    """Return the median and standard deviation of one engine's times over another's, in pairs.

    Parameters
    ----------
    times : engine → its times, one a repetition
    engine, base : names of the numerator and the denominator
    """
    pairs = [a / b for a, b in zip(times[engine], times[base], strict=True)]
    return median(pairs), pstdev(pairs)


def distance(update: Parameters, reference: Parameters) -> float:
    """Return ‖update − reference‖ / ‖reference‖, ℓ2 over all tensors."""
    square = sum(
        float((update[n].double() - r.double()).square().sum()) for n, r in reference.items()
    )
    return float(
        (square / sum(float(r.double().square().sum()) for r in reference.values())) ** 0.5
    )


def doubled(scene: Scene) -> Scene:
    """Return the same work in double precision."""
    return replace(scene, model=copy.deepcopy(scene.model).double(), x=scene.x.double())
