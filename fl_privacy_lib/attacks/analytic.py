"""What a gradient gives away by algebra alone, without any optimisation."""

import torch
from torch import nn

from fl_privacy_lib.attacks.labels import last_dense
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.federated.gradients import example_gradients
from fl_privacy_lib.models import Parameters, call


def dense_input(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the input of a dense layer from the gradients of its weight and bias: one example, exactly.

    With y = Wx + b every row of the weight's gradient is the bias's entry times x. Of all rows the
    least-squares solution is taken, so that noise hurts least. Behind a batch it returns a mixture;
    see `dense_rows`.

    Parameters
    ----------
    weight : [..., outputs, inputs]
    bias : [..., outputs], not all zero

    Returns
    -------
    tensor [..., inputs]

    Notes
    -----
    Source: Phong et al. (2017), section 3, one row; Geiping et al. (2020), proposition 3.1.

    Examples
    --------
    >>> dense_input(torch.tensor([[0.1, 0.2], [-0.3, -0.6]]), torch.tensor([0.2, -0.6]))
    tensor([0.5000, 1.0000])
    """
    return (bias[..., None] * weight).sum(-2) / bias.square().sum(-1, keepdim=True)


def dense_rows(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return each row of the weight's gradient divided by its bias's entry: [..., outputs, inputs].

    A unit that only one example of a batch has switched on shows that example's input, whatever the
    others are. Rows of units that were off are not finite.

    Examples
    --------
    >>> dense_rows(torch.tensor([[0.1, 0.2], [0.0, 0.0]]), torch.tensor([0.2, 0.0]))
    tensor([[0.5000, 1.0000],
            [   nan,    nan]])
    """
    return weight / bias[..., None]


def label_counts(
    model: nn.Module, weights: Parameters, gradient: Gradient, own: torch.Tensor, batch_size: int
) -> torch.Tensor:
    """Return how often each class stands in a batch, from the last dense layer and images of the attacker's own.

    The sum of row c of that layer's weight gradient is the mean of p_c·F − 1[y = c]·F over the
    batch, F the sum of an example's features. On a network that has not learned yet p and F hardly
    depend on the image, so the attacker's own images tell both; what is left of a row is −F/B for
    each example of its class. It needs the gradient's true scale: after clipping
    `labels.infer_labels` is the better rule.

    Parameters
    ----------
    weights : tensors […], at which the gradient was taken
    gradient : tensors [rows, …], of a batch's mean loss
    own : [N, *shape], any images; the nearer to the victims', the better
    batch_size : int, B

    Returns
    -------
    tensor [rows, classes] of int, each row adding up to B

    Notes
    -----
    Source: LLG (Wainakh et al. 2022), its variants with the model's weights and auxiliary data.
    """
    with torch.no_grad():
        p = torch.softmax(call(model, weights, own), -1)  # [N, classes]
    unlikely = p.argmin(1)  # any label would do; here 1 − p is far from 0
    shared = {name: w[None] for name, w in weights.items()}
    mine = last_dense(
        {n: g[0] for n, g in example_gradients(model, shared, own[None], unlikely[None]).items()}
    )
    rows = torch.arange(len(own), device=own.device)
    features = mine.sum(-1)[rows, unlikely] / (p[rows, unlikely] - 1)  # F, [N]
    left = last_dense(gradient).sum(-1) - (p * features[:, None]).mean(0)  # [rows, classes]
    counts, every = (
        torch.zeros_like(left, dtype=torch.long),
        torch.arange(len(left), device=left.device),
    )
    for _ in range(batch_size):
        lowest = left.argmin(1)
        counts[every, lowest] += 1
        left[every, lowest] += features.mean() / batch_size
    return counts
