"""FedSel's recorded cells: which arms stand in which table (chapter 08).

A cell is a row's key columns, the arms it is computed from, and what is computed. Nothing is
computed here. Tables of trainings have one learning rate for all arms; `trial` gives each its best.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from fl_privacy_lib.chapters.fedsel import mechanisms
from fl_privacy_lib.chapters.fedsel.mechanisms import Noise, Signal, Time, slope
from fl_privacy_lib.chapters.fedsel.parameters import FedSel
from fl_privacy_lib.chapters.fedsel.training import (
    MODELS,
    PUBLISHED_NAMES,
    SELECTIONS,
    VALUES,
    Training,
)
from fl_privacy_lib.reproduction.experiment import Result, Row
from fl_privacy_lib.reproduction.records import Values, numbers

ROWS = tuple(
    (dataset, model) for dataset in ("syn_l", "bank", "kdd99", "adult_123") for model in MODELS
)
"""Table 3's eight rows."""
BUDGETS = (0.5, 1.0, 2.0, 4.0)
"""ε of one participation. The paper's own are lost; no row is recorded at one budget alone."""
RATIOS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
BATCHES = (50, 100, 200, 400, 800)
FIXED_ROUNDS = 45  # as many as the largest batch leaves in one epoch of ADULT

Results = list[Result]


def row_of(arms: tuple[Any, ...], values: Callable[[Results], Values], **keys: str) -> Row:
    """Return a recorded row.

    Parameters
    ----------
    arms : what has to be measured; the first one's settings are key columns
    values : the arms' results → metrics
    keys : further key columns, before those of the settings
    """
    settings = asdict(arms[0])
    if "dataset" in settings:
        settings["dataset"] = PUBLISHED_NAMES.get(settings["dataset"], settings["dataset"])
    first = {name: value for name, value in keys.items() if name not in settings}
    return Row(first | settings | keys, arms, values, getattr(arms[0], "repetitions", 1))


def accuracies(results: Results) -> Values:
    """Return the accuracy at the end and after a quarter of the rounds, its spread, and η."""
    curve = results[0]["curve"]  # [runs, checkpoints]
    last = numbers(curve[:, -1])
    # the standard error of a std is std / √(2n)
    spread = {"mean": last["std"], "std": last["std"] / 2**0.5, "n": last["n"]}
    early = numbers(curve[:, max(0, round(curve.shape[1] / 4) - 1)])
    rate = numbers([float(results[0]["server_lr"])])
    return {
        "accuracy": last,
        "accuracy_at_a_quarter": early,
        "spread": spread,
        "learning_rate": rate,
    }


def points_of(results: Results) -> list[np.ndarray]:
    """Return every arm's last accuracies in percent, [runs]; they differ by percentage points."""
    return [100 * result["curve"][:, -1] for result in results]


def lower_limit(values: np.ndarray) -> dict[str, Any]:
    """Return the mean less two of its standard errors: above 0, the runs agree that it is."""
    over_runs = numbers(values)
    return numbers([over_runs["mean"] - 2 * over_runs["std"] / over_runs["n"] ** 0.5])


def gain_and_loss(results: Results) -> Values:
    """Return Table 3's quantities, in percentage points.

    gain: control - flat; loss: control - within. Both formulas are lost; these fit their
    description. Beside them the share of the gain, where there surely is one, of an arm that
    selects nothing and only leaves out the factor d/k.

    Parameters
    ----------
    results : of the arms within, control, flat and flat unscaled
    """
    within, control, flat, unscaled = points_of(results)
    gain, without = control - flat, unscaled - flat
    share = float(without.mean() / gain.mean()) if lower_limit(gain)["mean"] > 0 else 0.0
    return {
        "gain": numbers(gain),
        "loss": numbers(control - within),
        "gain_without_selection": numbers(without),
        "advantage": numbers(within - flat),
        "share_without_selection": numbers([share]),
        "gain_over_loss": numbers(gain - (control - within)),
        # above 0: there surely is a gain, and surely more than half of it comes without a selection
        "majority_without_selection": numbers(
            [min(lower_limit(gain)["mean"], lower_limit(without - gain / 2)["mean"])]
        ),
    }


def base(settings: FedSel, dataset: str, model: str = "logistic_regression") -> Training:
    """Return the arm PS-PM at the settings that the parameters name."""
    return Training(
        dataset,
        model,
        ratio=settings.ratio,
        top_share=settings.top_share,
        server_lr=settings.server_lr,
        discount=settings.discount,
        l2=settings.l2,
        batch_share=settings.batch_share,
        epochs=settings.epochs,
        repetitions=settings.repetitions,
        folds=settings.folds,
        seed=settings.seed,
    )


def table_3(settings: FedSel) -> list[Row]:
    """Return Table 3's cells, one learning rate for all arms."""
    cells = []
    for dataset, model in ROWS:
        for epsilon in BUDGETS:
            for method in SELECTIONS:
                arm = replace(base(settings, dataset, model), epsilon=epsilon, send=method)
                arms = (
                    arm,
                    replace(arm, budget="control"),
                    replace(arm, send="flat"),
                    replace(arm, send="flat_unscaled"),
                )
                cells.append(row_of(arms, gain_and_loss, method=method))
    return cells


def _panel(panel: str, arms: list[Training]) -> list[Row]:
    return [row_of((arm,), accuracies, panel=panel, method=arm.method) for arm in arms]


def _combine(arm: Training, **values: tuple[Any, ...]) -> list[Training]:
    """Return the arm with every combination of the values."""
    arms = [arm]
    for name, choices in values.items():
        arms = [replace(a, **{name: choice}) for a in arms for choice in choices]
    return arms


def figure_2(settings: FedSel) -> list[Row]:
    """Return the arms of Fig. 2, panel by panel."""
    cells, adult = [], base(settings, "adult_123")
    for dataset in ("syn_l", "syn_h", "adult_123"):
        bare = replace(base(settings, dataset), value="none")
        cells += _panel("selection_only", _combine(bare, send=("full", "random", "top_k")))
        cells += _panel("selection_only", _combine(bare, send=SELECTIONS, epsilon=(*BUDGETS, 8.0)))
    for dataset, model in ROWS:
        arm = base(settings, dataset, model)
        cells += _panel("two_stage", _combine(replace(arm, value="none"), send=("full",)))
        cells += _panel(
            "two_stage", _combine(arm, epsilon=BUDGETS, send=("flat", "flat_unscaled", *SELECTIONS))
        )
        cells += _panel(
            "two_stage", _combine(arm, epsilon=BUDGETS, send=SELECTIONS, budget=("control",))
        )
    twice = replace(adult, epochs=2)
    cells += _panel("two_epochs", _combine(twice, epsilon=BUDGETS, send=("flat", "flat_unscaled")))
    cells += _panel(
        "two_epochs", _combine(twice, epsilon=BUDGETS, send=SELECTIONS, memory=(True, False))
    )
    cells += _panel(
        "other_perturbation",
        _combine(adult, epsilon=BUDGETS, send=("flat", "ps"), value=tuple(VALUES)),
    )
    for dataset in ("syn_l", "adult_123"):
        arm = base(settings, dataset)
        cells += _panel(
            "compressed", _combine(arm, epsilon=BUDGETS, send=("flat", "compressed", *SELECTIONS))
        )
    return cells


def figure_3(settings: FedSel) -> list[Row]:
    """Return the arms of Fig. 3, panel by panel."""
    adult = base(settings, "adult_123")
    flat = ("flat", "flat_unscaled")
    remembering = replace(adult, memory=True)
    cells = _panel("accumulation", _combine(adult, epochs=(1, 2), epsilon=BUDGETS, send=("flat",)))
    cells += _panel(
        "accumulation",
        _combine(remembering, epochs=(1, 2), epsilon=BUDGETS, send=SELECTIONS, raw=(True, False)),
    )
    for epsilon in (0.5, 1.0, 4.0):
        arm = replace(adult, epsilon=epsilon)
        cells += _panel("ratio", _combine(arm, send=flat)) + _panel(
            "ratio", _combine(arm, send=SELECTIONS, ratio=RATIOS)
        )
    fixed = replace(adult, rounds=FIXED_ROUNDS)
    cells += _panel("batch_size", _combine(fixed, batch=BATCHES, send=flat))
    return cells + _panel(
        "batch_size", _combine(fixed, batch=BATCHES, send=SELECTIONS, budget=("rule",))
    )


def _theorem_4_1(settings: FedSel) -> list[Row]:
    def errors(results: Results) -> Values:
        error, signal = results[0]["error"], float(results[0]["signal"])
        return {
            "error": numbers(error),
            "error_over_signal": numbers(error / signal),
            "signal": numbers([signal]),
            "recovery_error": numbers([float(results[0]["recovery"])]),
        }

    cells = []
    for solution in mechanisms.SOLUTIONS:
        for varied, values in mechanisms.SERIES.items():
            series = tuple(
                Noise(solution, varied, float(v), settings.draws, settings.seed) for v in values
            )
            cells += [row_of((point,), errors) for point in series]
            cells.append(row_of(series, partial(_exponents, series), value="all"))
    return cells


def _exponents(series: tuple[Noise, ...], results: Results) -> Values:
    """Return the power laws of the error, of the bound, and of the error over the signal."""
    x, error = [point.value for point in series], [float(r["error"].mean()) for r in results]
    exponent, bound = slope(x, error), slope(x, [point.bound for point in series])
    relative = slope(x, [e / float(r["signal"]) for e, r in zip(error, results, strict=True)])
    exponents = {
        "slope": exponent,
        "slope_of_bound": bound,
        "slope_excess": exponent - bound,
        "slope_over_signal": relative,
    }
    return {name: numbers([value]) for name, value in exponents.items()}


def _signal(settings: FedSel) -> list[Row]:
    def gain(point: Signal, results: Results) -> Values:
        return {"gain": numbers(results[0]["gain"]), "predicted_gain": numbers([point.predicted])}

    points = [
        Signal(method, epsilon, spread, draws=settings.draws, seed=settings.seed)
        for method in SELECTIONS
        for epsilon in (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
        for spread in (0.05, 0.5)
    ]
    return [row_of((point,), partial(gain, point)) for point in points]


def _selection_time(settings: FedSel) -> list[Row]:
    def microseconds(results: Results) -> Values:
        return {"microseconds": numbers(results[0]["microseconds"])}

    def exponent(series: tuple[Time, ...], results: Results) -> Values:
        times = [float(r["microseconds"].mean()) for r in results]
        return {"slope": numbers([slope([point.dimensions for point in series], times)])}

    cells = []
    sizes = [d for d in (10, 30, 100, 300, 1000, 3000, 10_000) if d <= settings.largest_dimension]
    for engine in ("as_written", "ours"):
        for method in SELECTIONS:
            series = tuple(
                Time(method, engine, d, settings.draws, seed=settings.seed) for d in sizes
            )
            cells += [row_of((point,), microseconds) for point in series]
            cells.append(row_of(series, partial(exponent, series), dimensions="all"))
    return cells


TABLES: dict[str, Callable[[FedSel], list[Row]]] = {
    "fedsel/theorem_4_1": _theorem_4_1,
    "fedsel/signal": _signal,
    "fedsel/selection_time": _selection_time,
    "fedsel/table_3": table_3,
    "fedsel/figure_2": figure_2,
    "fedsel/figure_3": figure_3,
}
"""Table → its rows at some settings, in the order in which they are recorded."""
