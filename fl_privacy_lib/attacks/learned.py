"""The learned attacker: a network, trained on public images, reads images off defended gradients.

It reads the tap ``example`` or ``update`` of clients with batches of one image, in round 0. It
searches for nothing. It passes gradients of public images through the very rule that the client
uses, noise and all, and fits a network from what comes out to the image. So the noise is part of
what it learns from.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from fl_privacy_lib._checks import in_range, one_of, refuse, whole_number
from fl_privacy_lib.attacks.evidence import stacked
from fl_privacy_lib.defenses import ClientContext, Defense, Gradient, keyed_generator, layer_norms
from fl_privacy_lib.defenses.slices import flat
from fl_privacy_lib.federated import Observation, example_gradients

CHUNK = 256  # public images whose gradients are held at once: 17 MB for the attacked LeNet
LEAST = 20  # public images, below which there is nothing to fit and to hold out
HELD_OUT = 0.1  # share of the public images that is not fitted but chooses the epoch
FLOOR = 0.01  # a direction of less than this part of the mean variance is not blown up to 1


@dataclass(frozen=True)
class LearnedAttack:
    """The settings of a learned attacker.

    Parameters
    ----------
    public_images : int, ≥ 20; of those handed over, the first so many are used
    projection : int, features that a gradient is reduced to
    views : int, fresh draws of the defence's noise for each public image; epochs take turns with
        them
    hidden : int, width of the hidden layer
    epochs : int, of Adam with 64 images a step; its rate falls from 0.001 to 0 along a cosine
    seed : int
    """

    public_images: int = 4000
    projection: int = 512
    views: int = 8
    hidden: int = 1000
    epochs: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number(LEAST, public_images=self.public_images)
        whole_number(0, seed=self.seed)
        whole_number(1, projection=self.projection, views=self.views, hidden=self.hidden,
                     epochs=self.epochs)  # fmt: skip


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
    """The client's own route up to a tap, walked with public images.

    Parameters
    ----------
    observation : made at that tap
    """

    model: nn.Module
    observation: Observation
    generator: torch.Generator  # of every draw of the training, the defence's included

    def gradients(self, x: torch.Tensor, y: torch.Tensor) -> Iterator[Gradient]:
        """Yield gradients [n, …] of the images, chunk by chunk."""
        weights = {name: w[None] for name, w in self.observation.weights.items()}
        for images, labels in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
            gradients = example_gradients(self.model, weights, images[None], labels[None])
            yield {name: g[0] for name, g in gradients.items()}

    def seen(self, gradients: Gradient, defense: Defense) -> torch.Tensor:
        """Return what stands at the tap, as gradients [n, d], for gradients [n, …].

        Every image is a client, of one local iteration.
        """
        values = {name: g[:, None] for name, g in gradients.items()}
        clients = len(next(iter(values.values())))
        ctx = ClientContext(
            0,
            range(clients),
            (self.generator,) * clients,
            torch.full((clients,), 1 / clients),
            defense.initial_state() if defense.initial_state else {},
            batch_size=1,
            model=self.model,
            norms=layer_norms(values, leading=2),
        )
        if defense.begin_client:
            defense.begin_client(ctx)
        stage, step = self.observation.tap.stage, -self.observation.local_lr
        values = defense.reach(stage, values, ctx, step)
        return flat({n: v[:, 0] if stage == "example" else v / step for n, v in values.items()})


@dataclass(frozen=True, eq=False)
class LearnedInverter:
    """A trained attacker: observations in, images out.

    Attributes
    ----------
    observation : one of those that it was trained for; others are refused
    projection, centre : [d, p], [p], from a gradient to features
    network : from features to images
    held_out_mse : [epochs + 1], on public images that were not fitted; first that of the mean image
    """

    observation: Observation
    projection: torch.Tensor
    centre: torch.Tensor
    network: nn.Module
    held_out_mse: tuple[float, ...]

    def __call__(self, observations: Sequence[Observation]) -> torch.Tensor:
        """Return images [V, 1, C, H, W] in [0, 1]: the first example of each observation.

        A gradient that holds no numbers is read as the average gradient.

        Raises
        ------
        InputError
            Unless each was read at the tap of the training in round 0, after one local iteration
            with a batch of one image, at the weights and under the defence of the training.
        """
        refuse({"there are no observations: give at least one.": not observations})
        for observation in observations:
            self._check(observation)
        features = flat(stacked(observations)) @ self.projection - self.centre  # [V, p]
        sound = torch.isfinite(features).all(1, keepdim=True)
        with torch.no_grad():
            return self.network(torch.where(sound, features, 0.0))[:, None]

    def _check(self, observation: Observation) -> None:
        trained, (stage, weights) = self.observation, (observation.tap.stage, observation.weights)
        plan, steps = ((observation.batch_size, observation.tap.round),
                       (observation.local_lr, observation.local_iterations))  # fmt: skip
        same_weights = weights.keys() == trained.weights.keys() and all(
            torch.equal(w, weights[name]) for name, w in trained.weights.items()
        )
        refuse(
            {
                f"the learned attacker reads the tap {trained.tap.stage!r}, but an observation is "
                f"of {stage!r}.": stage != trained.tap.stage,
                "an observation was made at other weights than the training's: train at its "
                "weights.": not same_weights,
                f"an observation's defence is not the training's, {trained.defense}: train under "
                "its own.": observation.defense != trained.defense,
                f"an observation has (batch size, round) = {plan}: the learned attacker reads only "
                "(1, 0).": plan != (1, 0),
                f"an update has (η, L) = {steps}: the learned attacker reads only "
                f"({trained.local_lr}, 1).": stage == "update" and steps != (trained.local_lr, 1),
            }
        )


def train(
    model: nn.Module,
    observation: Observation,
    defense: Defense,
    public_images: torch.Tensor,
    public_labels: torch.Tensor,
    settings: LearnedAttack = LearnedAttack(),
) -> LearnedInverter:
    """Train the attacker for one tap, one set of weights and one defence.

    It knows the weights, `Defense.public` and public images of the victims' distribution. It never
    sees a victim's image or label, nor the generators that a victim's noise is drawn from.

    Parameters
    ----------
    observation : one of those that it will read; of it, only what is public counts: the tap, the
        weights and the rate
    defense : the clients' own
    public_images : [n, C, H, W] in [0, 1], none of them a victim
    public_labels : [n]

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
    one_of(("example", "update"), tap=observation.tap.stage)
    x, y = _usable(public_images, public_labels, settings.public_images)
    generator = keyed_generator(x.device, "learned attacker", settings.seed)
    order = torch.randperm(len(x), generator=generator, device=x.device)
    x, y = x[order], y[order]
    fitted = len(x) - int(HELD_OUT * len(x))
    route = _Route(model, observation, generator)
    basis = _basis(route, defense, x[:fitted], y[:fitted], settings.projection)  # [d, p]
    views = _views(route, defense, x, y, basis, settings.views)  # [views, n, p]
    axes, centre = _whitening(views[:, :fitted].flatten(0, 1), FLOOR)
    network, errors = _fit(views @ axes - centre, x, fitted, settings, generator)
    trained = replace(observation, values={}, defense=defense.public())
    return LearnedInverter(trained, basis @ axes, centre, network, errors)


def _usable(x: torch.Tensor, y: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the public images and labels that are used."""
    refuse(
        {
            f"public images {list(x.shape)} and labels {list(y.shape)} must be [n, C, H, W] and "
            "[n].": x.dim() != 4 or y.shape != x.shape[:1],
            f"{len(x)} public images are too few to learn from: give at least {LEAST}.": (
                len(x) < LEAST
            ),
        }
    )
    in_range(0, 1, **{"the least public pixel": float(x.min()),
                      "the greatest public pixel": float(x.max())})  # fmt: skip
    return x[:most], y[:most]


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
    variances, axes = torch.linalg.eigh(torch.atleast_2d(torch.cov(features.T, correction=0)))
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
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, settings.epochs)

    def held_out() -> float:
        with torch.no_grad():
            errors = [F.mse_loss(network(view), x[fitted:]) for view in views[:, fitted:]]
        return float(sum(errors) / len(views))

    errors, best = [held_out()], copy.deepcopy(network.state_dict())
    for epoch in range(settings.epochs):
        features = views[epoch % len(views)]
        order = torch.randperm(fitted, generator=generator, device=x.device)
        for rows in order.split(64):
            optimiser.zero_grad()
            F.mse_loss(network(features[rows]), x[rows]).backward()
            optimiser.step()
        schedule.step()
        errors.append(held_out())
        if errors[-1] < min(errors[:-1]):
            best = copy.deepcopy(network.state_dict())
    network.load_state_dict(best)
    return network, tuple(errors)
