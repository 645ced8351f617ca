"""Attackers who know the slices: what they find and leave out, their network, cells of attacks."""

from functools import partial

import numpy as np
import pytest
import torch
from compensation_scenes import CPU, FULL, dice
from defense_scenes import flat
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.attacks.convnet import attacked_convnet
from fl_privacy_lib.attacks.learned import LearnedAttack
from fl_privacy_lib.attacks.slice_aware import ARMS, suspects
from fl_privacy_lib.chapters.compensation import grid, leaks
from fl_privacy_lib.chapters.compensation.parameters import Compensation as Parameters
from fl_privacy_lib.defenses.slices import Slices
from fl_privacy_lib.federated import Observation, Tap
from fl_privacy_lib.metrics import mse, psnr
from fl_privacy_lib.reproduction.loading import load_cached

# ---- attackers who know the slices ---------------------------------------------------------------


SMALL = Parameters.of_profile("smoke", victims=2, max_iterations=2, root_images=4)


def viewed(**changes):
    """Return the reader and the pairs of a small cell on digits."""
    cell = grid.leak(SMALL, "digits", "dga", root_dataset_size=4, **changes)
    return cell, *leaks.observed(cell, load_cached("digits"), 0, CPU)[:2]


def test_noisy_slices_are_found_at_the_papers_noise_and_not_in_quiet_noise():
    _, reader, pairs = viewed(victims=8)
    assert np.mean([reader.found(*row[0]) for row in pairs]) == 1.0
    _, reader, pairs = viewed(victims=8, noise=1e-5)
    assert np.mean([reader.found(*row[0]) for row in pairs]) < 0.8


@given(st.integers(0, 2**31), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_noise_on_a_smooth_signal_is_found_wherever_it_is(seed, noisy):
    generator = dice(seed)
    edges = (0, 200, 420, 600, 900, 1200)
    true = sorted(torch.randperm(5, generator=generator)[:noisy].tolist())
    row = 3 * torch.sin(torch.linspace(0, 6, 1200))
    for i in true:
        part = slice(edges[i], edges[i + 1])
        row[part] += torch.randn(edges[i + 1] - edges[i], generator=generator)
    seen = Observation(Tap("update"), {"w": row}, {}, 1.0, 1, 1, {})
    assert suspects(seen, Slices(edges), noisy, 1.0) == true


def test_what_is_left_out_is_zero_and_the_rest_is_as_it_was():
    _, reader, pairs = viewed()
    stage = reader.stage
    for seen, clear in (row[0] for row in pairs):
        read = {arm: flat(reader.read(arm, seen, clear).values) for arm in ARMS}
        assert torch.equal(read["naive"], flat(seen.values))
        assert torch.equal(read["slice_aware"], read["known_slices"])
        both = (read["known_slices"], flat(clear.values))
        parts = zip(*(v.split(stage.slices.sizes) for v in both), strict=True)
        noisy = reader.truth(seen, clear)
        for i, (kept, true) in enumerate(parts):
            assert (kept == 0).all() if i in noisy else torch.equal(kept, true)
        assert len(noisy) == stage.noisy == 2
        last = reader.read("muted", seen, clear).values
        zeroed = [n for n, v in last.items() if (v == 0).all()]
        assert zeroed == [n for n in last if n.endswith("weight")][-1:]
        repaired = reader.defense.on_aggregate.repaired(flat(seen.values).float(), torch.ones(1))
        assert torch.allclose(read["compensating"].float(), repaired, atol=1e-5)
    with pytest.raises(InputError, match="arm = 'slice_awar'"):
        reader.read("slice_awar", *pairs[0][0])


def test_an_update_is_the_negative_gradient_and_its_weights_stay():
    cell, reader, pairs = viewed(observations=3)
    for row in pairs:
        assert len(row) == 3
        for name, w in row[0][0].weights.items():
            assert all(torch.equal(w, seen.weights[name]) for seen, _ in row)
        clears = [flat(clear.values) for _, clear in row]
        assert all(torch.equal(clears[0], other) for other in clears)
        chosen = [tuple(reader.truth(*pair)) for pair in row]
        assert len(chosen[0]) == 2
    data = load_cached("digits")
    _, _, victims = leaks.observed(cell, data, 0, CPU)
    x, y = torch.as_tensor(data.train_x[victims]), torch.as_tensor(data.train_y[victims])
    loss = F.cross_entropy(reader.model(x[:1]), y[:1])
    gradient = torch.autograd.grad(loss, list(reader.model.parameters()))
    expected = torch.cat([g.flatten() for g in gradient]).double()
    assert torch.allclose(flat(pairs[0][0][1].values), -expected, atol=1e-6)


def test_convnet_is_the_released_one():
    model = attacked_convnet((3, 32, 32), 10, dice(0))
    widths = [m.out_channels for m in model if isinstance(m, nn.Conv2d)]
    assert widths == [64, 128, 128, 256, 256, 256, 256, 256]
    assert model[-1].in_features == 36 * 64 and not model.training
    small = attacked_convnet((1, 28, 28), 10, dice(0), width=4)
    x = torch.rand(5, 1, 28, 28, generator=dice(1))
    assert torch.allclose(small(x)[:2], small(x[:2]), atol=1e-6)  # examples do not mix
    with pytest.raises(InputError, match="at least 9 × 9"):
        attacked_convnet((1, 8, 8), 10, dice(0))


# ---- cells ---------------------------------------------------------------------------------------


def test_psnr_is_scikit_images():
    from skimage.metrics import peak_signal_noise_ratio

    rng = np.random.default_rng(0)
    one, other = rng.random((2, 4, 3, 8, 8))
    expected = [
        peak_signal_noise_ratio(a, b, data_range=1.0) for a, b in zip(one, other, strict=True)
    ]
    assert psnr(mse(other, one)) == pytest.approx(expected)


@pytest.mark.long
def test_a_slice_aware_attack_recovers_what_a_naive_one_does_not():
    base = {"victims": 1, "seeds": 1, "max_iterations": 16, "root_dataset_size": 4}
    cells = {arm: grid.leak(FULL, "digits", "dga", arm=arm, **base)
             for arm in ("naive", "slice_aware")}  # fmt: skip
    results = {arm: leaks.measure(cell, CPU) for arm, cell in cells.items()}
    quality = {arm: psnr(r["mse"]).mean() for arm, r in results.items()}
    assert quality["slice_aware"] > quality["naive"] + 10
    assert results["slice_aware"]["slices_found"].tolist() == [1.0]
    values = grid.row_of(cells["slice_aware"]).values([results["slice_aware"]])
    assert values["psnr"]["mean"] == pytest.approx(quality["slice_aware"])
    assert values["slices_found"]["n"] == 1


@pytest.mark.parametrize("method", ["non_private", "gc", "dp_gaussian", "dp_laplace", "pld"])
def test_every_defence_of_table_2_is_attacked(method):
    cell = grid.leak(SMALL, "digits", "dga", method=method, root_dataset_size=4, seeds=1)
    assert leaks.measure(cell, CPU)["images"].shape == (2, 1, 1, 28, 28)


def test_a_learned_attacker_reads_the_same_victims_without_a_search(monkeypatch):
    quick = partial(LearnedAttack, public_images=60, projection=16, views=2, hidden=16, epochs=2)
    monkeypatch.setattr(leaks, "LearnedAttack", quick)
    cells = [grid.leak(SMALL, "digits", "dga", arm=arm, root_dataset_size=4, seeds=1)
             for arm in ("learned", "naive")]  # fmt: skip
    learned, naive = (leaks.measure(cell, CPU) for cell in cells)
    assert learned["status"].tolist() == ["read", "read"]
    assert {n: v.shape for n, v in learned.items()} == {n: v.shape for n, v in naive.items()}
    np.testing.assert_array_equal(learned["truth"], naive["truth"])
    assert grid.row_of(cells[0]).key["arm"] == "learned"


def test_the_learned_attacker_s_public_images_are_no_victims(monkeypatch):
    given = []
    monkeypatch.setattr(leaks, "train", lambda *args: given.append(args))
    monkeypatch.setattr(leaks.leakage, "read", lambda *_: None)
    cell = grid.leak(SMALL, "digits", "dga", arm="learned", root_dataset_size=4, seeds=1)
    data = load_cached("digits")
    view = leaks.scene(cell, data, 0, CPU)
    leaks.learned(cell, 0, view, data)
    ((_, seen, defense, images, labels, _),) = given
    assert len(images) == len(labels) == len(data.train_y) - cell.victims
    assert seen is view.observations[0] and defense.public() == seen.defense
    for victim in view.truth[:, 0]:
        copies = (data.train_x == victim).all(axis=(1, 2, 3)).sum()
        assert (images.numpy() == victim).all(axis=(1, 2, 3)).sum() == copies - 1


def test_the_second_attack_runs_on_convnet():
    cell = grid.leak(SMALL, "digits", "gia", arm="slice_aware", width=8, victims=1, seeds=1,
                     max_iterations=1, root_dataset_size=2, local_clipping=True)  # fmt: skip
    assert leaks.measure(cell, CPU)["status"].tolist() == ["budget"]
    assert leaks.attack_of(cell, 0).mask == "zeros"
    assert leaks.attack_of(grid.leak(FULL, "mnist", "gia"), 0).max_iterations == 50
