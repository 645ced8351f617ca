"""The cost of an attack: many victims at once against one at a time, medians of process time.

Both engines take the same steps from the same starts, so a success rate stands beside each time.
Run with ``python -m tools.bench_attacks [dataset …]``.
"""

import argparse
import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fl_privacy_lib
from fl_privacy_lib.attacks import Attack, reconstruct
from fl_privacy_lib.attacks.attack import start
from fl_privacy_lib.data import load
from fl_privacy_lib.defenses import non_private
from fl_privacy_lib.defenses.noise import keyed_generator
from fl_privacy_lib.federated import Observation, Tap
from fl_privacy_lib.metrics import success
from fl_privacy_lib.models import build, parameters_of
from fl_privacy_lib.reproduction.paths import MEASURED, data_root, decoded_cache
from fl_privacy_lib.reproduction.progress import report_progress
from fl_privacy_lib.reproduction.records import write_table
from tools.rows import other_rows

DATASETS = ("mnist", "cifar10")  # 28 × 28 and 32 × 32 × 3
WANTED = {("mnist", 32): 5.0, ("mnist", 128): 6.0, ("cifar10", 32): 3.5, ("cifar10", 128): 4.2}
"""(data set, victims) → the ratio asked for."""
COUNTS = (32, 128)  # victims attacked at once
COLUMNS = [
    "dataset",
    "engine",
    "victims",
    "ms_per_victim_evaluation",
    "success_rate",
    "paired_victims",
    "version",
    "date",
]


@dataclass(frozen=True)
class Scene:
    """Victims of one image each: a network, what was observed of every image, and the images."""

    model: nn.Module
    observations: list[Observation]
    images: torch.Tensor  # [V, C, H, W]
    labels: torch.Tensor  # [V]

    @property
    def shape(self) -> tuple[int, ...]:
        """(channels, height, width)."""
        return tuple(self.images.shape[1:])


def scene(dataset: str, victims: int, seed: int = 0) -> Scene:
    """Return the undefended gradients of so many images, by one plain backward pass each."""
    data = load(dataset, Path(".") if dataset == "digits" else data_root(), decoded_cache())
    chosen = np.random.default_rng(seed).choice(len(data.train_y), victims, replace=False)
    # in the default precision, like the model and the starts: a test asks for double
    images = torch.as_tensor(data.train_x[chosen]).to(torch.get_default_dtype())
    labels = torch.as_tensor(data.train_y[chosen])
    generator = torch.Generator().manual_seed(seed)
    model = build("attacked_lenet", data.example_shape, data.n_classes, generator)
    weights, public, seen = parameters_of(model), non_private().public(), []
    for client, (image, label) in enumerate(zip(images, labels, strict=True)):
        gradients = torch.autograd.grad(
            cross_entropy(model(image[None]), label[None]), list(model.parameters())
        )
        values = {name: g[None] for name, g in zip(weights, gradients, strict=True)}
        seen.append(Observation(Tap("example", client), values, weights, 0.1, 1, 1, public))
    return Scene(model, seen, images, labels)


def one_at_a_time(view: Scene, victims: int, attack: Attack) -> tuple[torch.Tensor, int]:
    """Attack the first victims the plain way: torch.optim.LBFGS, double backward, a loop.

    Parameters
    ----------
    view : the victims and what was observed of them
    victims : how many are attacked
    attack : the start, steps and limits; the objective is the squared distance

    Returns
    -------
    each victim's iterate with the least objective [V, C, H, W], and the evaluations of all of them
    """
    parameters, best_images, evaluations = list(view.model.parameters()), [], 0
    for row in range(victims):
        target = [v[0] for v in view.observations[row].values.values()]
        label = view.labels[row : row + 1]
        generator = keyed_generator(torch.device("cpu"), attack.seed, "start", row)
        image = start(attack.start, 1, view.shape, generator).requires_grad_(True)
        # its tolerances would end an iteration early and make the counts of evaluations unequal
        optimiser = torch.optim.LBFGS(
            [image], lr=1.0, max_iter=attack.steps, tolerance_grad=0, tolerance_change=0
        )
        best = (float("inf"), image.detach().clone())

        def closure(
            image: torch.Tensor = image,
            optimiser: torch.optim.LBFGS = optimiser,
            label: torch.Tensor = label,
            target: list[torch.Tensor] = target,
        ) -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            optimiser.zero_grad()
            loss = cross_entropy(view.model(image), label)
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            distance = torch.stack(
                [(g - t).square().sum() for g, t in zip(gradients, target, strict=True)]
            ).sum()
            distance.backward(inputs=[image])
            return distance

        for _ in range(attack.max_iterations):
            optimiser.step(closure)
            value = float(closure().detach())
            if value < best[0]:
                best = (value, image.detach().clone())
            if not value >= attack.stop_loss:  # done, or no number any more
                break
        best_images.append(best[1][0])
    return torch.stack(best_images), evaluations


def seconds_per_evaluation(view: Scene, iterations: int, repetitions: int) -> dict[str, float]:
    """Return the process time of one evaluation for one victim, both engines interleaved.

    One at a time the victims do not help each other, so two stand for all.

    Parameters
    ----------
    iterations : of each attack
    repetitions : of which the median counts, after one that is not counted

    Returns
    -------
    engine → seconds
    """
    endless = Attack(
        max_iterations=iterations, stop_loss=1e-30, stall=(iterations, 0.0), restarts=0
    )
    few, every = 2, len(view.observations)

    def many() -> int:
        reconstruction = reconstruct(view.model, view.observations, view.shape, endless)
        return int(reconstruction.iterations.sum()) * endless.steps + every

    def alone() -> int:
        return one_at_a_time(view, few, endless)[1]

    engines: dict[str, Callable[[], int]] = {"one_at_a_time": alone, "ours": many}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for repetition in range(repetitions + 1):
        for name, run in engines.items():
            started = time.process_time()
            evaluations = run()
            if repetition:  # the first one warms the caches up
                times[name].append((time.process_time() - started) / evaluations)
    return {name: median(t) for name, t in times.items()}


def success_rates(view: Scene, iterations: int) -> dict[str, np.ndarray]:
    """Return which victims either engine recovers, [V]: the same starts, labels known."""
    attack, labels = Attack(max_iterations=iterations, restarts=0), view.labels[:, None]
    alone, _ = one_at_a_time(view, len(view.observations), attack)
    ours = reconstruct(view.model, view.observations, view.shape, attack, labels=labels)
    truth = view.images.numpy()
    return {
        "one_at_a_time": success(alone.clamp(0, 1).numpy(), truth),
        "ours": success(ours.images[:, 0].numpy(), truth),
    }


def bench(
    datasets: list[str],
    victims: int,
    iterations: int,
    repetitions: int,
    path: Path,
    counts: Sequence[int] = COUNTS,
) -> None:
    """Measure, print ratios and success rates, and write a row for each engine and victim count.

    Parameters
    ----------
    datasets : names of data sets
    victims, iterations : of the paired success rates; 0 victims for none
    repetitions : of each time, after one that is not counted
    path : the file to write; its rows on other data sets stay
    counts : victims attacked at once
    """
    rows = other_rows(path, "dataset", datasets)
    for dataset in datasets:
        rates = success_rates(scene(dataset, victims), iterations) if victims else {}
        for name, right in rates.items():
            report_progress(f"{dataset}: {name} recovers {right.sum()} of {len(right)} victims")
        if rates:
            alone, ours = rates.values()
            report_progress(
                f"  the rates differ by {abs(alone.mean() - ours.mean()):.3f}, "
                f"{int((alone != ours).sum())} victims do"
            )
        for count in counts:
            seconds = seconds_per_evaluation(scene(dataset, count), 6, repetitions)
            ratio, asked = seconds["one_at_a_time"] / seconds["ours"], WANTED.get((dataset, count))
            report_progress(
                f"{dataset}, {count} victims: "
                + ", ".join(f"{n} {1000 * s:.3f} ms" for n, s in seconds.items())
            )
            report_progress(
                f"  one at a time / ours: {ratio:.2f}" + (f" (asked for: {asked})" if asked else "")
            )
            for name, value in seconds.items():
                rate = f"{rates[name].mean():.3f}" if rates else ""
                rows.append(
                    {
                        "dataset": dataset,
                        "engine": name,
                        "victims": count,
                        "ms_per_victim_evaluation": f"{1000 * value:.4f}",
                        "success_rate": rate,
                        "paired_victims": victims,
                        "version": fl_privacy_lib.__version__,
                        "date": datetime.date.today().isoformat(),
                    }
                )
        write_table(path, pd.DataFrame(rows, columns=COLUMNS))


def main() -> None:
    """Run the bench from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("datasets", nargs="*", default=list(DATASETS))
    parser.add_argument(
        "--victims", type=int, default=100, help="victims of the paired success rates; 0 for none"
    )
    parser.add_argument(
        "--iterations", type=int, default=60, help="attack iterations of the paired success rates"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=MEASURED / "attack_performance.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench(options.datasets, options.victims, options.iterations, options.repetitions, options.out)


if __name__ == "__main__":
    main()
