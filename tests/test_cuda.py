"""What only a CUDA device can show; `make gpu-check` runs these, the other tests leave them out."""

import numpy as np
import pytest
import torch

from fl_privacy_lib.attacks import Attack, reconstruct
from fl_privacy_lib.data import iid
from fl_privacy_lib.defenses import fed_cdp, non_private
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.models import build
from fl_privacy_lib.sampling import Plan

pytestmark = pytest.mark.cuda


def run(engine, defense, device, seed=0, **plan):
    generator = torch.Generator().manual_seed(3)
    model = build("training_cnn", (1, 28, 28), 10, generator).to(device)
    x, y = (
        torch.rand(120, 1, 28, 28, generator=generator),
        torch.randint(10, (120,), generator=generator),
    )
    values = {
        "participants": 6,
        "rounds": 1,
        "local_iterations": 2,
        "batch_size": 5,
        "local_lr": 0.1,
    } | plan
    tap = Tap("aggregate")
    run = simulate(
        model, (x.to(device), y.to(device)), iid(120, 6, 20, np.random.default_rng(0)),
        Plan(clients=6, seed=seed, **values), defense, engine=engine, taps=[tap],
    )  # fmt: skip
    return torch.cat([v.flatten().cpu() for v in run.observations[tap].values.values()])


@pytest.mark.parametrize(
    "defense", [non_private(), fed_cdp(clip_norm=0.05, noise_scale=0.0)], ids=lambda d: d.name
)
@pytest.mark.parametrize("sampling", ["one_pass_fixed", "poisson"])
def test_the_stacked_engine_on_the_device_gives_the_update_of_the_cpu(defense, sampling):
    if sampling == "poisson" and defense.name == "fed_cdp_example":
        defense = fed_cdp("batch", clip_norm=0.05, noise_scale=0.0)
    there = run("stacked", defense, "cuda", batch_sampling=sampling)
    here = run("generic", defense, "cpu", batch_sampling=sampling)
    assert float((there - here).norm() / here.norm()) < 1e-3


def test_its_noise_has_the_right_spread_and_a_key():
    defense = fed_cdp(clip_norm=1.0, noise_scale=2.0)
    noisy, quiet = run("stacked", defense, "cuda"), run("stacked", defense.noiseless(), "cuda")
    local = 0.1 * 2.0 / 5**0.5  # of one local step
    expected = local * 2**0.5 / 6**0.5  # two steps, the mean of six clients
    assert float((noisy - quiet).std()) == pytest.approx(
        expected, rel=0.05
    )  # the weights, too, have moved a little
    assert not torch.equal(noisy, run("stacked", defense, "cuda", seed=1))


def test_an_attack_on_the_device_recovers_an_image():
    generator = torch.Generator().manual_seed(1)
    model = build("attacked_lenet", (1, 28, 28), 10, generator).cuda()
    x, y = torch.rand(4, 1, 28, 28, generator=generator).cuda(), torch.arange(4).cuda()
    partition = iid(4, 4, 1, np.random.default_rng(0))
    taps = [Tap("example", client) for client in range(4)]
    plan = Plan(4, 4, 1, 1, 1, local_lr=0.1)
    seen = simulate(model, (x, y), partition, plan, non_private(), taps=taps)
    outcome = reconstruct(
        model, [seen.observations[t] for t in taps], (1, 28, 28), Attack(max_iterations=60)
    )
    truth = torch.stack([seen.truth[t][0] for t in taps])
    assert outcome.images.device.type == "cuda"
    assert float((outcome.images - truth).square().mean((1, 2, 3, 4)).median()) < 1e-2
