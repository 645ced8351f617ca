"""Noise along a tree: prefix sums against a naive tree, what a stage declares, both engines."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from defense_scenes import of_std, setting
from scipy import stats

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting.accountants import spend
from fl_privacy_lib.accounting.conventions import DELTA
from fl_privacy_lib.accounting.gdp import gdp_epsilon
from fl_privacy_lib.audit import statement
from fl_privacy_lib.chapters.what_works import grid
from fl_privacy_lib.chapters.what_works.parameters import WhatWorks
from fl_privacy_lib.chapters.what_works.training import SummedTraining
from fl_privacy_lib.data.partition import full_copies
from fl_privacy_lib.defenses import Clip, Defense, Holding, PerExample
from fl_privacy_lib.defenses.noisy_stages import TreeNoise
from fl_privacy_lib.defenses.schedule import Schedule
from fl_privacy_lib.defenses.stage import ClientContext
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.reproduction.experiments import training
from fl_privacy_lib.reproduction.experiments.searching import Search
from fl_privacy_lib.sampling import Plan

CLIP = Clip(0.5, "all")
D = 20_000


def released(leaves, rounds=1, scale=3.0, size=4, seed=0):
    """Return what a stage adds to means of zero, [rounds, steps, D], of one client."""
    stage, state, found = TreeNoise(CLIP, scale, leaves=leaves), {}, []
    for t in range(rounds):
        generator, steps = torch.Generator().manual_seed(seed + t), []
        for i in range(leaves):
            ctx = ClientContext(t, (0,), [generator], state=state, iteration=i, batch_size=size)
            steps.append(stage({"w": torch.zeros(1, D, dtype=torch.float64)}, ctx)["w"][0])
        found.append(torch.stack(steps))
    return torch.stack(found)


def naive_prefixes(nodes, leaves):
    """Return the noise of every prefix from a tree that is kept whole: (level, index) → draw."""
    prefixes = []
    for t in range(1, leaves + 1):
        total, start = 0.0, 0
        for level in reversed(range(leaves.bit_length())):  # the largest blocks first
            if t & (1 << level):
                total = total + nodes[level, start >> level]
                start += 1 << level
        prefixes.append(total)
    return torch.stack(prefixes)


@pytest.mark.parametrize("leaves", [1, 2, 7, 8, 13])
def test_prefix_sums_are_those_of_a_naive_tree(leaves):
    noise = released(leaves)[0]
    generator, nodes = torch.Generator().manual_seed(0), {}
    for t in range(1, leaves + 1):  # step t completes one node, the largest block that ends there
        level = (t & -t).bit_length() - 1
        draw = torch.randn(1, D, generator=generator, dtype=torch.float64)[0]
        nodes[level, (t - 1) >> level] = draw * 3.0 * 0.5 / 4
    assert torch.allclose(noise.cumsum(0), naive_prefixes(nodes, leaves))


@pytest.mark.parametrize("t", [1, 2, 3, 6, 7, 8, 11])
def test_a_prefix_carries_as_many_draws_as_its_number_has_ones(t):
    prefix, std = released(11)[0].cumsum(0)[t - 1], 3.0 * 0.5 / 4
    assert of_std(prefix, std * math.sqrt(t.bit_count()))
    assert not of_std(prefix, std * math.sqrt(t.bit_count() + 0.5))


def test_every_round_has_a_tree_of_its_own():
    first, second = released(6, rounds=2)
    assert torch.allclose(second, released(6, seed=1)[0])
    assert abs(float(stats.pearsonr(first.sum(0), second.sum(0)).statistic)) < 5 / math.sqrt(D)


def test_clients_and_rounds_have_trees_of_their_own_in_a_training():
    model, train, _ = setting(clients=2, examples_per_client=12)
    partition = replace(full_copies(24, 1), indices=(np.arange(12), np.arange(12, 24)))
    plan = Plan(2, 2, 2, 3, 4, local_lr=0.1)
    ends = []
    for engine in ("generic", "stacked"):
        defense = Defense("tree", PerExample(CLIP), TreeNoise(CLIP, 0.0, leaves=3))
        ends.append(simulate(model, train, partition, plan, defense, engine=engine).weights)
    assert all(torch.allclose(ends[0][n], ends[1][n], atol=1e-6) for n in ends[0])
    loud = Defense("tree", PerExample(CLIP), TreeNoise(CLIP, 50.0, leaves=3))
    moved = simulate(model, train, partition, plan, loud, engine="stacked").weights
    noise = torch.cat([(moved[n] - ends[0][n]).flatten() for n in moved])
    # three steps are two draws of two nodes, of two clients, in two rounds, and averaged
    std = 0.1 * 50.0 * 0.5 / 4 * math.sqrt(2 * 2 * 2) / 2
    assert abs(float(noise.std()) / std - 1) < 0.05


# ---- what is proved ------------------------------------------------------------------------------


@pytest.mark.parametrize(("leaves", "height"), [(1, 1), (2, 2), (3, 2), (4, 3), (100, 7)])
def test_no_leaf_is_in_more_nodes_than_the_tree_declares(leaves, height):
    completed = [(level, index) for level in range(leaves.bit_length())
                 for index in range(leaves >> level)]  # fmt: skip
    most = max(sum(leaf >> level == index for level, index in completed) for leaf in range(leaves))
    assert most == height
    says = TreeNoise(CLIP, 3.0, leaves=leaves).declare()
    assert says.noise.scale == pytest.approx(3.0 / math.sqrt(height)) and says.clip == CLIP


@pytest.mark.parametrize("epsilon", grid.TREE)
def test_the_proved_epsilon_is_that_of_one_gaussian(epsilon):
    point = SummedTraining("mnist", noise_scale=grid.TREE[epsilon], epsilon=epsilon, **grid.PASSES)
    proved = spend(point.events(60_000), "pld", DELTA).epsilon
    closed = gdp_epsilon(math.sqrt(4 * 7) / grid.TREE[epsilon], DELTA)
    assert 0.995 * epsilon < proved <= epsilon and proved == pytest.approx(closed, rel=1e-3)
    both = statement(point.defense, replace(point, local_lr=1.0).plan(0),
                     Holding(60_000, 60_000, 3), delta=DELTA)  # fmt: skip
    assert both.proved.epsilon == pytest.approx(closed, rel=1e-6)


@pytest.mark.parametrize("leaves", [0, -1])
def test_a_tree_needs_a_leaf(leaves):
    with pytest.raises(InputError, match=f"leaves = {leaves}"):
        TreeNoise(CLIP, 1.0, leaves=leaves).declare()


def test_a_tree_has_one_scale_and_as_many_leaves_as_steps():
    """Else the ε that it declares would be that of another mechanism."""
    with pytest.raises(InputError, match="not a schedule"):
        TreeNoise(CLIP, Schedule(15.0, 5.0, 100), leaves=4).declare()
    with pytest.raises(InputError, match=r"leaves = 2\.5 must be a whole number"):
        TreeNoise(CLIP, 1.0, leaves=2.5).declare()
    short = Defense("tree", PerExample(CLIP), TreeNoise(CLIP, 15.0, leaves=2))
    plan = Plan(1, 1, 2, 3, 4, batch_sampling="one_pass_fixed", local_lr=1.0)
    with pytest.raises(InputError, match=r"covers 2 local iterations .* the plan has 3"):
        statement(short, plan, Holding(12, 12, 1), delta=DELTA)
    ctx = ClientContext(0, (0,), [torch.Generator()], state={}, iteration=2, batch_size=1)
    with pytest.raises(InputError, match="leaves = 2 has no step 3"):
        TreeNoise(CLIP, 1.0, leaves=2)({"w": torch.zeros(1, 3)}, ctx)


# ---- cells ---------------------------------------------------------------------------------------


def test_the_recorded_trainings_pass_over_the_data_and_draw_nothing():
    cells = grid.cells_of(grid.TREE, grid.PASSES, WhatWorks.of_profile("full"), "mnist")
    assert [c.point.epsilon for c in cells] == [0.82, 3.0, 8.0]
    for cell in cells:
        point, plan = cell.point, cell.point.plan(0)
        assert plan.batch_sampling == "one_pass_fixed"
        assert plan.local_iterations * plan.batch_size == 60_000
        assert cell.keys["route"] == "tree_aggregation" and cell.keys["adversary"] == "sees_models"
        assert point.defense.per_batch.leaves == plan.local_iterations
        assert cell.search({}) == Search(())  # its rates lie around the chosen one of the frontier


def test_a_training_along_a_tree_learns_and_resumes(tmp_path):
    point = SummedTraining("digits", noise_scale=0.01, rounds=3, batch_size=100, local_lr=2.0,
                           noise_at="tree", local_iterations=13)  # fmt: skip
    result = training.measure(point, torch.device("cpu"), tmp_path)
    assert result["accuracy"][0] > 0.6
    model, train, _ = setting(clients=1, examples_per_client=12)
    about = (model, train, full_copies(12, 1), Plan(1, 1, 3, 3, 4, local_lr=0.5),
             Defense("tree", PerExample(CLIP), TreeNoise(CLIP, 1.0, leaves=3)))  # fmt: skip

    def stop(report):
        if report.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(*about, checkpoint=tmp_path / "c.pt", on_round=stop)
    resumed = simulate(*about, checkpoint=tmp_path / "c.pt", resume=True).weights
    whole = simulate(*about).weights
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
