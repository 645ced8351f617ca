"""The learned attacker: what it may use and reach, and that noise leaves it the mean image."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.attacks import learned
from fl_privacy_lib.attacks.learned import LearnedAttack, train
from fl_privacy_lib.data import Partition, load
from fl_privacy_lib.defenses import Clip, Defense, PerExample, fed_cdp, non_private
from fl_privacy_lib.defenses.route import ClipAndNoiseUpdate
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.federated.stacked import local_noise
from fl_privacy_lib.metrics import mse
from fl_privacy_lib.models import build
from fl_privacy_lib.sampling import Plan

PUBLIC = 1200  # images; the victims come after them
SMALL = LearnedAttack(public_images=PUBLIC, projection=256, hidden=256, epochs=20, views=2)
VICTIMS = 70
OTHERS = slice(PUBLIC, PUBLIC + VICTIMS)  # the victims, where a batch holds one image
CLIPPED = Defense("clipped", per_example=PerExample(Clip(0.5)))


@cache
def digits():
    """Return digits in a fixed random order: they are stored by writer."""
    data = load("digits", Path("/nowhere"))
    order = np.random.default_rng(0).permutation(len(data.train_y))
    return torch.tensor(data.train_x[order]), torch.tensor(data.train_y[order])


@cache
def lenet(seed=0):
    return build("attacked_lenet", (1, 28, 28), 10, torch.Generator().manual_seed(seed))


@cache
def observe(defense, stage="example", batch=1, seed=0):
    """Return the observations of images PUBLIC …, and the images [V, 1, 28, 28]."""
    x, y = digits()
    held = tuple(PUBLIC + np.arange(i * batch, (i + 1) * batch) for i in range(VICTIMS))
    plan = Plan(VICTIMS, VICTIMS, 1, 1, batch, local_lr=0.1)
    taps = [Tap(stage, client) for client in range(VICTIMS)]
    run = simulate(
        lenet(seed), (x, y), Partition("victims", held, len(y)), plan, defense, taps=taps
    )
    return [run.observations[tap] for tap in taps], torch.stack(
        [run.truth[tap][0][0] for tap in taps]
    )


@cache
def train_inverter(defense, settings=SMALL, stage="example"):
    x, y = digits()
    return train(lenet(), observe(defense, stage)[0][0], defense, x[:PUBLIC], y[:PUBLIC], settings)


def error(images, truth):
    """Return the mean squared error of every image, [V]."""
    return mse(images.numpy(), truth.numpy())


@pytest.mark.parametrize("defense", [non_private(), CLIPPED], ids=["no defence", "clipping alone"])
def test_without_noise_it_beats_the_guesses(defense):
    seen, truth = observe(defense)
    images = train_inverter(defense)(seen)
    x, y = digits()
    # a guess that is told the label
    class_mean = torch.stack(
        [x[:PUBLIC][y[:PUBLIC] == label].mean(0) for label in y[OTHERS].tolist()]
    )
    assert images.shape == (VICTIMS, 1, 1, 28, 28) and 0 <= images.min() and images.max() <= 1
    found = error(images[:, 0], truth)
    for guess in (torch.full_like(truth, 0.5), x[:PUBLIC].mean(0).expand_as(truth), class_mean):
        # paired t-test: were the guess as good, this would pass once in a million
        assert stats.ttest_rel(error(guess, truth), found, alternative="greater").pvalue < 1e-6


@pytest.mark.long
def test_pure_noise_leaves_it_the_mean_image():
    defense = fed_cdp("example", clip_norm=1.0, noise_scale=1000.0)
    seen, truth = observe(defense)
    attacker = train_inverter(defense)
    found, guess = (
        error(attacker(seen)[:, 0], truth),
        error(digits()[0][:PUBLIC].mean(0).expand_as(truth), truth),
    )
    assert (
        stats.ttest_rel(guess, found, alternative="greater").pvalue > 1e-6
    )  # wrong alarm: once in a million
    assert (
        found.mean() < 1.1 * guess.mean()
    )  # and it is not fooled by the noise that it has learned by heart


@pytest.mark.long
def test_more_noise_less_image():
    errors = []
    for std in (0.0, 0.1, 10.0):
        defense = Defense("noise", per_example=PerExample(Clip(1e4, "all"), std / 1e4))
        assert local_noise(defense, 1, 0) == pytest.approx(std)
        seen, truth = observe(defense)
        errors.append(float(error(train_inverter(defense)(seen)[:, 0], truth).mean()))
    assert errors == sorted(errors) and errors[2] > 1.5 * errors[0]


def test_the_replay_is_the_clients_own_rule():
    """Images' gradients, replayed, are up to rounding what a simulated client shows."""
    x, y = digits()
    seen, _ = observe(CLIPPED)
    route = learned._Route(lenet(), seen[0], torch.Generator())
    rows = [route.seen(g, CLIPPED) for g in route.gradients(x[OTHERS], y[OTHERS])]
    expected = torch.stack([torch.cat([v[0].flatten() for v in o.values.values()]) for o in seen])
    torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-4, atol=1e-6)


def test_an_update_is_replayed_as_a_client_sends_it():
    """Clipped as an update, read as a gradient: what is seen over −η, up to rounding."""
    defense = Defense("clipped_update", per_client=ClipAndNoiseUpdate(Clip(0.05, "all"), 0.0))
    x, y = digits()
    seen, _ = observe(defense, "update")
    route = learned._Route(lenet(), seen[0], torch.Generator())
    rows = torch.cat([route.seen(g, defense) for g in route.gradients(x[OTHERS], y[OTHERS])])
    expected = torch.stack([torch.cat([v.flatten() for v in o.values.values()]) for o in seen])
    torch.testing.assert_close(rows, expected / -0.1, rtol=1e-4, atol=1e-6)
    assert float(rows[0].norm()) == pytest.approx(0.5, rel=1e-4)  # 0.05 over η


def test_the_replayed_noise_has_the_plans_size():
    defense = fed_cdp("example")
    x, y = digits()
    route = learned._Route(lenet(), observe(CLIPPED)[0][0], torch.Generator().manual_seed(0))
    gradients = next(route.gradients(x[:8], y[:8]))
    noise = route.seen(gradients, defense) - route.seen(gradients, defense.noiseless())
    # 136,304 draws: the estimate's standard error is 0.2 %, so 1.2 % is six of them (wrong alarm:
    # 2e-9)
    assert float(noise.std()) == pytest.approx(6 * 4, rel=0.012)


def test_views_differ_only_where_noise_is_drawn():
    x, y = digits()
    route = learned._Route(lenet(), observe(CLIPPED)[0][0], torch.Generator().manual_seed(0))
    noisy = Defense("noise", per_example=PerExample(Clip(1e4, "all"), 0.1 / 1e4))
    d = sum(p.numel() for p in lenet().parameters())
    for defense, expected in ((CLIPPED, 1), (noisy, 2)):
        views = learned._views(route, defense, x[:20], y[:20], torch.eye(d, 3), 2)
        assert views.shape == (expected, 20, 3)


def test_whitened_features_are_uncorrelated():
    features = (
        torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
        @ torch.diag(torch.arange(1.0, 7))
        + 3
    )
    features[:, 1] += features[:, 0]
    axes, centre = learned._whitening(features, 1e-9)
    white = features @ axes - centre
    torch.testing.assert_close(white.mean(0), torch.zeros(6), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cov(white.T, correction=0), torch.eye(6), atol=1e-3, rtol=0)


def test_a_seed_decides_everything_and_the_global_one_nothing():
    seen, _ = observe(non_private())
    quick = replace(SMALL, epochs=2)
    x, y = digits()
    made = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        made.append(train(lenet(), seen[0], non_private(), x[:PUBLIC], y[:PUBLIC], quick)(seen))
        assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(*made)
    assert not torch.equal(
        made[0], train_inverter(non_private(), settings=replace(quick, seed=1))(seen)
    )


def test_a_gradient_without_numbers_gives_an_image_and_spoils_no_other():
    seen, _ = observe(non_private())
    broken = replace(
        seen[0], values={name: torch.full_like(v, torch.nan) for name, v in seen[0].values.items()}
    )
    attacker = train_inverter(non_private())
    images = attacker([broken, *seen[1:]])
    assert torch.isfinite(images).all() and torch.equal(images[1:], attacker(seen)[1:])


def test_it_refuses_what_it_was_not_trained_for():
    attacker = train_inverter(non_private())
    with pytest.raises(InputError, match="no observations"):
        attacker([])
    for stage in ("batch", "update"):
        with pytest.raises(InputError, match=f"tap 'example', but an observation is of '{stage}'"):
            attacker(observe(non_private(), stage)[0])
    of_updates = train_inverter(non_private(), replace(SMALL, epochs=1), "update")
    longer = [replace(o, local_iterations=2) for o in observe(non_private(), "update")[0]]
    with pytest.raises(InputError, match=r"\(η, L\) = \(0.1, 2\).* reads only \(0.1, 1\)"):
        of_updates(longer)
    with pytest.raises(InputError, match="tap = 'batch'"):
        train_inverter(non_private(), SMALL, "batch")
    with pytest.raises(InputError, match="other weights"):
        attacker(observe(non_private(), seed=1)[0])
    with pytest.raises(InputError, match="defence is not the training's"):
        attacker(observe(CLIPPED)[0])
    with pytest.raises(InputError, match=r"\(batch size, round\) = \(2, 0\)"):
        attacker(observe(non_private(), batch=2)[0])


def test_unusable_public_data_and_settings_are_named():
    x, y = digits()

    def given(images, labels):
        seen = observe(non_private())[0][0]
        return train(lenet(), seen, non_private(), images, labels, SMALL)

    with pytest.raises(InputError, match="0 public images are too few"):
        given(x[:0], y[:0])
    with pytest.raises(InputError, match=r"\[n, C, H, W\] and \[n\]"):
        given(x[:30], y[:29])
    with pytest.raises(InputError, match="greatest public pixel = 255"):
        given(x[:30] * 255, y[:30])
    for wrong in (
        {"epochs": 0},
        {"public_images": 3},
    ):
        with pytest.raises(InputError, match=next(iter(wrong))):
            LearnedAttack(**wrong)
