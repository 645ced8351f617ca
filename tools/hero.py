"""The book's first picture, by ``python -m tools.hero``: on MNIST, or else on Digits."""

from pathlib import Path

import numpy as np

from fl_privacy_lib.chapters.threat_types.grid import Point
from fl_privacy_lib.chapters.threat_types.run import EXPERIMENT
from fl_privacy_lib.data import first_available, load
from fl_privacy_lib.reproduction import figures
from fl_privacy_lib.reproduction.devices import pick_device
from fl_privacy_lib.reproduction.experiments.setups import clients_of
from fl_privacy_lib.reproduction.paths import ROOT, data_root, decoded_cache


def draw_hero() -> Path:
    """Attack eight gradients without a defence and under Fed-CDP, and draw what comes back."""
    figures.use_style()
    name = first_available(["mnist", "digits"], data_root())
    data = load(name, data_root(), decoded_cache())
    rows: list[list[np.ndarray]] = []
    for method in ("non_private", "fed_cdp_example"):
        point = Point(name, "type_2", method, "naive", 8, 1, max_iterations=20,
                      clients=clients_of(data))  # fmt: skip
        result = EXPERIMENT.run(point, pick_device("cpu"))
        rows += [list(result["truth"][:, 0])] if not rows else []
        rows.append(list(result["images"][:, 0]))
    names = [
        "private images",
        "from their gradients,\nno defence",
        "from their gradients,\nnoise per example",
    ]
    path = ROOT / "book" / "images" / "hero.png"
    figures.image_grid(rows, names, [""] * 8).savefig(path)
    return path


if __name__ == "__main__":
    print(draw_hero())
