"""The networks of the papers: the ones that are trained, and the ones that are attacked.

The papers train one network and attack another. The training network is a ReLU CNN without biases;
the published reconstructions come from an untrained sigmoid LeNet whose weights and biases are
drawn from U(−0.5, 0.5). A success rate belongs to the network it was measured on.
"""

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from fl_privacy_lib._checks import InputError, one_of

Parameters = dict[str, torch.Tensor]


def training_cnn(
    shape: tuple[int, int, int], classes: int, activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Return the CNN that the Fed-CDP papers train.

    Two valid 3×3 convolutions (32 and 64 channels, ReLU, 2×2 max-pooling) and one dense layer; no
    biases, so that "layer" and "tensor" mean the same. The released code's dropout is never active
    and is left out.

    Parameters
    ----------
    shape : (channels, height, width)
    classes : int, number of logits
    activation : class of the module after each convolution

    Raises
    ------
    InputError
        If the images are smaller than 10 × 10: nothing is left of them to classify.

    Notes
    -----
    Source: Fed-CDP, section VII, and its released code.

    Examples
    --------
    >>> sum(p.numel() for p in training_cnn((1, 28, 28), 10).parameters())
    34720
    >>> sum(p.numel() for p in training_cnn((3, 32, 32), 62).parameters())
    162144
    """
    channels, height, width = shape
    side = [((n - 2) // 2 - 2) // 2 for n in (height, width)]
    if min(side) < 1:
        raise InputError(f"the CNN needs images of at least 10 × 10, not {height} × {width}.")
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, bias=False), activation(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, bias=False), activation(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * side[0] * side[1], classes, bias=False),
    )  # fmt: skip


def attacked_lenet(
    shape: tuple[int, int, int], classes: int, convolutions: int = 4
) -> nn.Sequential:
    """Return the sigmoid LeNet on which the published reconstructions were made.

    12 channels of 5×5 convolutions with padding 2 (strides 2, 2, 1 and, with four, 1), sigmoid
    after each, and one dense layer. Initialise it with `init_uniform`.

    Parameters
    ----------
    shape : (channels, height, width)
    classes : int, number of logits
    convolutions : {3, 4}
        4 as in the code of CPL, 3 as in DLG and iDLG.

    Examples
    --------
    >>> sum(p.numel() for p in attacked_lenet((1, 28, 28), 10).parameters())
    17038
    >>> sum(p.numel() for p in attacked_lenet((3, 32, 32), 10).parameters())
    19438
    """
    if convolutions not in (3, 4):
        raise InputError(f"convolutions = {convolutions} must be 3 (DLG, iDLG) or 4 (CPL).")
    channels, height, width = shape
    layers: list[nn.Module] = []
    for stride in (2, 2, 1, 1)[:convolutions]:
        layers += [nn.Conv2d(channels, 12, 5, stride=stride, padding=2), nn.Sigmoid()]
        channels = 12
    features = 12 * -(-height // 4) * -(-width // 4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, classes))


def mlp(features: int, classes: int, hidden: tuple[int, ...] = (600, 100)) -> nn.Sequential:
    """Return the multilayer perceptron of the tabular data sets (no biases; ReLU).

    Source: Fed-CDP's released code, "two hidden layers".

    Examples
    --------
    >>> sum(p.numel() for p in mlp(30, 2).parameters())
    78200
    """
    widths = (features, *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes, bias=False))


def init_uniform(
    model: nn.Module, generator: torch.Generator, half_width: float = 0.5
) -> nn.Module:
    """Draw every weight and bias from U(−half_width, half_width), in place, and return the model.

    Source: the released code of DLG and CPL (half_width = 0.5).
    """
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -half_width, half_width, generator=generator)
    return model


def init_glorot(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Draw weights from Glorot's uniform distribution and set biases to zero, in place.

    Source: the default of Keras, with which the papers' code trains. Returns the model.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def build(name: str, shape: tuple[int, ...], classes: int, generator: torch.Generator) -> nn.Module:
    """Return an initialised model by name.

    Parameters
    ----------
    name : {'training_cnn', 'training_cnn_tanh', 'attacked_lenet', 'mlp', 'linear'}
        'training_cnn_tanh' has bounded activations, 'linear' is 'mlp' without hidden layers.
    shape : of one example, (channels, height, width) or (features,)
    classes : int, number of logits
    generator : of the first weights. Each model gets the distribution its paper used: Glorot for
        trained networks, U(−0.5, 0.5) for the attacked one.

    Raises
    ------
    InputError
        If the name is unknown, or the model needs images and the shape is none of theirs.
    """
    dense = {"mlp": (600, 100), "linear": ()}
    one_of(["training_cnn", "training_cnn_tanh", "attacked_lenet", *dense], model=name)
    if name in dense:
        return init_glorot(mlp(prod(shape), classes, dense[name]), generator)
    if len(shape) != 3:
        raise InputError(
            f"model = {name!r} needs images, but an example has shape {shape}; use 'mlp'."
        )
    if name == "attacked_lenet":
        return init_uniform(attacked_lenet(shape, classes), generator)
    activation = nn.Tanh if name == "training_cnn_tanh" else nn.ReLU
    return init_glorot(training_cnn(shape, classes, activation), generator)


def parameters_of(model: nn.Module) -> Parameters:
    """Return the model's trainable parameters by name, detached: what travels the route.

    What is frozen (``requires_grad_(False)``) stays as it is in the model, and nobody sends it.
    """
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def call(model: nn.Module, weights: Parameters, x: torch.Tensor) -> torch.Tensor:
    """Return the model's output at other weights; shared modules and shared parameters stay shared.

    Parameters
    ----------
    weights : tensors by the names of `parameters_of`; what is left out keeps the model's value
    """
    # torch's own tying of weights leaves a traced tensor behind in a module that stands in the
    # model twice
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    swapped = {
        f"{path}.{short}" if path else short: weights[names[id(parameter)]]
        for path, module in model.named_modules()
        for short, parameter in module.named_parameters(recurse=False)
        if names[id(parameter)] in weights
    }
    return functional_call(model, swapped, (x,), tie_weights=False)


def check_per_example(model: nn.Module) -> None:
    """Raise unless the model keeps examples apart, and their gradients can be taken here.

    Raises
    ------
    InputError
        If nothing is trainable; for a normalisation over the batch, or one that keeps running
        statistics: one example's gradient then depends on its neighbours, and clipping it bounds
        nothing (frozen statistics, ``layer.eval()``, are a fixed affine map and are allowed); for
        dropout in training mode, whose masks no plan keys; and for GRU and RNN layers, which
        automatic differentiation cannot vectorise over examples.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            "the model has no trainable parameter: set requires_grad on what shall be trained."
        )
    for name, layer in model.named_modules():
        for kinds, applies, why in _REFUSED:
            if isinstance(layer, kinds) and applies(layer):
                raise InputError(f"layer {name!r} ({type(layer).__name__}) {why}.")


_REFUSED: tuple[tuple[Any, Callable[[Any], bool], str], ...] = (
    (
        nn.modules.batchnorm._BatchNorm,
        lambda layer: layer.training or not layer.track_running_stats,
        "normalises over the batch, so an example has no gradient of its own to clip; freeze its "
        "statistics with .eval() or use GroupNorm instead",
    ),
    (
        nn.modules.instancenorm._InstanceNorm,
        lambda layer: layer.training and layer.track_running_stats,
        "moves running statistics with every example, which then depend on its neighbours; freeze "
        "them with .eval() or give it track_running_stats=False",
    ),
    (
        nn.modules.dropout._DropoutNd,
        lambda layer: layer.training and layer.p > 0,
        "draws masks that the plan's seed does not key, so no run could be repeated; call .eval() "
        "on it or take it out",
    ),
    (
        (nn.GRU, nn.RNN),
        lambda layer: True,
        "cannot be differentiated example by example here; use nn.LSTM, or the cell (nn.GRUCell, "
        "nn.RNNCell) in a loop",
    ),
)
