"""The published attacks, as settings of the one routine; any can be overridden by its name."""

from dataclasses import fields
from typing import Any

from fl_privacy_lib._checks import InputError, nearest
from fl_privacy_lib.attacks.attack import Attack


def _attack(published: dict[str, Any], overrides: dict[str, Any]) -> Attack:
    names = [f.name for f in fields(Attack)]
    for name in overrides:
        if name not in names:
            raise InputError(
                f"an attack has no setting {name!r}{nearest(name, names)}; it has "
                f"{', '.join(names)}."
            )
    return Attack(**published | overrides)


def dlg(**settings: Any) -> Attack:
    """Return DLG: squared distance, a normal start, L-BFGS, the label optimised with the image.

    Source: Zhu et al., Deep Leakage from Gradients, NeurIPS 2019, and its released code (300
    iterations).

    Examples
    --------
    >>> dlg(seed=3).label_rule, dlg().start
    ('joint', 'normal')
    """
    return _attack({"start": "normal", "label_rule": "joint"}, settings)


def idlg(**settings: Any) -> Attack:
    """Return iDLG: DLG with the label inferred from the last layer's gradient and fixed.

    Source: Zhao et al., iDLG, 2020, and its released code (300 iterations, stops below 1e-6).
    """
    return _attack({"start": "normal"}, settings)


def cpl(start: str = "patterned", **settings: Any) -> Attack:
    """Return CPL: iDLG from a patterned start. The Fed-CDP papers attack with it.

    Its reported pictures are the iterates nearest to the truth; ``select="oracle"`` does that here.

    Source: Wei et al., A Framework for Evaluating Client Privacy Leakages in Federated Learning,
    ESORICS 2020, and its released code (300 iterations).
    """
    return _attack({"start": start}, settings)


def grad_inversion(**settings: Any) -> Attack:
    """Return GradInv: cosine distance, total variation, signed Adam in the box [0, 1].

    240 iterations of 20 steps are its 4,800. The papers' counts of its iterations are counts of
    steps. It never stops before its budget ends.

    Source: Geiping et al., Inverting Gradients, NeurIPS 2020, and its released code: 4,800 steps,
    the rate falls to a tenth at 3/8, 5/8 and 7/8, total variation × 1e-4, normal start.
    """
    return _attack(
        {
            "start": "normal",
            "optimiser": "signed_adam",
            "learning_rate": 0.1,
            "max_iterations": 240,
            "decay": True,
            "box": True,
            "objective": "cosine",
            "tv": 1e-4,
            "stall": (240, 0.0),
        },
        settings,
    )


def dga(**settings: Any) -> Attack:
    """Return the compensation paper's "deep gradient attack": DLG with a known label.

    Source: Wang et al., Protect Privacy from Gradient Leakage Attack in Federated Learning, INFOCOM
    2022, section VI: one image a batch, its label known.
    """
    return _attack({"start": "normal", "label_rule": "given", "max_iterations": 500}, settings)


def gia(**settings: Any) -> Attack:
    """Return the compensation paper's "gradient inversion attack": GradInv with plain Adam.

    50 iterations of 20 steps are its 1,000.

    Source: Wang et al., INFOCOM 2022, section VI (1,000 iterations, label known), and its released
    code: rate 0.1, total variation × 1e-4, gradients unsigned, no box, 800 iterations.
    """
    return _attack(
        {
            "start": "normal",
            "label_rule": "given",
            "optimiser": "adam",
            "learning_rate": 0.1,
            "max_iterations": 50,
            "objective": "cosine",
            "tv": 1e-4,
            "stall": (50, 0.0),
        },
        settings,
    )


PUBLISHED = {
    "dlg": dlg,
    "idlg": idlg,
    "cpl": cpl,
    "grad_inversion": grad_inversion,
    "dga": dga,
    "gia": gia,
}
"""Published attack → its settings."""
