"""What an attacker holds: observations checked, stacked over victims, the labels they betray."""

from collections.abc import Sequence

import torch
from torch import nn

from fl_privacy_lib._checks import InputError, refuse
from fl_privacy_lib.attacks.attack import Attack
from fl_privacy_lib.attacks.objective import Evidence, as_gradient, replay, rows_of
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.federated.participation import Observation
from fl_privacy_lib.models import call

Seen = Sequence[Sequence[Observation]]  # [victims][R]
UNKNOWN = -1  # stands for a label that the gradient does not betray


def check_observations(seen: Seen, model: nn.Module, batch_size: int) -> None:
    """Raise `InputError` for observations that can not be attacked in one call."""
    refuse(
        {
            "no observation was given: there is nothing to reconstruct.": not (seen and all(seen)),
            "victims of one call must be observed equally often; split the call.": (
                len({len(row) for row in seen}) > 1
            ),
        }
    )
    first, observations = seen[0][0], [o for row in seen for o in row]
    stage = first.tap.stage
    mixed = any(o.tap.stage != stage or o.defense != first.defense for o in observations)
    columns = list(zip(*seen, strict=True))
    plans = [{(o.tap.round, o.local_lr, o.local_iterations) for o in column} for column in columns]
    same_weights = all(
        w is o.weights[name] or torch.equal(w, o.weights[name])
        for column in columns
        for o in column
        for name, w in column[0].weights.items()
    )
    refuse(
        {
            "observations of one call must come from one kind of tap under one defence; "
            "split the call.": mixed,
            "observations of one call must share round, learning rate and iterations; "
            "split the call.": max(map(len, plans)) > 1,
            "observations of one call must be made at the same weights; "
            "split the call.": not same_weights,
            "an aggregate mixes clients; a reconstruction reads example, batch, update or "
            "received.": stage == "aggregate",
            f"batch_size = {batch_size} at the tap 'example', which holds one example's gradient: "
            "use 1.": stage == "example" and batch_size != 1,
        }
    )
    leading = 1 if stage == "example" else 0
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for o in observations:
        shapes = {name: tuple(v.shape[leading:]) for name, v in o.values.items()}
        for name in expected | shapes:
            if shapes.get(name) != expected.get(name):
                raise InputError(
                    f"the observed gradient of {name} has shape {shapes.get(name)}, the model's "
                    f"parameter {expected.get(name)}: give the model that the gradient was taken "
                    "from."
                )


def classes_of(model: nn.Module, observation: Observation, shape: tuple[int, ...]) -> int:
    """Return the number of classes, by showing the model a black image of this shape."""
    black = next(iter(observation.weights.values())).new_zeros(1, *shape)
    try:
        with torch.no_grad():
            return call(model, observation.weights, black).shape[-1]
    except RuntimeError as error:
        raise InputError(
            f"the model takes no image of shape {shape}: give the shape of its images."
        ) from error


def stacked(observations: Sequence[Observation]) -> Gradient:
    """Return what was seen, as gradients [V, …]."""
    gradients = [as_gradient(o) for o in observations]
    return {name: torch.stack([g[name] for g in gradients]) for name in gradients[0]}


def infer_labels(gradient: Gradient, batch_size: int) -> torch.Tensor:
    """Return the labels that the last layer's weight gradient points at.

    Row c of that gradient is the mean over the batch of (p_c − 1[y = c])·features. With features
    that are never negative (sigmoid, ReLU) only an example of class c can push the row's sum below
    zero, and each pushes by about the same amount, its share. So every class with a negative sum is
    taken once, the lowest first, and one share is added back to it. The labels still missing are
    taken one by one, always the lowest row. For one example this is iDLG's rule, the lowest row.

    Parameters
    ----------
    gradient : tensors [rows, *parameter shape], in the order of the model's layers
    batch_size : int, B

    Returns
    -------
    tensor [rows, B] of class indices, ascending; a class may stand more than once. A row whose sums
    are all alike (a gradient of zeros) or no numbers betrays nothing and holds −1.

    Notes
    -----
    Source: iDLG (Zhao et al. 2020) for one example; LLG (Wainakh et al. 2022) for both stages, here
    without an auxiliary data set. LLG's share, the negative sums / B × (1 + 1/classes), is too
    small where many classes are present. Here each present class is taken to hide as much of a
    positive part as the median positive row shows.

    Examples
    --------
    >>> infer_labels({"w": torch.tensor([[[0.2, 0.1], [-0.9, -0.4], [0.7, 0.3]]])}, 1)
    tensor([[1]])
    >>> infer_labels({"w": torch.tensor([[[-0.2], [-1.2], [0.7], [0.7]]])}, 3)
    tensor([[0, 1, 1]])
    >>> infer_labels({"w": torch.zeros(1, 3, 2)}, 2)
    tensor([[-1, -1]])
    """
    dense = [g for g in gradient.values() if g.dim() == 3]
    if not dense:
        raise InputError(
            "no dense layer's weight gradient was observed, so no label can be inferred from it."
        )
    sums = dense[-1].sum(-1)  # [rows, classes]
    present = sums < 0  # [rows, classes], classes that are certain and not yet taken
    hidden = torch.where(sums > 0, sums, torch.nan).nanmedian(1).values.nan_to_num(0.0)  # [rows]
    share = (sums.clamp_max(0).sum(1) - present.sum(1) * hidden) / batch_size  # [rows], negative
    silent = ~torch.isfinite(sums).all(1) | (sums.amax(1) == sums.amin(1))
    sums, rows, columns = sums.clone(), torch.arange(len(sums), device=sums.device), []
    for _ in range(batch_size):
        first = torch.where(present, sums, torch.inf)
        lowest = torch.where(present.any(1), first.argmin(1), sums.argmin(1))
        columns.append(lowest)
        sums[rows, lowest] -= share
        present[rows, lowest] = False
    labels = torch.stack(columns, dim=1).sort(dim=1).values
    return torch.where(silent[:, None], UNKNOWN, labels)


def labels_of(
    seen: Seen,
    classes: int,
    batch_size: int,
    attack: Attack,
    labels: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return labels [V, B] by the attack's rule.

    Returns
    -------
    tensor [V, B] or None
        −1 where no label can be known; None where labels are optimised with the images.

    Raises
    ------
    InputError
        If labels are given that do not fit, or are not given where the rule needs them.
    """
    if labels is not None:
        shape, wrong = tuple(labels.shape), (labels < UNKNOWN) | (labels >= classes)
        refuse(
            {
                f"labels have shape {shape}, not ({len(seen)}, {batch_size}): one row a victim, "
                "one label an image.": shape != (len(seen), batch_size),
                f"labels must lie between 0 and {classes - 1}, or be {UNKNOWN} where one is not "
                "known.": bool(wrong.any()),
            }
        )
        return labels
    if attack.label_rule == "given":
        raise InputError(
            "label_rule = 'given' needs the labels: give labels, or use 'inferred' or 'joint'."
        )
    if attack.label_rule == "joint":
        return None
    columns = [stacked(column) for column in zip(*seen, strict=True)]
    # of several observations the mean: noise averages out, the sign of a row does not
    mean = {name: torch.stack([c[name] for c in columns]).mean(0) for name in columns[0]}
    return infer_labels(mean, batch_size)


def plausible_rows(evidence: Sequence[Evidence], labels: torch.Tensor | None) -> torch.Tensor:
    """Return which victims [V] left anything to attack: finite gradients, not all zero, labels."""
    targets = [rows_of(t) for e in evidence for t in e.targets.values()]
    good = torch.stack([torch.isfinite(t).all(1) for t in targets]).all(0)
    for e in evidence:  # a relative distance divides by each observation's own norm
        good &= torch.stack([rows_of(t != 0).any(1) for t in e.targets.values()]).any(0)
    return good if labels is None else good & (labels != UNKNOWN).all(1)


def gather(observations: Sequence[Observation], attack: Attack) -> Evidence:
    """Return one observation of every victim, and whether its exact zeros are left out."""
    return Evidence(
        observations[0].weights,
        stacked(observations),
        replay(observations[0], attack.clip_aware),
        skip_zeros=attack.mask == "zeros",
    )


def knowledge_of(attack: Attack, seen: Seen, batch_size: int, labels_given: bool) -> dict[str, str]:
    """Return what an attacker is given and takes for granted: what → how much of it.

    A success rate means nothing without it.

    Parameters
    ----------
    attack, seen, batch_size : see `reconstruct.reconstruct`
    labels_given : whether the labels are known, whatever the attack's rule is
    """
    first = seen[0][0]
    stages = ", ".join(f"{place}: {it}" for place, it in first.defense.items() if place != "name")
    labels = {"inferred": "inferred from the gradient", "joint": "optimised with the images"}
    return {
        "reads": f"{len(seen[0])} observation(s) at the tap {first.tap.stage!r}",
        "weights": "of the model, at every observation",
        "batch size": str(batch_size),
        # the update is divided by both: the attack takes L iterations for one
        "local training": f"L = {first.local_iterations}, η = {first.local_lr}",
        "labels": "given" if labels_given else labels[attack.label_rule],
        "defence": f"{first.defense['name']} ({stages})" if stages else first.defense["name"],
        "replays it": "yes, without noise" if attack.clip_aware else "no",
        "left out": "exact zeros" if attack.mask == "zeros" else "nothing",
        "prior on images": f"total variation × {attack.tv:g}" if attack.tv else "none",
        "truth": "unknown",
    }
