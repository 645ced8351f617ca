"""L-BFGS and Adam, many victims side by side, against torch's one at a time."""

import math

import pytest
import torch
from attack_scenes import by_torch

from fl_privacy_lib.attacks.optimisers import LBFGS, Adam


def torch_lbfgs(history=100, rate=1.0):
    # without torch's tolerances, which end an attack iteration early where hardly anything changes
    return lambda x: torch.optim.LBFGS(
        [x], lr=rate, max_iter=20, history_size=history, tolerance_grad=0, tolerance_change=0
    )


def by_rows(objectives):
    """Return evaluate(x [rows, n]) of one scalar objective a row, each differentiated by itself."""

    def evaluate(x):
        values, gradients = [], []
        for row, objective in zip(x, objectives, strict=True):
            row = row.detach().clone().requires_grad_(True)
            value = objective(row)
            (gradient,) = torch.autograd.grad(value, [row])
            values.append(value.detach())
            gradients.append(gradient)
        return torch.stack(values), torch.stack(gradients)

    return evaluate


def quadratic(n, condition, seed):
    generator = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    matrix = (
        turn @ torch.diag(torch.logspace(0, math.log10(condition), n, dtype=torch.float64)) @ turn.T
    )
    target = torch.randn(n, generator=generator, dtype=torch.float64)
    return lambda x: 0.5 * (x - target) @ matrix @ (x - target)


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def points(rows, n, seed=0):
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n, iterations, history", [(12, 2, 50), (60, 4, 100), (60, 4, 7)])
def test_lbfgs_rows_take_torchs_steps_on_quadratics(n, iterations, history):
    objectives = [quadratic(n, condition, seed) for seed, condition in enumerate((3, 100, 1000))]
    x = points(3, n)
    expected = [
        by_torch(torch_lbfgs(history), f, x[row], iterations) for row, f in enumerate(objectives)
    ]
    optimiser, evaluate = LBFGS(x), by_rows(objectives)
    optimiser.history = history
    for iteration in range(iterations):
        loss, at = optimiser.advance(evaluate)
        for row, objective in enumerate(objectives):
            torch.testing.assert_close(at[row], expected[row][iteration], rtol=1e-6, atol=1e-6)
            assert float(loss[row]) == pytest.approx(float(objective(at[row])), abs=1e-12)


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_lbfgs_takes_torchs_first_step_and_learning_rate(size):
    steep, x = quadratic(9, 30, 0), 5 * points(1, 9)

    def objective(point):
        return size * steep(point)

    evaluate = by_rows([objective])
    _, gradient = evaluate(x)
    length = float(gradient.abs().sum())
    assert (length < 1) == (size < 1)  # below 1 the first step is the whole gradient
    for rate in (1.0, 0.3):
        _, at = LBFGS(x, rate, steps=1).advance(evaluate)
        torch.testing.assert_close(at, x - rate * gradient / max(1.0, length))
        made = by_torch(torch_lbfgs(rate=rate), objective, x[0], 1)
        torch.testing.assert_close(
            LBFGS(x, rate).advance(evaluate)[1][0], made[0], rtol=1e-6, atol=1e-6
        )


def test_lbfgs_keeps_to_short_steps_until_a_curvature_pair_is_found():
    def hill(x):  # 10·(1 − cos) falls away from π: the first step meets negative curvature
        return (10 * (1 - torch.cos(x - 0.1))).sum()

    x = torch.full((1, 4), math.pi - 0.4, dtype=torch.float64)
    seen = []

    def evaluate(points):
        seen.append(points[0].clone())
        return by_rows([hill])(points)

    LBFGS(x).advance(evaluate)
    for before, after in ((seen[0], seen[1]), (seen[1], seen[2])):
        gradient = torch.func.grad(hill)(before)
        length = min(1.0, 1.0 / float(gradient.abs().sum()))
        torch.testing.assert_close(after - before, -length * gradient)


def test_adam_rows_take_torchs_steps():
    objectives = [quadratic(6, 10, 0), quadratic(6, 1000, 1), rosenbrock]
    x, evaluate = points(3, 6), by_rows(objectives)
    for rate in (0.1, 0.01):
        optimiser = Adam(x, rate)
        expected = [by_torch(lambda p, r=rate: torch.optim.Adam([p], lr=r), f, x[i], 5) for i, f in
                    enumerate(objectives)]  # fmt: skip
        for iteration in range(5):
            loss, at = optimiser.advance(evaluate)
            at_torch = torch.stack([e[iteration] for e in expected])
            torch.testing.assert_close(at, at_torch, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(loss, evaluate(at)[0])


def alike(one, other):
    """Assert that rows took the same path: elsewhere in a stack they may be rounded otherwise."""
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def breaking(value):
    """Return an objective that is smooth at first and later returns no number any more."""
    calls = []

    def objective(x):
        calls.append(1)
        return x.square().sum() * (1.0 if len(calls) < 30 else value)

    return objective


@pytest.mark.parametrize("make", [LBFGS, lambda x: Adam(x, 0.1)])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
@pytest.mark.parametrize("late", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(make, value, late):
    own, x = [quadratic(8, 100, 0), rosenbrock], 0.7 * points(4, 8)
    neighbour = breaking(value) if late else lambda x: (x * value).sum()
    crowd = [own[0], neighbour, own[1], quadratic(8, 3, 5)]
    alone, together = make(x[[0, 2]]), make(x)
    for _ in range(4):
        loss, at = alone.advance(by_rows(own))
        all_loss, all_at = together.advance(by_rows(crowd))
        alike(loss, all_loss[[0, 2]])
        alike(at, all_at[[0, 2]])
        assert torch.isfinite(at).all()
    assert not torch.isfinite(all_loss[1]) or all_loss[1].abs() > 1e100 or value == 1e200


@pytest.mark.parametrize("make", [LBFGS, lambda x: Adam(x, 0.1)])
def test_a_restarted_row_forgets_and_a_selected_one_goes_on(make):
    objectives, x = [quadratic(8, 100, 0), rosenbrock, quadratic(8, 10, 1)], points(3, 8)
    fresh = points(3, 8, seed=9)
    optimiser, control, other = make(x), make(x), make(fresh[1:2])
    for each in (optimiser, control):
        each.advance(by_rows(objectives))
    optimiser.restart(torch.tensor([False, True, False]), fresh)
    for _ in range(3):
        _, at = optimiser.advance(by_rows(objectives))
        _, before = control.advance(by_rows(objectives))
        _, begun = other.advance(by_rows(objectives[1:2]))
        alike(at[[0, 2]], before[[0, 2]])
        alike(at[1], begun[0])
    keep = torch.tensor([True, False, True])
    optimiser.select(keep)
    chosen = [objectives[0], objectives[2]]
    for _ in range(2):
        _, at = optimiser.advance(by_rows(chosen))
        alike(at, control.advance(by_rows(objectives))[1][keep])


def test_a_restart_heals_a_row_that_is_no_number():
    x = points(2, 6)
    optimiser = LBFGS(x)
    optimiser.advance(by_rows([lambda v: (v * math.nan).sum(), quadratic(6, 10, 0)]))
    optimiser.restart(torch.tensor([True, False]), x)
    healthy = LBFGS(x[:1])
    for _ in range(3):
        _, at = optimiser.advance(by_rows([rosenbrock, quadratic(6, 10, 0)]))
        alike(at[0], healthy.advance(by_rows([rosenbrock]))[1][0])
