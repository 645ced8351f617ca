"""What the mechanisms do by themselves: estimators, spectra and repairs, without an attack."""

from dataclasses import dataclass

import numpy as np
import torch

from fl_privacy_lib.chapters.compensation.leaks import Leak
from fl_privacy_lib.defenses.compensation import Compensation, rank_one
from fl_privacy_lib.defenses.risk import estimate_errors
from fl_privacy_lib.defenses.slices import flat, sliced_noise
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
        if self.noise == "sliced":
            return sliced_noise(size, self.share, self.noise_std, WEIGHTS, dice)
        noise = torch.randn(size, generator=dice, dtype=torch.float64)
        return self.noise_std * float(WEIGHTS.square().sum()) ** 0.5 * noise


def risk_errors(study: Study, device: torch.device) -> dict[str, float]:
    """Compare estimates of LeNet's risks with the exact ones on two images: `estimate_errors`."""
    data = load_cached(study.dataset)
    model = Leak(study.dataset, "dga", "non_private").network(data, study.seed).to(device)
    x, y = (torch.as_tensor(part[:RISKS]).to(device) for part in (data.train_x, data.train_y))
    return estimate_errors(model, x, y, study.study, PROBES, study.draws)


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


def drawn(study: Study, draw: int) -> dict[str, float]:
    """Return one draw's distance from the law, or what its repair leaves: `Compensation.errors`."""
    dice, of_signal = (torch.Generator().manual_seed(seed)
                       for seed in (study.seed + draw, 10_000 + draw))  # fmt: skip
    rows = round(study.ratio * study.columns)
    if study.study == "law":
        noise = study.noise_on(rows * study.columns, dice).reshape(rows, study.columns)
        return {"law_distance": study.stage.distance(noise, WEIGHTS)}
    size = 2 * study.noise_std / CLIENTS**0.5  # twice as strong as the noise
    simple = size * rank_one(rows, study.columns, of_signal, study.study == "common_row")
    signal = aggregate_of(study, draw) if study.study == "aggregate" else simple
    return study.stage.errors(signal, study.noise_on(len(signal), dice), WEIGHTS)


def run_study(study: Study, device: torch.device) -> Result:
    """Return the metrics of a study."""
    found = (
        [risk_errors(study, device)]
        if study.study in ("hutchinson", "all_ones")
        else [drawn(study, i) for i in range(study.draws)]
    )
    return {name: np.array([float(one[name]) for one in found]) for name in found[0]}


def all_values(results: list[Result]) -> Values:
    """Return mean, standard deviation and number of every metric of a point."""
    return {n: numbers(v) for n, v in results[0].items() if n != "seconds"}
