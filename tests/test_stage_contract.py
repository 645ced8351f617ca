"""A stage says what it is, or nothing is proved of it: no fact about a defence is guessed
from a field's name.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from federated_scenes import plan_of, setting

from fl_privacy_lib import audit
from fl_privacy_lib._checks import InputError
from fl_privacy_lib.attacks.objective import replay
from fl_privacy_lib.defenses import (
    Clip,
    Declaration,
    Defense,
    Holding,
    Noise,
    PerExample,
    Stage,
    Transformation,
    fed_cdp,
)
from fl_privacy_lib.defenses.limits import unbounded
from fl_privacy_lib.defenses.noise import add_noise
from fl_privacy_lib.defenses.perturbation import Piecewise
from fl_privacy_lib.defenses.selection import PerturbedSampling
from fl_privacy_lib.defenses.stage import declaration
from fl_privacy_lib.defenses.two_stage import TwoStage, local_privacy
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.sampling import Plan

PLAN = Plan(100, 10, 20, 10, 5, local_lr=0.1)
HOLDING = Holding(5000, 50, 3)
DELTA = 1e-5


@dataclass(frozen=True)
class LooksPrivate:
    """Fields that read like a clip and its noise, and neither is there."""

    clip: Clip
    noise_scale: float = 6.0
    scale: float = 1.0

    def __call__(self, values, ctx):
        return values


def test_fields_that_sound_private_prove_nothing():
    defense = Defense("x", per_client=LooksPrivate(Clip(4.0)))
    (why,) = audit.statement(defense, PLAN, HOLDING, delta=DELTA).proved.reasons
    assert (
        why[0] == "no proof" and "LooksPrivate at per_client does not say what it clips" in why[1]
    )
    assert math.isinf(audit.statement(defense, PLAN, HOLDING, delta=DELTA).proved.epsilon)
    with pytest.raises(InputError, match="LooksPrivate at per_client does not say"):
        defense.events(PLAN, HOLDING)


@dataclass(frozen=True)
class Hidden(Stage):
    """Noise under a name of its own."""

    sigma: float = 0.5

    def __call__(self, values, ctx):
        return add_noise(values, self.sigma, ctx.generators)

    def declare(self):
        return Declaration(noise=Noise(self.sigma, "fixed"))

    def noiseless(self):
        return Hidden(0.0)


@pytest.mark.parametrize("place", ["per_example", "per_batch", "per_client"])
def test_noise_under_any_name_is_gone_from_the_noiseless_form(place):
    """An attacker who knows the rule replays the true gradients and finds them: nothing of
    the noise is left.
    """
    model, train, partition = setting("mlp")
    defense = Defense("hidden", **{place: Hidden()})
    tap = Tap("update", 1)
    clear = simulate(
        model, train, partition, plan_of(), defense.noiseless(), taps=[tap]
    ).observations[tap]
    plain = simulate(model, train, partition, plan_of(), Defense("plain"), taps=[tap]).observations[
        tap
    ]
    assert all(torch.equal(clear.values[name], plain.values[name]) for name in plain.values)
    noisy = simulate(model, train, partition, plan_of(), defense, taps=[tap]).observations[tap]
    view = replay(noisy, aware=True)
    seen = view({name: torch.ones(2, 3, *v.shape) for name, v in noisy.values.items()})
    assert all(torch.allclose(v, torch.ones(())) for v in seen.values())


def test_a_noiseless_form_that_still_draws_is_named_in_one_sentence():
    @dataclass(frozen=True)
    class Lying(Hidden):
        def noiseless(self):
            return self

    model, train, partition = setting("mlp")
    tap = Tap("update", 1)
    run = simulate(
        model, train, partition, plan_of(), Defense("lying", per_client=Lying()), taps=[tap]
    )
    view = replay(run.observations[tap], aware=True)
    with pytest.raises(InputError, match="noiseless\\(\\) form must draw nothing"):
        view({name: torch.ones(2, 3, *v.shape) for name, v in run.observations[tap].values.items()})


def test_a_function_runs_but_has_no_noiseless_form():
    def halve(values, ctx):
        return {name: v / 2 for name, v in values.items()}

    with pytest.raises(
        InputError, match="per_client = halve does not say what it is without its noise"
    ):
        Defense("x", per_client=halve).noiseless()
    assert (
        unbounded(Defense("x", fed_cdp().per_example, per_client=halve), "update")[0] == "no proof"
    )
    assert (
        unbounded(Defense("x", fed_cdp().per_example, per_client=halve), "batch") is None
    )  # it comes later


@dataclass(frozen=True)
class OwnBatchNoise(Stage):
    """Noise on the batch mean, without a field ``divide_by``."""

    def __call__(self, values, ctx):
        return add_noise(values, 2.0 * 4.0 / ctx.batch_size, ctx.generators)

    def declare(self):
        return Declaration(Clip(4.0), Noise(2.0, divide_by="batch"))

    def noiseless(self):
        return Transparent()


class Transparent(Transformation):
    def __call__(self, values, ctx):
        return values


def test_a_batch_stage_of_ones_own_is_counted_by_what_it_declares():
    own = Defense("own", PerExample(Clip(4.0)), OwnBatchNoise())
    named = fed_cdp("batch", noise_scale=2.0)
    assert own.events(PLAN, HOLDING, participations=3) == named.events(
        PLAN, HOLDING, participations=3
    )


def test_a_class_that_acts_otherwise_does_not_inherit_what_its_base_says():
    class Doubled(PerExample):
        def __call__(self, gradients, ctx):
            return {name: 2 * g for name, g in super().__call__(gradients, ctx).items()}

    defense = Defense("doubled", Doubled(Clip(4.0), 6.0))
    assert declaration(defense.per_example) is None
    assert math.isinf(audit.statement(defense, PLAN, HOLDING, delta=DELTA).proved.epsilon)
    with pytest.raises(InputError, match="does not say what it is without its noise"):
        defense.noiseless()

    class Named(PerExample):
        """Acts as its base does."""

    assert declaration(Named(Clip(4.0), 6.0)) == declaration(PerExample(Clip(4.0), 6.0))


@pytest.mark.parametrize("said", [{"clip": 4.0}, {"noise": 3.0}, {"clip": Noise(3.0)}])
def test_a_declaration_of_bare_numbers_is_refused(said):
    with pytest.raises(InputError, match=r"write a bound as Declaration\(Clip\(C\)\)"):
        Declaration(**said)


def test_what_precedes_a_local_report_is_not_covered_by_it():
    defense = local_privacy("x", TwoStage(PerturbedSampling(0.5, 2), Piecewise(0.5)))
    holding = Holding(100, 1, 1)
    plan = Plan(100, 10, 10, 1, 1, "one_pass", local_lr=1.0)
    assert math.isinf(
        audit.statement(defense, plan, holding, delta=DELTA, tap="batch").proved.epsilon
    )
    for tap in ("update", "received", "aggregate"):
        with pytest.raises(InputError, match=r"locally private.*audit\.local_statement"):
            audit.statement(defense, plan, holding, delta=DELTA, tap=tap)
    with pytest.raises(InputError, match="locally private"):
        defense.events(plan, holding)
    with pytest.raises(InputError, match="has no form without noise"):
        defense.noiseless()
