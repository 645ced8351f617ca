"""The recorded points of the chapter on compensation; nothing is computed here (chapter 09).

Every setting below was written down before the first recording.
"""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fl_privacy_lib.chapters.compensation.leaks import Leak, leak_values
from fl_privacy_lib.chapters.compensation.parameters import Compensation
from fl_privacy_lib.chapters.compensation.studies import Study, all_values
from fl_privacy_lib.reproduction.experiment import Row

PAPER = "compensation"
DATASETS = ("mnist", "fashion_mnist", "cifar10")
ATTACKS = ("dga", "gia")
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # beside the paper's own
ROOT_SIZES, BIASES = (50, 100, 200, 300, 400), (0.1, 0.2, 0.4, 0.6, 1.0)
FORMS: tuple[dict[str, Any], ...] = ({}, {"keep": "above"}, {"variance": "sum"})
OTHERS: tuple[dict[str, Any], ...] = (  # the variance as printed, all as coded, other noise
    FORMS[2], {"centred": True, "variance": "sum", "fold": "divisor"},
    {"noise_std": 1.0}, {"noise_std": 0.01})  # fmt: skip
RATIOS = (1.0, 6.0, 12.0, 20.0)


def leak(settings: Compensation, dataset: str, attack: str, **changes: Any) -> Leak:
    """Return a cell at the paper's settings, with the slices unless a method is named."""
    own: dict[str, Any] = {
        "victims": settings.victims, "seeds": settings.seeds, "seed": settings.seed,
           "max_iterations": settings.max_iterations, "method": "risk_compensation"}  # fmt: skip
    return Leak(dataset, attack, **own | changes)


def leak_key(cell: Leak) -> dict[str, str]:
    """Return a row's key: the published tables' own columns, then the settings that ran."""
    method = "pld_muted" if (cell.method, cell.arm) == ("pld", "muted") else cell.method
    printed = {"root_dataset_bias": f"{cell.root_dataset_bias:.1f}", "method": method,
               "local_clipping": str(cell.local_clipping).lower(),
               "level": f"{cell.strength:g}"}  # fmt: skip
    return {n: str(v) for n, v in (asdict(cell) | printed).items() if n != "seeds"}


def row_of(point: Leak | Study) -> Row:
    """Return the recorded row of a point."""
    if isinstance(point, Study):
        key = {name: str(value) for name, value in asdict(point).items()}
        return Row(key, (point,), all_values)
    return Row(leak_key(point), (point,), partial(leak_values, point.seeds), point.seeds)


def table_2(settings: Compensation, dataset: str, attack: str) -> list[Leak]:
    """Return every defence under the published attack, and Soteria's muted one."""
    arms = [("non_private", "naive"), ("risk_compensation", "naive"), ("gc", "naive"),
            ("dp_gaussian", "naive"), ("dp_laplace", "naive"), ("pld", "naive"),
            ("pld", "muted")]  # fmt: skip
    return [leak(settings, dataset, attack, method=m, arm=a) for m, a in arms]


def adaptive(settings: Compensation, dataset: str, attack: str) -> list[Leak]:
    """Return the attackers who know the defence, and the sweep over γ."""
    make = partial(leak, settings, dataset, attack)
    cells = [make(arm=arm) for arm in ("naive", "slice_aware", "known_slices", "compensating")]
    cells += [make(method="gc", arm="mask_aware"), make(arm="slice_aware", observations=4)]
    sweep = [make(arm=arm, level=share) for share in SHARES for arm in ("naive", "known_slices",
             "slice_aware") if attack == "dga" and (share < 1 or arm == "naive")]  # fmt: skip
    quiet = [make(arm="slice_aware", noise=std) for std in (0.03, 0.01, 0.001) if attack == "dga"]
    return list(dict.fromkeys(cells + sweep + quiet))


def table_3(table: str, settings: Compensation, dataset: str, attack: str) -> list[Leak]:
    """Return a panel of Table III; all are measured with the second attack, here with both."""
    make = partial(leak, settings, dataset, attack)
    if table == "table_3a":
        return [make(slicing=kind) for kind in ("gradient_sensitivity", "layer_size", "all_ones")]
    if table == "table_3b":
        return [make(root_dataset_size=size) for size in ROOT_SIZES]
    if table == "table_3c":
        return [make(root_dataset_bias=bias) for bias in BIASES]
    return [make(arm="compensating", local_clipping=clip) for clip in (False, True)]


def studies(settings: Compensation, dataset: str) -> list[Study]:
    """Return the studies of the mechanisms."""
    base = Study("law", draws=max(2, settings.draws // 10), seed=settings.seed)
    laws = [base, replace(base, factor=0.95), replace(base, factor=1.05),
            replace(base, variance="sum"), replace(base, noise="sliced")]  # fmt: skip
    rank = replace(base, study="low_rank", columns=100, draws=settings.draws)
    repairs = [replace(rank, study="common_row", centred=c) for c in (False, True)]
    repairs += [replace(rank, noise=noise, **form) for noise in ("all", "sliced")
               for form in FORMS]  # fmt: skip
    real = replace(rank, study="aggregate", dataset=dataset, noise="sliced")
    real_forms = [replace(real, ratio=q, **form) for q in RATIOS for form in FORMS[:2]]
    real_forms += [replace(real, **form) for form in OTHERS]
    risks = [replace(base, study=kind, dataset=dataset, draws=n)
             for kind, n in (("hutchinson", max(2, base.draws * 2)), ("all_ones", 1))]  # fmt: skip
    return laws + repairs + real_forms + risks
