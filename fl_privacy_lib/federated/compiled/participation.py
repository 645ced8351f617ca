"""Participations in the compiled engine: one client after another in the same memory."""

from collections.abc import Sequence

import numpy as np
import torch

from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.defenses.stage import ClientContext
from fl_privacy_lib.federated.compiled.form import Form, form_of
from fl_privacy_lib.federated.compiled.network import Cnn, Mlp, Network, kernel_of
from fl_privacy_lib.federated.participation import Examples
from fl_privacy_lib.models import Parameters
from fl_privacy_lib.sampling import Plan


def aligned(size: int) -> np.ndarray:
    """Return `size` bytes of zeros that begin at a multiple of 64, as a cache line does."""
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def vector(size: int) -> np.ndarray:
    """Return float32 zeros in aligned memory."""
    return aligned(4 * size).view(np.float32)


class Bench:
    """A kernel with its memory, and the global weights of a round.

    Parameters
    ----------
    network : the model in the kernel's form
    train : all examples, float32 [N, …] in one piece, and labels
    """

    def __init__(self, network: Network, train: Examples, weights: Parameters) -> None:
        from fl_privacy_lib.federated.compiled.steps import Memory

        self.network, self.train, self.kernel = network, train, kernel_of(network)
        size, count = network.begins[-1], len(network.names)
        self.start, self.weights, self.way = vector(size), vector(size), vector(size)
        self.sums, self.bounds, self.stds = vector(size), vector(count), vector(count)
        self.logits, self.hits = vector(self.kernel.SLICE * network.classes), np.zeros(1, np.int64)
        self.tensors = np.array(network.begins, np.int64)
        network.pack(weights, self.start)
        self.widths = np.array(network.widths if isinstance(network, Mlp) else (), np.int64)
        if isinstance(network, Cnn):
            size = 2 * int(network.windows**0.5) + 2
            self.shape: tuple[int, ...] = (network.shapes[0][1], network.side, size, network.classes)
            sizes = self.kernel.sizes(self.shape[0], size)
        else:
            self.shape = (len(self.widths) - 1, self.widths.ctypes.data)
            sizes = self.kernel.sizes(tuple(self.widths.tolist()))
        self.spaces = [aligned(n) for n in sizes]
        self.work = type(sizes)(*(space.ctypes.data for space in self.spaces))
        x, y = train[0].data_ptr(), train[1].data_ptr()
        places = {name: getattr(self, name).ctypes.data for name in Memory._fields if hasattr(self, name)}
        self.memory = Memory(**{name: places.get(name, 0) for name in Memory._fields} | {"x": x, "y": y})

    def read(self, batches: Sequence[np.ndarray]) -> None:
        """Point the memory at a client's batches and at room for their norms."""
        self.positions = np.ascontiguousarray(np.concatenate(batches), np.int64)
        self.ends = np.cumsum([0, *map(len, batches)])
        if len(self.positions) and not 0 <= self.positions.min() <= self.positions.max() < len(self.train[1]):
            raise IndexError(f"a batch holds a position outside 0 … {len(self.train[1]) - 1}")
        room = max(map(len, batches)) * len(self.network.names)
        self.norms, self.factors = vector(room), vector(room)
        names = ("positions", "ends", "norms", "factors")
        self.memory = self.memory._replace(**{name: getattr(self, name).ctypes.data for name in names})

    def run(
        self, iterations: int, phases: int, scope: int, rate: float = 0.0, batch_size: int = 1, first: int = 0
    ) -> None:
        """Run phases of some iterations, from the first on."""
        memory = self.memory._replace(ends=self.memory.ends + 8 * first)
        self.kernel.run(self.shape, memory, self.work, iterations, phases, scope, float(rate), batch_size)

    def seed(self, state: np.ndarray) -> None:
        """Point the memory at the state of a client's generator."""
        self.state = state  # held, since the kernel knows its address only
        self.memory = self.memory._replace(state=state.ctypes.data)


class CompiledEngine:
    """Local iterations in a kernel, one client after another in the same memory.

    Parameters
    ----------
    network : the model in the kernel's form
    weights : the global model of a round
    examples : all examples, float32 [N, …] in one piece, and labels [N]
    """

    def __init__(
        self, network: Network, weights: Parameters, examples: Examples, plan: Plan, defense: Defense
    ) -> None:
        self.bench, self.network = Bench(network, examples, weights), network
        self.plan, self.defense = plan, defense

    def train(self, batches: Sequence[Sequence[np.ndarray]], contexts: Sequence[ClientContext]) -> list[Gradient]:
        """Return each client's update; see `participation.Engine`."""
        return [self._client(own, ctx) for own, ctx in zip(batches, contexts, strict=True)]

    def _client(self, batches: Sequence[np.ndarray], ctx: ClientContext) -> Gradient:
        """Run one client's local iterations on the kernel's memory."""
        from fl_privacy_lib.federated.compiled import noise, steps

        plan, bench = self.plan, self.bench
        form = form_of(self.defense, plan.batch_size, ctx.round)
        bench.read(batches)
        bench.seed(noise.seeded(plan.seed, ctx.round, ctx.clients[0]))
        bench.weights[:], bench.way[:], bench.bounds[:], bench.stds[:] = bench.start, 0, form.bound, form.std
        if form.asks:
            for i in range(len(batches)):
                self._iterate(i, batches[i], form, ctx)
        else:
            scope = {None: steps.NONE, "layer": steps.LAYER, "all": steps.ALL}[form.scope]
            bench.run(len(batches), steps.TRAIN, scope, plan.local_lr, plan.batch_size)
            self._tell(len(batches) - 1, batches[-1], ctx, form.scope is not None)
        return self.network.unpack(bench.way)

    def _iterate(self, i: int, batch: np.ndarray, form: Form, ctx: ClientContext) -> None:
        """Run one local iteration in which a rule reads the norms before the gradients are summed."""
        from fl_privacy_lib.federated.compiled import steps

        plan, bench = self.plan, self.bench
        bench.run(1, steps.BEGIN | steps.MEASURE, steps.LAYER, first=i)
        norms = self._tell(i, batch, ctx)
        factors, stds = form.answer(norms, ctx)
        bench.factors[: len(batch) * len(norms)] = torch.stack(list(factors.values()), -1).flatten()
        bench.stds[:] = torch.cat(list(stds.values()))
        again = steps.MEASURE if len(batch) > bench.kernel.SLICE else 0  # only the last slice is still there
        bench.run(1, again | steps.ADD | steps.STEP, steps.LAYER, plan.local_lr, plan.batch_size, first=i)

    def _tell(self, i: int, batch: np.ndarray, ctx: ClientContext, measured: bool = True) -> Gradient:
        """Tell the context the iteration, its examples and their norms; return the norms [1, B] by name."""
        index, count = torch.from_numpy(batch), len(self.network.names)
        table = torch.from_numpy(self.bench.norms[: len(batch) * count].reshape(-1, count).copy())
        norms = {name: table[None, :, t] for t, name in enumerate(self.network.names)}
        x, y = self.bench.train
        ctx.iteration, ctx.examples = i, (x[index][None], y[index][None])
        ctx.norms = norms if measured and len(batch) else None
        return norms


def hits(network: Network, weights: Parameters, examples: Examples) -> int:
    """Return how many examples the network puts into their class."""
    from fl_privacy_lib.federated.compiled import steps

    bench = Bench(network, examples, weights)
    bench.read([np.arange(len(examples[1]))])
    bench.weights[:] = bench.start
    bench.run(1, steps.BEGIN | steps.CLASSIFY, steps.NONE)
    return int(bench.hits[0])

