"""Two-stage local privacy: each client privately selects a coordinate, then perturbs its value.

`TwoStage` and `Perturbed` are ``per_client`` stages over any number of clients at once. How a
coordinate is selected and how a value is perturbed are mechanisms of their own (`selection`,
`perturbation`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fl_privacy_lib._checks import InputError, in_range, positive
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.defenses.slices import flat, unflat
from fl_privacy_lib.defenses.stage import Context, Declaration, Stage

Select = Callable[
    [torch.Tensor, torch.Generator], torch.Tensor
]  # scores [n, d] → coordinates [n], −1: none
Perturb = Callable[
    [torch.Tensor, torch.Generator], torch.Tensor
]  # values in [−1, 1] → values of the same shape


class _Report(Stage):
    """What the locally private stages share: they have no form without noise."""

    def declare(self) -> Declaration:
        """Return that the report is private by itself."""
        return Declaration(local=True)

    def noiseless(self) -> Stage:
        """Refuse, in one sentence."""
        raise InputError(
            f"{type(self).__name__} draws what it sends and has no form without noise: an attacker "
            "that replays it "
            "needs another arm (a naive one, or one that learns)."
        )


@dataclass(frozen=True)
class TwoStage(_Report):
    """Select one coordinate of what a client has gathered, perturb its value, send nothing else.

    Parameters
    ----------
    select : scores [n, d] and a generator to one coordinate a client; −1 sends nothing
    perturb : values [n] in [−1, 1] and a generator to [n], unbiased; None sends the value as it is,
        not clipped
    scale : float, > 0
        Every value sent is multiplied by it. The paper's mechanisms send s itself (1); uniform
        selection is unbiased with the number of coordinates d.
    clients : int or None
        K: each client keeps what it did not send (residual) and what it sent last (momentum) until
        it takes part again. None: nothing is kept, which is the same while nobody takes part twice.
    discount : float, in [0, 1)
        γ of the momentum.

    Notes
    -----
    Source: FedSel, Algorithm 1. With the update u (raw, or times η, as `Plan` says): r ← r + u; j
    from |r|; m_j ← γ m_j + r_j; send the perturbed value of m_j clipped to [−1, 1]; r_j ← 0. The
    recursion of m is a reading: the paper's formula is lost. Guarantee, per participation: ε of the
    selection plus ε of the perturbation, since the value's distribution depends on the private data
    and the coordinate alone.

    Examples
    --------
    >>> largest = lambda scores, generator: scores.argmax(1)
    >>> ctx = Context(0, (0,), [torch.Generator()])
    >>> TwoStage(largest)({"w": torch.tensor([[0.1, -0.4, 0.2]])}, ctx)
    {'w': tensor([[ 0.0000, -0.4000,  0.0000]])}
    """

    select: Select
    perturb: Perturb | None = None
    scale: float = 1.0
    clients: int | None = None
    discount: float = 0.0

    def __post_init__(self) -> None:
        positive(scale=self.scale)
        in_range(0, math.nextafter(1, 0), discount=self.discount)

    def __call__(self, values: Gradient, ctx: Context) -> Gradient:
        """Return updates [clients, …] with one coordinate each, over all tensors together."""
        gathered = flat(values)  # [n, d]
        memory = self._memory(ctx, gathered)
        ids = torch.as_tensor(ctx.clients, device=gathered.device)
        if memory:
            gathered += memory["residual"][ids]
        chosen = _draw(self.select, gathered.abs(), ctx.generators)  # [n]
        sends, at = chosen >= 0, chosen.clamp_min(0)[:, None]
        value = gathered.gather(1, at)[:, 0]  # [n]
        if memory:
            value = value + self.discount * memory["momentum"][ids, at[:, 0]]
            memory["momentum"][ids[sends], at[sends, 0]] = value[sends]
            gathered[sends] = gathered[sends].scatter(1, at[sends], 0.0)
            memory["residual"][ids] = gathered
        if self.perturb is not None:
            value = _draw(self.perturb, value.clamp(-1, 1), ctx.generators)
        sent = torch.where(sends, self.scale * value, 0.0)
        return unflat(torch.zeros_like(gathered).scatter(1, at, sent[:, None]), values)

    def _memory(self, ctx: Context, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the memory of all clients, each tensor [K, d], made at the first call."""
        if self.clients is None:
            return {}
        if max(ctx.clients) >= self.clients:
            raise InputError(
                f"client {max(ctx.clients)} takes part, but the stage has clients = {self.clients}."
            )
        for name in ("residual", "momentum"):
            if name not in ctx.state:
                ctx.state[name] = like.new_zeros(self.clients, like.shape[1])
        return ctx.state


@dataclass(frozen=True)
class Perturbed(_Report):
    """Send the whole update through one mechanism: the flat and the compressed solution.

    Parameters
    ----------
    perturb : vectors [n, d], clipped to [−1, 1], and a generator to [n, d]
    """

    perturb: Perturb

    def __call__(self, values: Gradient, ctx: Context) -> Gradient:
        """Return updates [clients, …], all tensors perturbed together as one vector."""
        return unflat(_draw(self.perturb, flat(values).clamp(-1, 1), ctx.generators), values)


def local_privacy(name: str, stage: TwoStage | Perturbed) -> Defense:
    """Return the defence whose clients perturb their update, with an empty memory."""
    return Defense(name, per_client=stage, initial_state=dict)


def allocate(
    epsilon: float, dimensions: int, batch: int, *, floor: float = 1.0, largest_ratio: float = 0.1
) -> tuple[float, float]:
    """Return (ε₁, ε₂) of selection and value by the rule without hyper-parameters.

    The value comes first: ε₂ is at least floor · √(ln d / b), where the noise of the mean of b
    clients begins to drown it. What is left goes to the selection, up to the share `largest_ratio`
    of ε.

    Parameters
    ----------
    epsilon : float, > 0, budget of one participation
    dimensions : int, ≥ 2, d
    batch : int, ≥ 1, b, clients in a round
    floor, largest_ratio : the rule's two constants; both are lost in the paper

    Notes
    -----
    Source: FedSel, section 5.3, after Theorem 4.1.

    Examples
    --------
    >>> allocate(1.0, 123, 390), allocate(0.1, 123, 390)
    ((0.1, 0.9), (0.0, 0.1))
    """
    positive(epsilon=epsilon, batch=batch, floor=floor)
    in_range(0, 1, largest_ratio=largest_ratio)
    in_range(2, math.inf, dimensions=dimensions)
    spare = epsilon - floor * math.sqrt(math.log(dimensions) / batch)
    selection = min(max(spare, 0.0), largest_ratio * epsilon)
    return selection, epsilon - selection


def _draw(
    mechanism: Any, values: torch.Tensor, generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """Return the output for all rows: at once from one generator, or each from its own."""
    if len(generators) == 1:
        return mechanism(values, generators[0])
    return torch.cat(
        [mechanism(row, g) for row, g in zip(values.split(1), generators, strict=True)]
    )
