"""What the tests of compensation share."""

import torch
from torch import nn

from fl_privacy_lib.chapters.compensation.parameters import Compensation as Parameters

CPU = torch.device("cpu")
FULL = Parameters.of_profile("full")


def dice(seed=0):
    return torch.Generator().manual_seed(seed)


def small_net(seed=0):
    """Return a convolution, a pooling and two dense layers, with 3 images of 6×6 and labels."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(),
                          nn.Linear(12, 5), nn.Sigmoid(), nn.Linear(5, 4))  # fmt: skip
    x = torch.rand(3, 1, 6, 6, generator=dice(seed))
    return model, x, torch.tensor([0, 3, 1])
