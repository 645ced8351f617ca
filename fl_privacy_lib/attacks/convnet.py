"""ConvNet, the deeper of the attacked networks: eight convolutions and one dense layer."""

import torch
from torch import nn

from fl_privacy_lib._checks import InputError, whole_number
from fl_privacy_lib.models import build


def attacked_convnet(
    shape: tuple[int, ...], classes: int, generator: torch.Generator, width: int = 64
) -> nn.Module:
    """Return ConvNet with frozen batch normalisation, its weights drawn as PyTorch draws them.

    Eight 3×3 convolutions of w, 2w, 2w, 4w, … channels, each with batch normalisation of mean 0 and
    variance 1 and a ReLU; 3×3 max-pooling after the sixth and the eighth; one dense layer.

    Parameters
    ----------
    shape : (channels, height, width), at least 9 × 9
    classes : int, number of logits
    generator : of the weights
    width : int, w; 64 in the source

    Raises
    ------
    InputError
        If the images are too small.

    Notes
    -----
    The normalisation is frozen (`eval`): its statistics would mix the examples of a batch. Source:
    Geiping et al. (2020) and the released code of Wang et al. (2022).

    Examples
    --------
    >>> net = attacked_convnet((3, 32, 32), 10, torch.Generator())
    >>> sum(p.numel() for p in net.parameters())
    2904970
    """
    whole_number(1, width=width)
    if len(shape) != 3 or min(shape[1:]) < 9:
        raise InputError(f"ConvNet needs images of at least 9 × 9, not of shape {tuple(shape)}.")
    channels, layers = shape[0], list[nn.Module]()
    for place, factor in enumerate((1, 2, 2, 4, 4, 4, 4, 4)):
        wide = factor * width
        layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()]
        layers += [nn.MaxPool2d(3)] if place in (5, 7) else []
        channels = wide
    features = channels * (shape[1] // 9) * (shape[2] // 9)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, classes)).eval()
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            bound = layer.weight[0].numel() ** -0.5
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.uniform_(-bound, bound, generator=generator)
    return model


def attacked_network(
    attack: str, shape: tuple[int, ...], classes: int, generator: torch.Generator, width: int = 64
) -> nn.Module:
    """Return the network of an attack of Wang et al. (2022): 'dga' on LeNet, else ConvNet."""
    if attack == "dga":
        return build("attacked_lenet", shape, classes, generator)
    return attacked_convnet(shape, classes, generator, width)
