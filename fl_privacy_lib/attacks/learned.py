"""The learned attacker: a network, trained on public images, reads images off defended gradients.

It searches for nothing. It passes gradients of public images through the very rule that the client
uses, noise and all, and fits a network from what comes out to the image. So the noise is part of
what it learns from.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from fl_privacy_lib._checks import in_range, positive, refuse, whole_number
from fl_privacy_lib.attacks.inverter import LearnedInverter
from fl_privacy_lib.defenses import ClientContext, Defense, Gradient, keyed_generator, layer_norms
from fl_privacy_lib.defenses.slices import flat
from fl_privacy_lib.federated.gradients import example_gradients
from fl_privacy_lib.models import Parameters

CHUNK = 256  # public images whose gradients are held at once: 17 MB for the attacked LeNet
LEAST = 20  # public images, below which there is nothing to fit and to hold out


@dataclass(frozen=True)
class LearnedAttack:
    """The settings of a learned attacker.

    Parameters
    ----------
    public_images : int, ≥ 20; of those handed over, the first so many are used
    held_out : float in (0, 1), share of them that is not fitted but chooses the epoch
    projection : int, features that a gradient is reduced to
    views : int, fresh draws of the defence's noise for each public image; epochs take turns with
        them
    hidden : int, width of the hidden layer
    epochs, batch : int
    learning_rate : float, > 0, of Adam at the start; it falls to 0 along a cosine
    floor : float, > 0; a direction whose variance is below this part of the average is not blown up
        to 1
    seed : int
    """

    public_images: int = 4000
    held_out: float = 0.1
    projection: int = 512
    views: int = 8
    hidden: int = 1000
    epochs: int = 20
    batch: int = 64
    learning_rate: float = 1e-3
    floor: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        positive(learning_rate=self.learning_rate, floor=self.floor)
        in_range(1e-9, 1 - 1e-9, held_out=self.held_out)
        whole_number(LEAST, public_images=self.public_images)
        whole_number(0, seed=self.seed)
        counts = ("projection", "views", "hidden", "epochs", "batch")
        whole_number(1, **{name: getattr(self, name) for name in counts})


def _network(
    features: int, hidden: int, mean: torch.Tensor, generator: torch.Generator
) -> nn.Sequential:
    """Return the untrained network, features [n, p] → images [n, C, H, W]: the mean image."""
    # skip_init, since a layer's own initialisation would draw from the global generator
    inner, outer = (
        nn.utils.skip_init(nn.Linear, *size, device=mean.device, dtype=mean.dtype)
        for size in ((features, hidden), (hidden, mean.numel()))
    )
    nn.init.uniform_(inner.weight, -(features**-0.5), features**-0.5, generator=generator)
    for parameter in (inner.bias, outer.weight, outer.bias):
        nn.init.zeros_(parameter)
    with torch.no_grad():
        outer.bias.copy_(mean.flatten().clamp(0.01, 0.99).logit())
    return nn.Sequential(inner, nn.ReLU(), outer, nn.Sigmoid(), nn.Unflatten(1, mean.shape))


@dataclass(frozen=True)
class _Route:
    """The client's own route up to the tap ``example``, walked with public images."""

    model: nn.Module
    weights: Parameters
    batch_size: int
    round: int
    generator: torch.Generator  # of every draw of the training, the defence's included

    def gradients(self, x: torch.Tensor, y: torch.Tensor) -> Iterator[Gradient]:
        """Yield gradients [n, …] of the images, chunk by chunk, in whole batches."""
        size = max(1, CHUNK // self.batch_size) * self.batch_size
        weights = {name: w[None] for name, w in self.weights.items()}
        for images, labels in zip(x.split(size), y.split(size), strict=True):
            gradients = example_gradients(self.model, weights, images[None], labels[None])
            yield {name: g[0] for name, g in gradients.items()}

    def seen(self, gradients: Gradient, defense: Defense) -> torch.Tensor:
        """Return what stands at the tap, [n, d], for gradients [n, …]; every batch is a client."""
        clients = len(next(iter(gradients.values()))) // self.batch_size
        values = {name: g.unflatten(0, (clients, self.batch_size)) for name, g in gradients.items()}
        ctx = ClientContext(
            self.round,
            range(clients),
            (self.generator,) * clients,
            torch.full((clients,), 1 / clients),
            defense.initial_state() if defense.initial_state else {},
            batch_size=self.batch_size,
            model=self.model,
            norms=layer_norms(values, leading=2),
        )
        if defense.begin_client:
            defense.begin_client(ctx)
        values = defense.reach("example", values, ctx, 1.0)
        return flat({name: g.flatten(0, 1) for name, g in values.items()})


def train(
    model: nn.Module,
    weights: Parameters,
    defense: Defense,
    public_images: torch.Tensor,
    public_labels: torch.Tensor,
    settings: LearnedAttack = LearnedAttack(),
    batch_size: int = 1,
    round: int = 0,
) -> LearnedInverter:
    """Train the attacker for one set of weights and one defence.

    It knows the weights, `Defense.public`, the plan's batch size and public images of the victims'
    distribution. It never sees a victim's image or label, nor the generators that a victim's noise
    is drawn from.

    Parameters
    ----------
    weights : the model's parameters, without a client axis
    public_images : [n, C, H, W] in [0, 1], none of them a victim
    public_labels : [n]
    batch_size, round : of the observations; noise and bound may depend on them

    Notes
    -----
    The projection is random within the span of the public gradients: p random mixtures of them,
    without the defence's noise, made orthonormal. One that is random in all d coordinates would
    keep only the share p/d of the signal's energy, with as much noise in every feature: a weaker
    attacker wherever there is noise. Features are turned to their principal axes and scaled, since
    Adam crawls on correlated ones. The epoch that does best on held-out public images is kept, and
    epoch 0 is the mean image: so pure noise gives about the mean image. Source: Wu et al., Learning
    to Invert (UAI 2023), who hash the coordinates into fewer instead.
    """
    x, y = _usable(public_images, public_labels, settings.public_images, batch_size)
    generator = keyed_generator(x.device, "learned attacker", settings.seed)
    order = torch.randperm(len(x), generator=generator, device=x.device)
    x, y = x[order], y[order]
    fitted = len(x) - max(1, int(settings.held_out * len(x) / batch_size)) * batch_size
    route = _Route(model, weights, batch_size, round, generator)
    basis = _basis(route, defense, x[:fitted], y[:fitted], settings.projection)  # [d, p]
    views = _views(route, defense, x, y, basis, settings.views)  # [views, n, p]
    axes, centre = _whitening(views[:, :fitted].flatten(0, 1), settings.floor)
    network, errors = _fit(views @ axes - centre, x, fitted, settings, generator)
    return LearnedInverter(
        {name: w.detach().clone() for name, w in weights.items()},
        defense.public(),
        batch_size,
        round,
        basis @ axes,
        centre,
        network,
        len(x),
        len(views),
        errors,
    )


def _usable(
    x: torch.Tensor, y: torch.Tensor, most: int, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the public images and labels that are used, a whole number of batches."""
    positive(batch_size=batch_size)
    count = min(len(x), most) // batch_size * batch_size
    least = max(LEAST, 2 * batch_size)  # a batch to fit and a batch to hold out
    refuse(
        {
            f"public images {list(x.shape)} and labels {list(y.shape)} must be [n, C, H, W] and "
            "[n].": x.dim() != 4 or y.shape != x.shape[:1],
            f"{min(len(x), most)} public images are too few to learn from: give at least "
            f"{least}.": count < least,
        }
    )
    pixels = {"the least public pixel": x.min(), "the greatest public pixel": x.max()}
    in_range(0, 1, **{name: float(value) for name, value in pixels.items()})
    return x[:count], y[:count]


def _basis(
    route: _Route, defense: Defense, x: torch.Tensor, y: torch.Tensor, size: int
) -> torch.Tensor:
    """Return p orthonormal columns [d, p]: random mixtures of the outputs without their noise."""
    mixed: torch.Tensor | float = 0.0
    for gradients in route.gradients(x, y):
        rows = route.seen(gradients, defense.noiseless())  # [n, d]
        mixtures = len(rows), min(size, len(x), rows.shape[1])
        shares = torch.randn(mixtures, generator=route.generator, device=x.device)
        mixed = mixed + rows.T @ shares.to(rows)
    return torch.linalg.qr(mixed)[0]


def _views(
    route: _Route,
    defense: Defense,
    x: torch.Tensor,
    y: torch.Tensor,
    basis: torch.Tensor,
    views: int,
) -> torch.Tensor:
    """Return features [views, n, p], each view with its own noise; one if nothing is drawn."""
    chunks: list[torch.Tensor] = []
    for gradients in route.gradients(x, y):
        seen = [route.seen(gradients, defense) @ basis for _ in range(views)]
        if not chunks and all(torch.equal(view, seen[0]) for view in seen):
            views, seen = 1, seen[:1]
        chunks.append(torch.stack(seen))
    return torch.cat(chunks, 1)


def _whitening(features: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return axes [p, p] and centre [p].

    ``features @ axes - centre`` has mean 0 and is uncorrelated, of variance at most 1.
    """
    variances, axes = torch.linalg.eigh(torch.cov(features.T, correction=0))
    axes = axes / (variances.clamp_min(0) + floor * variances.mean() + 1e-12).sqrt()
    return axes, features.mean(0) @ axes


def _fit(
    views: torch.Tensor,
    x: torch.Tensor,
    fitted: int,
    settings: LearnedAttack,
    generator: torch.Generator,
) -> tuple[nn.Module, tuple[float, ...]]:
    """Return the network of the best epoch, and the held-out error before and after every epoch."""
    network = _network(views.shape[-1], settings.hidden, x[:fitted].mean(0), generator)
    optimiser = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, settings.epochs)

    def held_out() -> float:
        with torch.no_grad():
            errors = [F.mse_loss(network(view), x[fitted:]) for view in views[:, fitted:]]
        return float(sum(errors) / len(views))

    errors, best = [held_out()], copy.deepcopy(network.state_dict())
    for epoch in range(settings.epochs):
        features = views[epoch % len(views)]
        order = torch.randperm(fitted, generator=generator, device=x.device)
        for rows in order.split(settings.batch):
            optimiser.zero_grad()
            F.mse_loss(network(features[rows]), x[rows]).backward()
            optimiser.step()
        schedule.step()
        errors.append(held_out())
        if errors[-1] < min(errors[:-1]):
            best = copy.deepcopy(network.state_dict())
    network.load_state_dict(best)
    return network, tuple(errors)
