"""What an attacker holds: observations checked, put on one scale, and stacked over victims."""

from collections.abc import Sequence

import torch
from torch import nn

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.attacks.analytic import label_counts
from fl_privacy_lib.attacks.labels import UNKNOWN, infer_labels
from fl_privacy_lib.attacks.masks import Usual, untouched
from fl_privacy_lib.attacks.objective import Evidence, as_gradient, replay
from fl_privacy_lib.attacks.settings import Attack
from fl_privacy_lib.attacks.starts import start
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.noise import keyed_generator
from fl_privacy_lib.federated.participation import Observation
from fl_privacy_lib.models import call

OWN_IMAGES = 16  # whose features and probabilities an attacker looks at, to count labels
OWN_KINDS = ("patterned", "patterned_4x4", "patterned_8x8", "uniform", "zeros", "ones")
OWN_LIGHT = (
    1.0,
    0.3,
)  # every kind bright and dim: what is usual must not depend on one kind of image
Seen = Sequence[Sequence[Observation]]  # [victims][R]


def check_observations(seen: Seen, model: nn.Module, batch_size: int) -> None:
    """Raise `InputError` for observations that can not be attacked in one call."""
    if not seen or not all(seen):
        raise InputError("no observation was given: there is nothing to reconstruct.")
    if len({len(row) for row in seen}) > 1:
        raise InputError("victims of one call must be observed equally often; split the call.")
    first, every = seen[0][0], [o for row in seen for o in row]
    stage = first.tap.stage
    if any(o.tap.stage != stage or o.defense != first.defense for o in every):
        raise InputError(
            "observations of one call must come from one kind of tap under one defence; split the call."
        )
    for column in zip(*seen, strict=True):
        if len({(o.tap.round, o.local_lr, o.local_iterations) for o in column}) > 1:
            raise InputError(
                "observations of one call must share round, learning rate and iterations; split the call."
            )
    if stage == "aggregate":
        raise InputError(
            "an aggregate mixes clients; a reconstruction reads example, batch, update or received."
        )
    if stage == "example" and batch_size != 1:
        raise InputError(
            f"batch_size = {batch_size} at the tap 'example', which holds one example's gradient: use 1."
        )
    leading = 1 if stage == "example" else 0
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for o in every:
        found = {name: tuple(v.shape[leading:]) for name, v in o.values.items()}
        for name in expected | found:
            if found.get(name) != expected.get(name):
                raise InputError(
                    f"the observed gradient of {name} has shape {found.get(name)}, the model's parameter "
                    f"{expected.get(name)}: give the model that the gradient was taken from."
                )


def classes_of(model: nn.Module, observation: Observation, shape: tuple[int, ...]) -> int:
    """Return the number of classes, by showing the model a black image of this shape."""
    anyone = next(iter(observation.weights.values()))
    try:
        with torch.no_grad():
            logits = call(model, observation.weights, anyone.new_zeros(1, *shape))
    except RuntimeError as error:
        raise InputError(
            f"the model takes no image of shape {shape}: give the shape of its images."
        ) from error
    return int(logits.shape[-1])


def stacked(observations: Sequence[Observation]) -> Gradient:
    """Return what was seen, as gradients [V, …]."""
    gradients = [as_gradient(o) for o in observations]
    return {name: torch.stack([g[name] for g in gradients]) for name in gradients[0]}


def labels_of(
    seen: Seen,
    model: nn.Module,
    shape: tuple[int, ...],
    batch_size: int,
    attack: Attack,
    labels: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return labels [V, B] by the attack's rule, −1 where none can be known; None: optimised with the images."""
    classes, rule = classes_of(model, seen[0][0], shape), attack.label_rule
    if labels is not None:
        if tuple(labels.shape) != (len(seen), batch_size):
            raise InputError(
                f"labels have shape {tuple(labels.shape)}, not ({len(seen)}, {batch_size}): one row a victim, one "
                "label an image."
            )
        if bool(((labels < UNKNOWN) | (labels >= classes)).any()):
            raise InputError(
                f"labels must lie between 0 and {classes - 1}, or be {UNKNOWN} where one is not known."
            )
        return labels
    if rule == "given":
        raise InputError(
            "label_rule = 'given' needs the labels: give labels, or use 'inferred' or 'joint'."
        )
    if rule == "joint":
        return None
    columns = [stacked(column) for column in zip(*seen, strict=True)]
    # of several observations the mean: noise averages out, the sign of a row does not
    mean = {name: torch.stack([c[name] for c in columns]).mean(0) for name in columns[0]}
    found = infer_labels(mean, batch_size)
    if rule == "counted":
        generator = keyed_generator(found.device, attack.seed, "own")
        own = start("uniform", OWN_IMAGES, shape, generator)
        for row in torch.nonzero((found != UNKNOWN).all(1))[:, 0].tolist():
            gradient = {name: g[row : row + 1] for name, g in mean.items()}
            counts = label_counts(model, seen[row][0].weights, gradient, own, batch_size)[0]
            found[row] = torch.arange(classes, device=found.device).repeat_interleave(counts)
    return found


def plausible_rows(evidence: Sequence[Evidence], labels: torch.Tensor | None) -> torch.Tensor:
    """Return which victims [V] left anything to attack: finite gradients, not all zero, and labels."""
    every = [t[..., None].flatten(1) for e in evidence for t in e.targets.values()]
    good = torch.stack([torch.isfinite(t).all(1) for t in every]).all(0)
    for e in evidence:  # a relative distance divides by each observation's own norm
        kept = [t if e.trusted is None else t * e.trusted[name] for name, t in e.targets.items()]
        good &= torch.stack([(t != 0)[..., None].flatten(1).any(1) for t in kept]).any(0)
    return good if labels is None else good & (labels != UNKNOWN).all(1)


def gather(
    model: nn.Module,
    observations: Sequence[Observation],
    labels: torch.Tensor | None,
    batch_size: int,
    shape: tuple[int, ...],
    attack: Attack,
    trusted: Gradient | None,
) -> Evidence:
    """Return one observation of every victim, and which of its coordinates the attacker trusts.

    Parameters
    ----------
    trusted : tensors […] or [V, …] of bool by name, coordinates that the caller allows; None for
        all
    """
    first, targets = observations[0].weights, stacked(observations)
    shared = all(
        w is first[n] or torch.equal(w, first[n])
        for o in observations
        for n, w in o.weights.items()
    )
    weights = (
        first
        if shared
        else {name: torch.stack([o.weights[name] for o in observations]) for name in first}
    )
    found = Evidence(weights, shared, targets, replay(observations[0], attack.clip_aware))
    usual = (
        _usual(model, found, labels, batch_size, shape, attack.seed)
        if attack.mask == "outliers"
        else None
    )
    told = untouched(targets, attack.mask, usual)
    if trusted is not None:
        allowed = {
            name: trusted[name].expand_as(t)
            if name in trusted
            else torch.ones_like(t, dtype=torch.bool)
            for name, t in targets.items()
        }
        told = allowed if told is None else {name: told[name] & allowed[name] for name in told}
    return Evidence(weights, shared, targets, found.view, told)


def _usual(
    model: nn.Module,
    evidence: Evidence,
    labels: torch.Tensor | None,
    batch_size: int,
    shape: tuple[int, ...],
    seed: int,
) -> Usual:
    """Return what gradients of images of the attacker's own look like, at the victims' weights and labels."""
    if labels is None:
        raise InputError(
            "mask = 'outliers' needs labels for images of its own: use label_rule = 'inferred'."
        )
    generator = keyed_generator(labels.device, seed, "usual")
    found = []
    for kind in OWN_KINDS:
        for light in OWN_LIGHT:
            images = light * start(kind, labels.numel(), shape, generator).view(
                len(labels), batch_size, *shape
            )
            with torch.no_grad():
                found.append(evidence.seen(model, images, labels.clamp_min(0)))
    every = {
        name: torch.stack([g[name] for g in found]) for name in evidence.targets
    }  # [kinds, V, …]
    return Usual(
        {n: g.mean(0) for n, g in every.items()},
        {n: g.var(0, correction=0) for n, g in every.items()},
    )
