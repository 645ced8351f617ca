"""What the mechanisms do by themselves: estimators, spectra and repairs, without an attack."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fl_privacy_lib.chapters.compensation.leaks import Leak
from fl_privacy_lib.defenses.compensation import Compensation, law_distance, spectrum
from fl_privacy_lib.defenses.representation import last_dense
from fl_privacy_lib.defenses.risk import layer_risks
from fl_privacy_lib.defenses.route import ClientContext
from fl_privacy_lib.defenses.slices import SlicePerturbation, Slices, flat
from fl_privacy_lib.federated.gradients import example_gradients
from fl_privacy_lib.models import parameters_of
from fl_privacy_lib.reproduction.experiment import Result
from fl_privacy_lib.reproduction.loading import load_cached
from fl_privacy_lib.reproduction.records import Values, numbers

CLIENTS, PROBES, RISKS = 10, 256, 2  # participants; probes of an estimate, and its images
WEIGHTS = torch.full((CLIENTS,), 1 / CLIENTS, dtype=torch.float64)  # in the aggregate


@dataclass(frozen=True)
class Study:
    """One study of a mechanism.

    Parameters
    ----------
    study : {'hutchinson', 'all_ones', 'law', 'low_rank', 'common_row', 'aggregate'}
        'hutchinson' and 'all_ones': estimates of LeNet's risk beside the exact one. 'law': the
        spectrum of noise beside the law. 'low_rank' and 'common_row': a signal of rank one plus
        noise, repaired; all rows of the latter are equal. 'aggregate': the mean of ten clients'
        gradients of LeNet.
    dataset : of the risks and the aggregate; 'synthetic' for the others
    noise : 'all' coordinates of one update, or 'sliced': a share of ten slices of each of ten
    factor : what the variance that is told is off by
    columns : w of a matrix that is no aggregate
    draws : repetitions
    """

    study: str
    dataset: str = "synthetic"
    noise: str = "all"
    variance: str = "mean"
    factor: float = 1.0
    centred: bool = False
    keep: str = "outside"
    fold: str = "padded"
    ratio: float = 6.0
    share: float = 0.2
    noise_std: float = 0.1
    columns: int = 400
    draws: int = 100
    seed: int = 0

    @property
    def stage(self) -> Compensation:
        """The server's stage, told a variance that is off by the factor."""
        share = self.share if self.noise == "sliced" else 1.0
        std = self.noise_std * self.factor**0.5
        return Compensation(
            std, share, self.ratio, self.variance, self.centred, self.keep, self.fold
        )

    def noise_on(self, size: int, dice: torch.Generator) -> torch.Tensor:
        """Return the noise on the aggregate, [size]."""
        if self.noise == "all":
            std = self.noise_std * float(WEIGHTS.square().sum()) ** 0.5
            return std * torch.randn(size, generator=dice, dtype=torch.float64)
        cut = Slices(tuple(np.linspace(0, size, 11).astype(int).tolist()))
        stage = SlicePerturbation(cut, self.share, self.noise_std)
        ctx = ClientContext(0, range(CLIENTS), [dice] * CLIENTS, WEIGHTS)
        stage.begin(ctx)
        sent = stage({"w": torch.zeros(CLIENTS, size, dtype=torch.float64)}, ctx)["w"]
        return WEIGHTS @ sent


def risk_errors(study: Study, device: torch.device) -> Result:
    """Compare estimates of LeNet's risks with the exact ones, on two images.

    Returns
    -------
    relative_error : the largest over tensors, of the mean of all draws
    last_share, exact_share : of the last dense layer's weights in the risk of all tensors
    """
    data = load_cached(study.dataset)
    model = Leak(study.dataset, "dga", "non_private").network(data, study.seed).to(device)
    x, y = (torch.as_tensor(part[:RISKS]).to(device) for part in (data.train_x, data.train_y))
    args = (model, parameters_of(model), x, y)
    exact = layer_risks(*args, estimator="exact")
    settings: dict[str, Any] = {"estimator": study.study, "probes": PROBES}
    drawn = [layer_risks(*args, **settings, generator=torch.Generator(device).manual_seed(seed))
             for seed in range(study.draws)]  # fmt: skip
    means = {name: float(np.mean([one[name] for one in drawn])) for name in exact}
    last, _ = last_dense(model)
    return {
        "relative_error": np.array([max(abs(means[n] / e - 1) for n, e in exact.items())]),
        "last_share": np.array([means[last] / sum(means.values())]),
        "exact_share": np.array([exact[last] / sum(exact.values())]),
    }


def law_errors(study: Study) -> Result:
    """Return the distance of the noise's spectrum from the law of the variance that is told."""
    rows, found = round(study.ratio * study.columns), []
    for draw in range(study.draws):
        dice = torch.Generator().manual_seed(study.seed + draw)
        noise = study.noise_on(rows * study.columns, dice).reshape(rows, study.columns)
        told = study.stage.noise_variance(WEIGHTS)
        found.append(law_distance(spectrum(noise)[0].numpy(), told, rows / study.columns))
    return {"law_distance": np.array(found)}


def rank_one(study: Study, draw: int) -> torch.Tensor:
    """Return a signal of rank one, twice as strong as the noise, [d]; its rows may be equal."""
    dice = torch.Generator().manual_seed(10_000 + draw)
    left = torch.randn(round(study.ratio * study.columns), 1, generator=dice, dtype=torch.float64)
    right = torch.randn(1, study.columns, generator=dice, dtype=torch.float64)
    left = left if study.study == "low_rank" else torch.ones_like(left)
    return (2 * study.noise_std / CLIENTS**0.5 * left @ right).flatten()


def aggregate_of(study: Study, draw: int) -> torch.Tensor:
    """Return the mean gradient of ten clients, each with ten images of two classes, [d]."""
    data = load_cached(study.dataset)
    model = Leak(study.dataset, "dga", "non_private").network(data, study.seed)
    rng = np.random.default_rng([study.seed, draw])
    pairs = [rng.choice(data.n_classes, 2, replace=False) for _ in range(CLIENTS)]
    held = [rng.choice(np.flatnonzero(np.isin(data.train_y, pair)), 10) for pair in pairs]
    x, y = (torch.as_tensor(part[np.stack(held)]) for part in (data.train_x, data.train_y))
    weights = {n: w.expand(CLIENTS, *w.shape) for n, w in parameters_of(model).items()}
    means = {n: g.mean(1) for n, g in example_gradients(model, weights, x, y).items()}
    return WEIGHTS @ flat(means).double()


def repair_errors(study: Study) -> Result:
    """Repair a noisy signal in every draw; see `Compensation.errors`."""
    found = []
    for draw in range(study.draws):
        signal = (aggregate_of if study.study == "aggregate" else rank_one)(study, draw)
        noise = study.noise_on(len(signal), torch.Generator().manual_seed(study.seed + draw))
        found.append(study.stage.errors(signal, noise, WEIGHTS))
    return {name: np.array([float(one[name]) for one in found]) for name in found[0]}


def run_study(study: Study, device: torch.device) -> Result:
    """Return the metrics of a study."""
    if study.study in ("hutchinson", "all_ones"):
        return risk_errors(study, device)
    return law_errors(study) if study.study == "law" else repair_errors(study)


def all_values(results: list[Result]) -> Values:
    """Return mean, standard deviation and number of every metric of a point."""
    return {n: numbers(v) for n, v in results[0].items() if n != "seconds"}
