"""Zero-concentrated privacy under random batches, as Yu et al. (2019) count it."""

import math

import numpy as np

from fl_privacy_lib.accounting.events import Event, Floats, Ledger, Spending


def step_rho(ledger: Ledger) -> Floats:
    """Return ρ of one use of each event, [events]: q²/z² if sampled, 1/(2z²) if not.

    Yu et al. charge q²/z² for a random batch, twice the leading term of the subsampled divergence;
    1/(2z²) is the plain Gaussian release of Bun and Steinke (2016).
    """
    squared = np.square(ledger.noise)
    return np.where(ledger.sampled, np.square(ledger.rates) / squared, 0.5 / squared)


def epsilon_of_rho(rho: Floats | float, delta: float) -> Floats:
    """Return ρ + 2 sqrt(ρ ln(1/δ)).

    Examples
    --------
    >>> print(f"{float(epsilon_of_rho(10_000 * 0.01**2 / 6**2, 1e-5)):.4f}")
    1.1588
    """
    return np.asarray(rho + 2 * np.sqrt(np.asarray(rho) * math.log(1 / delta)))


def zcdp_spending(ledger: Ledger, delta: float) -> Spending:
    """Return what a ledger costs by zCDP; the caveats say which conditions of the theorem fail.

    Where σ < 1, the bound on a sampled step is not merely unproved but too small, often by far.
    """
    rho = float(np.sum(step_rho(ledger) * ledger.uses))
    epsilon = float(epsilon_of_rho(rho, delta))
    return Spending(ledger, "zcdp", epsilon, delta, delta, _caveats(ledger, rho, delta))


def _caveats(ledger: Ledger, rho: float, delta: float) -> tuple[str, ...]:
    """Return the conditions of Abadi et al. (2016), lemma 3, that fail."""
    if not ledger.sampled.any():
        return ()
    failures, steps = sampling_condition_failures(ledger), ledger.steps
    low = int(ledger.uses[ledger.sampled & (ledger.noise < 1)].sum())
    order = 1 + math.sqrt(math.log(1 / delta) / rho)
    q, z = ledger.rates[ledger.sampled], ledger.noise[ledger.sampled]
    reach = 1 + max(0.0, float(np.min(np.square(z) * -np.log(q * z))))
    fails = {
        f"The theorem needs q < 1/(16σ), which fails at {failures} of {steps} steps.": failures > 0,
        f"The theorem needs σ ≥ 1, which fails at {low} of {steps} steps: ε may be far too "
        "small.": low > 0,
        f"ε uses the Rényi order {order:.3g}, but the theorem reaches only to {reach:.3g}.": (
            order > reach
        ),
    }
    return tuple(sentence for sentence, applies in fails.items() if applies)


def sampling_condition_failures(events: Event | Ledger) -> int:
    """Return the number of sampled steps with q ≥ 1/(16 z).

    The three papers on training quote q < 1/(16σ) for the moments accountant and for zCDP. The
    numeric moments accountant does not need it; the printed theorems do.

    Examples
    --------
    >>> sampling_condition_failures(Event(0.1, 6.0, "client", "add_remove", uses=100))
    100
    """
    ledger = Ledger.of(events)
    return int(ledger.uses[ledger.sampled & (ledger.rates * 16 * ledger.noise >= 1)].sum())
