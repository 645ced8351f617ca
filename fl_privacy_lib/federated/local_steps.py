"""What a client's local iteration does with the gradient of its batch."""

from collections.abc import Callable
from itertools import count

import torch

from fl_privacy_lib.defenses import Gradient
from fl_privacy_lib.sampling import Plan

MOMENTUM = 0.9  # of a commented line of the released code
FIRST, SECOND, TINY = 0.9, 0.999, 1e-8  # Adam's usual decays, and what it divides by besides


def local_steps(plan: Plan, update: Gradient) -> Callable[[Gradient], None]:
    """Return the function that takes one local step after another, from the first on.

    Every participation begins without a memory: nothing but the weights goes from one round to the
    next. An optimiser only processes what is private already, so it adds nothing to ε.

    Parameters
    ----------
    update : zeros of the parameters' shapes; each step changes them in place

    Returns
    -------
    a function of a batch's gradient, by the same names, after clipping and noise
    """
    means, squares = ({name: torch.zeros_like(u) for name, u in update.items()} for _ in range(2))
    numbers = count(1)

    def step(gradient: Gradient) -> None:
        number = next(numbers)
        for name, u in update.items():
            direction = gradient[name]
            if plan.local_optimizer == "momentum":
                direction = means[name].mul_(MOMENTUM).add_(direction)
            elif plan.local_optimizer == "adam":
                mean = means[name].lerp_(direction, 1 - FIRST) / (1 - FIRST**number)
                square = squares[name].lerp_(direction**2, 1 - SECOND) / (1 - SECOND**number)
                direction = mean / (square.sqrt() + TINY)
            u.sub_(plan.local_lr * direction)

    return step
