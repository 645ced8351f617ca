"""Participations in the compiled engine: one client after another in the same memory."""

from collections.abc import Sequence

import numpy as np
import torch

from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.defenses.stage import ClientContext
from fl_privacy_lib.federated.compiled.form import Form
from fl_privacy_lib.federated.compiled.network import SLICE, Memory, Network, memory_of
from fl_privacy_lib.federated.local_steps import local_steps
from fl_privacy_lib.federated.participation import Examples
from fl_privacy_lib.models import Parameters
from fl_privacy_lib.sampling import Plan


def with_batches(memory: Memory, batches: Sequence[np.ndarray], state: np.ndarray) -> Memory:
    """Return the memory with a client's batches, room for their norms, and its noise's state."""
    positions = np.ascontiguousarray(np.concatenate(batches), np.int64)
    if len(positions) and not 0 <= positions.min() <= positions.max() < len(memory.y):
        raise IndexError(f"a batch holds a position outside 0 … {len(memory.y) - 1}")
    norms = np.zeros((max(map(len, batches)), len(memory.bounds)), np.float32)
    return memory._replace(
        positions=positions, ends=np.cumsum([0, *map(len, batches)]), norms=norms,
        factors=np.zeros_like(norms), state=state,
    )  # fmt: skip


class CompiledEngine:
    """Local iterations in the kernel, one client after another in the same memory.

    Parameters
    ----------
    network : the model in the kernel's form
    weights : the global model of a round
    examples : all examples, float32 [N, …] in one piece, and labels [N]
    """

    def __init__(
        self,
        network: Network,
        weights: Parameters,
        examples: Examples,
        plan: Plan,
        defense: Defense,
    ) -> None:
        self.network, self.examples, self.plan, self.defense = network, examples, plan, defense
        self.memory = memory_of(network, weights, examples)

    def train(
        self, batches: Sequence[Sequence[np.ndarray]], contexts: Sequence[ClientContext]
    ) -> list[Gradient]:
        """Return each client's update; see `rounds.GenericEngine`."""
        return list(map(self._client, batches, contexts))

    def _client(self, batches: Sequence[np.ndarray], ctx: ClientContext) -> Gradient:
        """Run one client's local iterations."""
        from fl_privacy_lib.federated.compiled import gaussian, kernel

        plan, form = self.plan, Form.of(self.defense, self.plan.batch_size, ctx.round)
        memory = with_batches(
            self.memory, batches, gaussian.initial_state(plan.seed, ctx.round, ctx.clients[0])
        )
        memory.weights[:], memory.update[:] = memory.start, 0
        memory.bounds[:], memory.stds[:] = form.bound, form.std
        by_kernel = plan.local_optimizer == "sgd"  # else it adds up a gradient, for the optimiser
        if by_kernel and not form.needs_norms:
            self._run(memory, len(batches), kernel.EVERY, form)
        else:
            step = local_steps(plan, {"": torch.from_numpy(memory.update)})
            for i, batch in enumerate(batches):
                taken = memory.update if by_kernel else np.zeros_like(memory.update)
                part = memory._replace(ends=memory.ends[i:], update=taken)
                if form.needs_norms:
                    self._iterate(part, i, batch, form, ctx)
                else:
                    self._run(part, 1, kernel.EVERY, form)
                if not by_kernel:
                    step({"": torch.from_numpy(taken)})
                    memory.weights[:] = memory.start + memory.update
        if not form.needs_norms:
            self._note_norms(memory, len(batches) - 1, batches[-1], ctx, form.scope is not None)
        return self.network.unpack(memory.update)

    def _run(self, memory: Memory, iterations: int, phases: int, form: Form) -> None:
        """Run the kernel; at the rate −1 a step adds its gradient to the update."""
        from fl_privacy_lib.federated.compiled import kernel

        rate = float(self.plan.local_lr) if self.plan.local_optimizer == "sgd" else -1.0
        kernel.run(
            self.network.form, memory, iterations, phases | kernel.LARGEST * form.largest,
            form.scope == "all", rate, self.plan.batch_size,
        )  # fmt: skip

    def _iterate(
        self, memory: Memory, i: int, batch: np.ndarray, form: Form, ctx: ClientContext
    ) -> None:
        """Run one local iteration in which a rule reads the norms before gradients are summed."""
        from fl_privacy_lib.federated.compiled.kernel import BACKWARD, CLIP, FORWARD, STEP, SUM

        # with a bound that is known, only the noise waits for the norms
        self._run(memory, 1, FORWARD | BACKWARD | (CLIP | SUM if form.bound else 0), form)
        factors, stds = form.answer(self._note_norms(memory, i, batch, ctx), ctx)
        memory.factors[: len(batch)] = torch.stack(list(factors.values()), -1)[0]
        memory.stds[:] = torch.cat(list(stds.values()))
        # else the gradients, of which only the last slice is still there
        again = FORWARD | BACKWARD if len(batch) > SLICE else 0
        self._run(memory, 1, STEP if form.bound else again | SUM | STEP, form)

    def _note_norms(
        self, memory: Memory, i: int, batch: np.ndarray, ctx: ClientContext, measured: bool = True
    ) -> Gradient:
        """Note the iteration, its examples and their norms [1, B] in the context; return these."""
        x, y = (part[torch.from_numpy(batch)][None] for part in self.examples)
        table = torch.from_numpy(memory.norms[: len(batch)].copy())
        norms = {name: table[None, :, t] for t, name in enumerate(self.network.names)}
        ctx.iteration, ctx.examples = i, (x, y)
        ctx.norms = norms if measured and len(batch) else None
        return norms


def hits(network: Network, weights: Parameters, examples: Examples) -> int:
    """Return how many examples the network puts into their class."""
    from fl_privacy_lib.federated.compiled import gaussian, kernel

    memory = memory_of(network, weights, examples)
    memory = with_batches(memory, [np.arange(len(examples[1]))], gaussian.initial_state(0, 0, 0))
    memory.weights[:] = memory.start
    kernel.run(network.form, memory, 1, kernel.FORWARD, False, 0.0, 1)
    return int(memory.hits[0])
