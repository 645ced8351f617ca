"""Do recorded trainings stand with another engine? Twelve cells of Fed-CDP's Table II, again.

``python -m tools.engine_agreement`` (about 20 minutes of one core) writes one row a cell, as it is
finished, to ``results/measured/engine_agreement.csv``; the record of the table is read and never
written. A cell that stands already is not run again.
"""

import csv
import math
import statistics
import tempfile
from pathlib import Path

import torch

from fl_privacy_lib.chapters.fed_cdp.reading import point_of
from fl_privacy_lib.reproduction.comparison import measured, select
from fl_privacy_lib.reproduction.devices import device_name
from fl_privacy_lib.reproduction.experiments.training import Training, train
from fl_privacy_lib.reproduction.paths import MEASURED

ARMS = (
    ("non_private", "not_applicable"),
    ("fed_sdp", "code"),
    ("fed_cdp", "printed"),
    ("fed_cdp", "code"),
    ("fed_cdp_decay", "code"),
    ("fed_cdp", "as_coded"),
)
COLUMNS = (
    "dataset",
    "method",
    "setting",
    "participants",
    "engine",
    "seeds",
    "recorded",
    "recorded_std",
    "mean",
    "std",
    "standard_errors",
    "device",
)
ENGINE = "compiled"


def recorded_cells() -> list[tuple[Training, float, float]]:
    """Return Table II's trainings with 5 and 10 of 100 clients, recorded means and deviations."""
    rows = {"clients": 100, "participants": [5, 10], "local_iterations": 100, "metric": "accuracy"}
    frame = select(measured("fed_cdp/table_2"), rows)
    cells = []
    for method, setting in ARMS:
        for _, row in select(frame, {"method": method, "setting": setting}).iterrows():
            cells.append((point_of(row), float(row["mean"]), float(row["std"])))
    return cells


def standard_errors(first: tuple[float, float], second: tuple[float, float], seeds: int) -> float:
    """Return how many standard errors of their difference two means over seeds lie apart.

    Parameters
    ----------
    first, second : mean and standard deviation over the seeds
    seeds : behind each mean
    """
    error = math.sqrt((first[1] ** 2 + second[1] ** 2) / seeds)
    if error == 0:
        return 0.0 if first[0] == second[0] else math.inf
    return abs(first[0] - second[0]) / error


def main(path: Path = MEASURED / "engine_agreement.csv") -> None:
    """Train the cells that the file lacks and write a row for each as it is finished."""
    torch.set_num_threads(1)
    device, done = torch.device("cpu"), set()
    if path.exists():
        done = {
            (row["method"], row["setting"], row["participants"])
            for row in csv.DictReader(path.open())
        }
    else:
        path.write_text(",".join(COLUMNS) + "\n")
    for point, mean, std in recorded_cells():
        if (point.method, point.setting, str(point.participants)) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            runs = [
                train(point, point.seed + i, device, Path(folder) / f"{i}.pt", ENGINE)["accuracy"]
                for i in range(point.seeds)
            ]
        now = statistics.fmean(runs), statistics.stdev(runs)
        apart = standard_errors((mean, std), now, point.seeds)
        numbers = [f"{value:.6g}" for value in (mean, std, *now, apart)]
        row = [
            point.dataset,
            point.method,
            point.setting,
            point.participants,
            ENGINE,
            point.seeds,
            *numbers,
            device_name(device),
        ]
        with path.open("a") as file:
            csv.writer(file, lineterminator="\n").writerow(row)
        print(
            f"{point.method} {point.setting} K_t={point.participants}: {mean:.3f} ± {std:.3f} "
            f"recorded, {now[0]:.3f} ± {now[1]:.3f} now, {apart:.2f} standard errors apart",
            flush=True,
        )


if __name__ == "__main__":
    main()
