"""The recorded points of the chapter on compensation; nothing is computed here (chapter 09).

Every setting below was written down before the first recording.
"""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fl_privacy_lib.chapters.compensation.leaks import Leak, leak_values
from fl_privacy_lib.chapters.compensation.parameters import Compensation
from fl_privacy_lib.chapters.compensation.studies import Study, all_values
from fl_privacy_lib.chapters.compensation.training import REPAIRS, Federated, Rounds
from fl_privacy_lib.defenses.compensation import SLICINGS
from fl_privacy_lib.defenses.descent import Descent
from fl_privacy_lib.reproduction.experiment import Result, Row
from fl_privacy_lib.reproduction.experiments.cells import HIDDEN
from fl_privacy_lib.reproduction.records import Values, numbers

PAPER = "compensation"
DATASETS = ("mnist", "fashion_mnist", "cifar10")
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # beside the paper's own
ROOT_SIZES, BIASES = (50, 100, 200, 300, 400), (0.1, 0.2, 0.4, 0.6, 1.0)
FORMS: tuple[dict[str, Any], ...] = ({}, {"keep": "above"}, {"variance": "sum"})
OTHERS: tuple[dict[str, Any], ...] = (  # the variance as printed, all as coded, other noise
    FORMS[2], {"centred": True, "variance": "sum", "fold": "divisor"},
    {"noise_std": 1.0}, {"noise_std": 0.01})  # fmt: skip
RATIOS = (1.0, 6.0, 12.0, 20.0)
WIDTHS, LENGTHS = (16, 64), (30, 100, 300, 1000, 3000)  # of ConvNet; rounds of a descent
# what σ is measured on; rounds of a repetition, and of ConvNet's trainings
UNITS, TIMED, SHORT = ("gradient", "update"), 50, 200


def leak(settings: Compensation, dataset: str, attack: str, **changes: Any) -> Leak:
    """Return a cell at the paper's settings, with the slices unless a method is named."""
    own: dict[str, Any] = {
        "victims": settings.victims, "seeds": settings.seeds, "seed": settings.seed,
           "max_iterations": settings.max_iterations, "method": "risk_compensation"}  # fmt: skip
    return Leak(dataset, attack, **own | changes)


def key_of(point: Leak | Study | Descent | Federated) -> dict[str, str]:
    """Return a row's key: the published tables' own columns, then the settings that ran."""
    settings = asdict(point)
    if isinstance(point, Federated):
        settings |= settings.pop("plan") | {
            "compensation_q": f"{point.compensation_q:g}", "seed": point.seed}  # fmt: skip
    if isinstance(point, Leak):
        settings |= {"root_dataset_bias": f"{point.root_dataset_bias:.1f}",
                     "method": point.method + "_muted" * (point.arm == "muted"),
                     "local_clipping": str(point.local_clipping).lower(),
                     "level": f"{point.strength:g}"}  # fmt: skip
    return {name: str(value) for name, value in settings.items() if name != "seeds"}


def row_of(point: Leak | Study | Descent | Federated) -> Row:
    """Return the recorded row of a point."""
    seeds = getattr(point, "seeds", 1)
    values = partial(leak_values, seeds) if isinstance(point, Leak) else all_values
    return Row(key_of(point), (point,), values, seeds)


def table_2(settings: Compensation, dataset: str, attack: str) -> list[Leak]:
    """Return every defence under the published attack, and Soteria's muted one.

    The paper says that nothing is recovered from slices. The first attack tells, as it recovers
    images without a defence: it meets slices on the networks of `HIDDEN`.
    """
    return [
        leak(settings, dataset, attack, method=m, arm=a,
             **(HIDDEN if (attack, m) == ("dga", "risk_compensation") else {}))
        for m, a in (("non_private", "naive"), ("risk_compensation", "naive"), ("gc", "naive"),
                     ("dp_gaussian", "naive"), ("dp_laplace", "naive"), ("pld", "naive"),
                     ("pld", "muted"))
    ]  # fmt: skip


def adaptive(settings: Compensation, dataset: str, attack: str) -> list[Leak]:
    """Return the attackers who know the defence, the sweep over γ, and noise on all coordinates."""
    make, first = partial(leak, settings, dataset, attack), attack == "dga"
    return list(dict.fromkeys([
        *(make(arm=arm) for arm in ("naive", "slice_aware", "known_slices", "compensating")),
        make(method="gc", arm="mask_aware"), make(arm="slice_aware", observations=4),
        *(make(arm=arm, level=share) for share in SHARES for arm in ("naive", "known_slices",
          "slice_aware") if first and (share < 1 or arm == "naive")),
        *(make(arm="slice_aware", noise=std) for std in (0.03, 0.01, 0.001) if first),
        *([make(arm="learned", victims=25)] if first else []),
        *(make(method="dp_gaussian", noise=std) for std in (0.05, 0.03, 0.01, 0.003) if first),
    ]))  # fmt: skip


def table_3(table: str, settings: Compensation, dataset: str, attack: str) -> list[Leak]:
    """Return a panel of Table III; all are measured with the second attack, here with both.

    'width', which no paper has: what ConvNet's width changes, on one network.
    """
    make = partial(leak, settings, dataset, attack)
    return {
        "table_3a": [make(slicing=kind) for kind in SLICINGS],
        "width": [
            make(width=width, seeds=1, **arm)
            for width in WIDTHS
            for arm in (
                {"method": "non_private"},
                {},
                {"arm": "known_slices"},
                {"slicing": "layer_size"},
            )
        ],
        "table_3b": [make(root_dataset_size=size) for size in ROOT_SIZES],
        "table_3c": [make(root_dataset_bias=bias) for bias in BIASES],
        "table_3e": [make(arm="compensating", local_clipping=clip) for clip in (False, True)],
    }[table]


def studies(settings: Compensation, dataset: str) -> list[Study]:
    """Return the studies of the mechanisms."""
    base = Study("law", draws=max(2, settings.draws // 10), seed=settings.seed)
    rank = replace(base, study="low_rank", columns=100, draws=settings.draws)
    real = replace(rank, study="aggregate", dataset=dataset, noise="sliced")
    return [
        base, replace(base, factor=0.95), replace(base, factor=1.05),
        replace(base, variance="sum"), replace(base, noise="sliced"),
        *(replace(rank, study="common_row", centred=centred) for centred in (False, True)),
        *(replace(rank, noise=noise, **form) for noise in ("all", "sliced") for form in FORMS),
        *(replace(real, ratio=q, **form) for q in RATIOS for form in FORMS[:2]),
        *(replace(real, **form) for form in OTHERS),
        replace(base, study="hutchinson", dataset=dataset, draws=max(2, base.draws * 2)),
        replace(base, study="all_ones", dataset=dataset, draws=1),
    ]  # fmt: skip


def descents(settings: Compensation) -> list[Row]:
    """Return the descents that the proof of convergence speaks of, with feedback and without."""
    return [
        row_of(Descent(repair, feedback, t, draws=min(3, settings.draws), seed=settings.seed))
        for repair in ("sum", "mean", "none") for feedback in (True, False) for t in LENGTHS
        if repair != "none" or not feedback
    ]  # fmt: skip


def trainings(settings: Compensation, dataset: str, attack: str) -> list[Federated]:
    """Return the trainings of Table II, or with the second attack's γ those of Table III D.

    Before these stand ConvNet's of Table II: 200 rounds, one seed, σ on the gradient.
    """
    make = partial(Federated, dataset, attack, seeds=min(3, settings.seeds), seed=settings.seed)
    sliced = partial(make, "risk_compensation")
    if attack == "gia":
        swept = [sliced(repair="right_variance", noise_on=UNITS[0], compensation_q=q)
                 for q in RATIOS]  # fmt: skip
        return [
            replace(arm, attack=attack, network="convnet_16", seeds=1,
                    plan=replace(arm.plan, rounds=SHORT))
            for arm in trainings(settings, dataset, "dga")
            if arm.noise_on != "update" and arm.repair != "as_released"
        ] + (swept if dataset == "mnist" else [])  # fmt: skip
    return [
        make("non_private"),
        *(sliced(repair=how, noise_on=unit) for unit in UNITS for how in REPAIRS),
        make("gc"),
        *(make(name, noise_on=unit) for unit in UNITS for name in ("dp_gaussian", "dp_laplace")),
    ]


def round_times(settings: Compensation, datasets: tuple[str, ...]) -> list[Row]:
    """Return the rows of a run a data set, in which the defences of Table II take turns."""
    runs = [
        Rounds(tuple(
            replace(arm, seeds=1, plan=replace(arm.plan, rounds=TIMED))
            for arm in trainings(settings, dataset, "dga")
            if arm.noise_on != "update" and arm.repair != "as_released"
        ), max(2, settings.draws // 10))
        for dataset in datasets
    ]  # fmt: skip
    return [Row(key_of(arm), (run,), partial(overhead, str(i)))
            for run in runs for i, arm in enumerate(run.arms) if i]  # fmt: skip


def overhead(arm: str, results: list[Result]) -> Values:
    """Return what an arm adds to the time of an undefended round, as a share of it."""
    return {"round_time_overhead": numbers(results[0][arm])}
