"""The learned attacker: a network that was taught, on public images, to read an image off a defended gradient.

It searches for nothing. It passes gradients of public images through the very rule that the client
uses, noise and all, and fits a network from what comes out to the image. So the noise is part of
what it learns from.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fl_privacy_lib._checks import InputError, in_range, positive, whole_number
from fl_privacy_lib.attacks.objective import as_gradient
from fl_privacy_lib.defenses.clipping import Gradient, layer_norms
from fl_privacy_lib.defenses.noise import keyed_generator
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.defenses.stage import ClientContext
from fl_privacy_lib.federated.gradients import example_gradients
from fl_privacy_lib.federated.participation import Observation
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
        counts = {
            "public_images": LEAST,
            "projection": 1,
            "views": 1,
            "hidden": 1,
            "epochs": 1,
            "batch": 1,
            "seed": 0,
        }
        for name, least in counts.items():
            whole_number(least, **{name: getattr(self, name)})


def _network(
    features: int, hidden: int, mean: torch.Tensor, generator: torch.Generator
) -> nn.Sequential:
    """Return the untrained network from features [n, p] to images [n, C, H, W] in [0, 1]: it gives the mean image."""
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


@dataclass(frozen=True, eq=False)
class LearnedInverter:
    """A trained attacker: observations in, images out.

    Attributes
    ----------
    settings : LearnedAttack
    weights, defense, batch_size, round : what it was trained for; other observations are refused
    projection, centre : [d, p], [p], from a gradient to features
    network : from features to images
    public_images, views : how many were used
    held_out_mse : [epochs + 1], on public images that were not fitted; first that of the mean image
    """

    settings: LearnedAttack
    weights: Parameters
    defense: dict[str, Any]
    batch_size: int
    round: int
    projection: torch.Tensor
    centre: torch.Tensor
    network: nn.Module
    public_images: int
    views: int
    held_out_mse: tuple[float, ...]

    def __call__(self, observations: Sequence[Observation]) -> torch.Tensor:
        """Return images [V, 1, C, H, W] in [0, 1]: the first example of each observation.

        A gradient that holds no numbers is read as the average gradient.

        Raises
        ------
        InputError
            Unless each was read at the tap ``example``, at the weights, round, batch size and
            defence of the training.
        """
        if not observations:
            raise InputError("there are no observations: give at least one, of the tap 'example'.")
        for observation in observations:
            self._check(observation)
        seen = [as_gradient(observation) for observation in observations]
        rows = _flat(
            {name: torch.stack([g[name] for g in seen]) for name in self.weights}
        )  # [V, d]
        features = rows @ self.projection - self.centre
        sound = torch.isfinite(features).all(1, keepdim=True)
        with torch.no_grad():
            return self.network(torch.where(sound, features, 0.0))[:, None]

    def _check(self, observation: Observation) -> None:
        stage, weights, own = observation.tap.stage, observation.weights, self.weights
        if stage != "example":
            raise InputError(
                f"the learned attacker reads the tap 'example', but an observation is of {stage!r}."
            )
        if weights.keys() != own.keys() or any(
            not torch.equal(w, weights[name]) for name, w in own.items()
        ):
            raise InputError(
                "an observation was made at other weights than the training's: train at its weights."
            )
        if observation.defense != self.defense:
            raise InputError(
                f"an observation's defence is not the training's, {self.defense}: train under its own."
            )
        found, known = (
            (observation.batch_size, observation.tap.round),
            (self.batch_size, self.round),
        )
        if found != known:
            raise InputError(
                f"an observation has (batch size, round) = {found}: train for these, not for {known}."
            )

    def describe(self) -> list[tuple[str, str]]:
        """Return (what the attacker knows, how much of it) for a printed table, as `Knowledge.describe` does."""
        stages = ", ".join(
            f"{stage}: {value}" for stage, value in self.defense.items() if stage != "name"
        )
        return [
            ("reads", "one observation at the tap 'example'"),
            ("weights", "of the model, at the observation"),
            ("batch size", str(self.batch_size)),
            ("labels", "not needed; those of the public images"),
            ("defence", str(self.defense["name"]) + (f" ({stages})" if stages else "")),
            (
                "replays it",
                f"yes, with noise drawn afresh: {self.views} view(s) of every public image",
            ),
            (
                "public data",
                f"{self.public_images} labelled images of the victims' distribution, no victim among them",
            ),
            ("truth", "unknown"),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{what:>15}: {value}" for what, value in self.describe())


def _flat(gradients: Gradient) -> torch.Tensor:
    """Return tensors [n, …] as rows [n, d], in their order."""
    return torch.cat([g.flatten(1) for g in gradients.values()], 1)


@dataclass(frozen=True)
class _Route:
    """The client's own route up to the tap ``example``, walked with public images."""

    model: nn.Module
    weights: Parameters
    batch_size: int
    round: int

    def gradients(self, x: torch.Tensor, y: torch.Tensor) -> Iterator[Gradient]:
        """Yield gradients [n, …] of the images, chunk by chunk, in whole batches."""
        size = max(1, CHUNK // self.batch_size) * self.batch_size
        stacked = {name: w[None] for name, w in self.weights.items()}
        for several in zip(x.split(size), y.split(size), strict=True):
            gradients = example_gradients(self.model, stacked, several[0][None], several[1][None])
            yield {name: g[0] for name, g in gradients.items()}

    def seen(
        self, gradients: Gradient, defense: Defense, generator: torch.Generator
    ) -> torch.Tensor:
        """Return what stands at the tap, [n, d], for gradients [n, …]; every batch is a client of its own."""
        clients = len(next(iter(gradients.values()))) // self.batch_size
        own = {name: g.unflatten(0, (clients, self.batch_size)) for name, g in gradients.items()}
        share = torch.full((clients,), 1 / clients)
        state = defense.initial_state() if defense.initial_state else {}
        ctx = ClientContext(self.round, range(clients), (generator,) * clients, share, state)
        ctx.batch_size, ctx.model, ctx.norms = (
            self.batch_size,
            self.model,
            layer_norms(own, leading=2),
        )
        if defense.begin_client:
            defense.begin_client(ctx)
        own = defense.reach("example", own, ctx, 1.0)
        return _flat({name: g.flatten(0, 1) for name, g in own.items()})


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
    route = _Route(model, weights, batch_size, round)
    basis = _basis(route, defense, x[:fitted], y[:fitted], settings.projection, generator)  # [d, p]
    views = _views(route, defense, x, y, basis, settings.views, generator)  # [views, n, p]
    axes, centre = _whitening(views[:, :fitted].flatten(0, 1), settings.floor)
    network, errors = _fit(views @ axes - centre, x, fitted, settings, generator)
    known = {name: w.detach().clone() for name, w in weights.items()}
    return LearnedInverter(
        settings,
        known,
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
    if x.dim() != 4 or y.shape != x.shape[:1]:
        raise InputError(
            f"public images {list(x.shape)} and labels {list(y.shape)} must be [n, C, H, W] and [n]."
        )
    count = min(len(x), most) // batch_size * batch_size
    least = max(LEAST, 2 * batch_size)  # a batch to fit and a batch to hold out
    if count < least:
        raise InputError(
            f"{min(len(x), most)} public images are too few to learn from: give at least {least}."
        )
    in_range(
        0,
        1,
        **{"the least public pixel": float(x.min()), "the greatest public pixel": float(x.max())},
    )
    return x[:count], y[:count]


def _basis(
    route: _Route,
    defense: Defense,
    x: torch.Tensor,
    y: torch.Tensor,
    size: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return p orthonormal columns [d, p]: random mixtures of the defence's outputs without their noise."""
    mixed: torch.Tensor | float = 0.0
    for gradients in route.gradients(x, y):
        rows = route.seen(gradients, defense.noiseless(), generator)  # [n, d]
        shares = torch.randn(
            len(rows), min(size, len(x), rows.shape[1]), generator=generator, device=x.device
        )
        mixed = mixed + rows.T @ shares.to(rows)
    return torch.linalg.qr(mixed)[0]


def _views(
    route: _Route,
    defense: Defense,
    x: torch.Tensor,
    y: torch.Tensor,
    basis: torch.Tensor,
    views: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return features [views, n, p], each view with noise of its own; one view if the defence draws nothing."""
    found: list[torch.Tensor] = []
    for gradients in route.gradients(x, y):
        several = torch.stack(
            [route.seen(gradients, defense, generator) @ basis for _ in range(views)]
        )
        if not found and all(torch.equal(one, several[0]) for one in several[1:]):
            views, several = 1, several[:1]
        found.append(several)
    return torch.cat(found, 1)


def _whitening(features: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return axes [p, p] and centre [p]: ``features @ axes - centre`` has mean 0, uncorrelated, variance at most 1."""
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
    """Return the network of the best epoch, and the held-out mean squared error before and after every epoch."""
    network = _network(views.shape[-1], settings.hidden, x[:fitted].mean(0), generator)
    optimiser = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, settings.epochs)

    def held_out() -> float:
        with torch.no_grad():
            return float(
                sum(F.mse_loss(network(v), x[fitted:]) for v in views[:, fitted:]) / len(views)
            )

    errors, best = [held_out()], copy.deepcopy(network.state_dict())
    for epoch in range(settings.epochs):
        features = views[epoch % len(views)]
        for rows in torch.randperm(fitted, generator=generator, device=x.device).split(
            settings.batch
        ):
            optimiser.zero_grad()
            F.mse_loss(network(features[rows]), x[rows]).backward()
            optimiser.step()
        schedule.step()
        errors.append(held_out())
        if errors[-1] < min(errors[:-1]):
            best = copy.deepcopy(network.state_dict())
    network.load_state_dict(best)
    return network, tuple(errors)
