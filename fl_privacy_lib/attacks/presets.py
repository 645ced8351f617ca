"""The published attacks, as settings of the one routine.

To change one, replace a setting: ``replace(PUBLISHED["dlg"], max_iterations=100)``.
"""

from fl_privacy_lib.attacks.attack import Attack

PUBLISHED: dict[str, Attack] = {
    # Squared distance, a normal start, L-BFGS, the label optimised with the image. Source: Zhu et
    # al., Deep Leakage from Gradients, NeurIPS 2019, and its released code (300 iterations).
    "dlg": Attack(start="normal", label_rule="joint"),
    # DLG with the label inferred from the last layer's gradient and fixed. Source: Zhao et al.,
    # iDLG, 2020, and its released code (300 iterations, stops below 1e-6).
    "idlg": Attack(start="normal"),
    # iDLG from a patterned start; the Fed-CDP papers attack with it. Its reported pictures are the
    # iterates nearest to the truth, which no attacker can choose. Source: Wei et al., A Framework
    # for Evaluating Client Privacy Leakages in Federated Learning, ESORICS 2020, and its released
    # code (300 iterations).
    "cpl": Attack(),
    # GradInv: cosine distance, total variation, signed Adam in the box [0, 1]. 240 iterations of 20
    # steps are its 4,800; the papers' counts of its iterations are counts of steps. It never stops
    # before its budget ends. Source: Geiping et al., Inverting Gradients, NeurIPS 2020, and its
    # released code: the rate falls to a tenth at 3/8, 5/8 and 7/8, total variation × 1e-4.
    "grad_inversion": Attack(
        start="normal",
        optimiser="signed_adam",
        learning_rate=0.1,
        max_iterations=240,
        decay=True,
        box=True,
        objective="cosine",
        tv=1e-4,
        stall=(240, 0.0),
    ),
    # The compensation paper's "deep gradient attack": DLG with a known label. Source: Wang et al.,
    # Protect Privacy from Gradient Leakage Attack in Federated Learning, INFOCOM 2022, section VI:
    # one image a batch.
    "dga": Attack(start="normal", label_rule="given", max_iterations=500),
    # The same paper's "gradient inversion attack": GradInv with plain Adam. 50 iterations of 20
    # steps are its 1,000. Source: section VI, and its released code: rate 0.1, total variation ×
    # 1e-4, gradients unsigned, no box, 800 iterations.
    "gia": Attack(
        start="normal",
        label_rule="given",
        optimiser="adam",
        learning_rate=0.1,
        max_iterations=50,
        objective="cosine",
        tv=1e-4,
        stall=(50, 0.0),
    ),
}
"""Published attack → its settings."""
