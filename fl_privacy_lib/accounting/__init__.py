"""From accounting events to ε: what a sequence of noisy releases costs.

========================  =====================================================================
``events``                an `Event`, a checked sequence of them, the `Ledger`, and the answer:
                          a `Spending`, ε with all that must stand beside it
``composition``           base, advanced and optimal composition of (ε, δ) steps
``zcdp``                  zero-concentrated privacy under random batches
``rdp``                   Rényi divergences of the subsampled Gaussian: the moments accountant
``pld``                   privacy loss distributions
``gdp``                   the exact ε of unsampled Gaussian releases
``accountants``           one name for each of these: `spend`, `spending_curve`; the other
                          direction: `first_step_beyond` a budget, `noise_for` an ε
``schedules``             noise that changes over the steps
``conventions``           what the papers' tables assume, as data
``recompute``             the published cells, computed again
========================  =====================================================================

Imports run downwards in this list's order only. Nothing here needs PyTorch or TensorFlow.
"""
