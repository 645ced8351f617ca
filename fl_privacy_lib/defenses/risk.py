"""How much each tensor of a gradient tells of the input: the norm of its Jacobian.

The leakage risk of a tensor is how far its gradient moves when the input does, averaged over a
small public root set. Taught in notebook 09.
"""

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.func import grad, jacfwd, jvp, vjp, vmap
from torch.nn import functional as F

from fl_privacy_lib._checks import InputError, in_range, one_of, whole_number
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.representation import last_dense
from fl_privacy_lib.defenses.slices import Slices, risk_balanced
from fl_privacy_lib.models import Parameters, call, parameters_of

CHUNK = 25  # examples whose Jacobians are taken together: what fits a cache

GradientOf = Callable[[torch.Tensor, torch.Tensor], Gradient]
"""One image [C, H, W] and its label [] → the loss's gradient, tensors […]"""


def layer_risks(
    model: nn.Module,
    weights: Parameters,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    estimator: str = "hutchinson",
    probes: int = 16,
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Return each tensor's leakage risk, the mean over a root set of ‖J_l(x)‖_F.

    Parameters
    ----------
    model, weights : the network, and where it stands
    x, y : the root set, [k, *shape] and labels [k]
    estimator : {'hutchinson', 'exact', 'all_ones'}
        'hutchinson': E‖J u‖² = ‖J‖_F² for probes u of random signs, all tensors from one forward
        derivative a probe. 'exact': all columns of J, for small inputs. 'all_ones': ‖Jᵀ1‖ of the
        root set's mean loss, as in the public code, in which rows of opposite sign cancel.
    probes : int, ≥ 1, a root image gets
    generator : of the probes; None: one of seed 0

    Returns
    -------
    dict by parameter name, ≥ 0, in units of the gradient by unit of a pixel

    Raises
    ------
    InputError
        For an empty root set or a bad setting.

    Notes
    -----
    The paper's p of the norm is free; here it is the Frobenius norm. Source: Wang et al. (2022),
    equations 1 and 2, and their released code for 'all_ones'.
    """
    one_of(ESTIMATORS, estimator=estimator)
    whole_number(1, probes=probes)
    if len(x) == 0:
        raise InputError("the root set is empty: give at least one image with its label.")
    dice = generator or torch.Generator(x.device).manual_seed(0)

    def gradient(image: torch.Tensor, label: torch.Tensor) -> Gradient:
        return grad(lambda w: F.cross_entropy(call(model, w, image[None]), label[None]))(weights)

    with warnings.catch_warnings():  # torch's own, at the first forward derivative
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        norms = ESTIMATORS[estimator](gradient, x, y, probes, dice)  # tensors [k]
    return {name: float(norm.double().mean()) for name, norm in norms.items()}


def _squares(gradient: Gradient, axes: int) -> Gradient:
    """Return sums of squares over a gradient's own axes, behind so many others."""
    return {name: g[..., None].flatten(axes).square().sum(-1) for name, g in gradient.items()}


def _hutchinson(
    gradient: GradientOf, x: torch.Tensor, y: torch.Tensor, probes: int, dice: torch.Generator
) -> Gradient:
    def pushed(image: torch.Tensor, label: torch.Tensor, probe: torch.Tensor) -> Gradient:
        return jvp(lambda moved: gradient(moved, label), (image,), (probe,))[1]

    totals: Gradient = {}
    for _ in range(probes):
        signs = torch.randint(0, 2, x.shape, generator=dice, device=x.device).to(x) * 2 - 1
        for name, square in _squares(vmap(pushed, chunk_size=CHUNK)(x, y, signs), 1).items():
            totals[name] = totals.get(name, 0.0) + square / probes
    return {name: total.sqrt() for name, total in totals.items()}


def _exact(
    gradient: GradientOf, x: torch.Tensor, y: torch.Tensor, probes: int, dice: torch.Generator
) -> Gradient:
    jacobians = vmap(jacfwd(gradient), chunk_size=1)(x, y)  # [k, *parameter, *image]
    return {name: square.sqrt() for name, square in _squares(jacobians, 1).items()}


def _all_ones(
    gradient: GradientOf, x: torch.Tensor, y: torch.Tensor, probes: int, dice: torch.Generator
) -> Gradient:
    def norms(image: torch.Tensor, label: torch.Tensor) -> Gradient:
        value, pull = vjp(lambda moved: gradient(moved, label), image)[:2]
        only = {n: {m: torch.full_like(v, n == m) for m, v in value.items()} for n in value}
        return {name: pull(ones)[0].norm() / len(x) for name, ones in only.items()}

    return vmap(norms, chunk_size=CHUNK)(x, y)


ESTIMATORS = {"hutchinson": _hutchinson, "exact": _exact, "all_ones": _all_ones}


def estimate_errors(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, estimator: str, probes: int, draws: int
) -> dict[str, float]:
    """Compare estimates of a model's risks, at its own weights, with the exact ones.

    Parameters
    ----------
    x, y, estimator, probes : as in `layer_risks`
    draws : seeds of the probes, whose mean is compared

    Returns
    -------
    relative_error : the largest over tensors
    last_share, exact_share : of the last dense layer's weights in the risk of all tensors
    """
    args = (model, parameters_of(model), x, y)
    exact = layer_risks(*args, estimator="exact")
    drawn = [layer_risks(*args, estimator=estimator, probes=probes,
                         generator=torch.Generator(x.device).manual_seed(seed))
             for seed in range(draws)]  # fmt: skip
    means = {name: float(np.mean([one[name] for one in drawn])) for name in exact}
    last, _ = last_dense(model)
    return {
        "relative_error": max(abs(means[n] / e - 1) for n, e in exact.items()),
        "last_share": means[last] / sum(means.values()),
        "exact_share": exact[last] / sum(exact.values()),
    }


def sensitivity_slices(
    model: nn.Module,
    root: tuple[torch.Tensor, torch.Tensor],
    count: int,
    estimator: str = "hutchinson",
    probes: int = 4,
) -> Slices:
    """Return slices of a model's gradient that share its leakage risk equally.

    Parameters
    ----------
    model : where its own weights stand
    root : images and labels of the root set
    count : int, s
    estimator, probes : as in `layer_risks`; 'size' balances the coordinates instead
    """
    weights = parameters_of(model)
    sizes = [w.numel() for w in weights.values()]
    if estimator == "size":
        return risk_balanced(sizes, sizes, count)
    risks = layer_risks(model, weights, *root, estimator=estimator, probes=probes)
    return risk_balanced(sizes, list(risks.values()), count)


def root_set(
    labels: np.ndarray, pool: np.ndarray, size: int, bias: float, rng: np.random.Generator
) -> np.ndarray:
    """Return positions of root images, drawn from a pool with replacement.

    Parameters
    ----------
    labels : [N], classes of all images
    pool : positions that may be drawn
    size : int, ≥ 1
    bias : float, in [0, 1], probability of the class 0; the others share the rest equally
    rng : what draws

    Notes
    -----
    With ten classes a bias of one tenth is none. Source: Wang et al. (2022), Table III C, which
    names a probability and no class.
    """
    whole_number(1, size=size)
    in_range(0, 1, bias=bias)
    kinds = labels[pool]
    counts = np.bincount(kinds)
    others = (1 - bias) / max(1, np.count_nonzero(counts[1:]))
    chance = np.where(kinds == 0, bias, others) / counts[kinds]
    return rng.choice(pool, size, p=chance / chance.sum())
