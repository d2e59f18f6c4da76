"""ADADP's closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clients_helpers import make_data, make_mlp
from torch import nn

from fedsim.clients import SGD, AdadpLR, Step
from fedsim.clients.base import DenseGradient
from fedsim.randomness import Randomness
from fedsim.training import ClientData, Trainer


def iterate(algorithm, theta, gradients, round=1):
    """State after these gradients, one client, float64."""
    theta = torch.tensor([theta], dtype=torch.float64)
    numbers = {k: torch.tensor([v], dtype=torch.float64) for k, v in algorithm.numbers().items()}
    state = algorithm.init(theta, numbers)
    for index, g in enumerate(gradients):
        algorithm.step(
            state, DenseGradient(torch.tensor([g], dtype=torch.float64)), Step(round, index)
        )
    return state


G = [(0.5, -2.0), (0.1, -1.0)]


@pytest.mark.parametrize(
    ("settings", "theta", "eta"),
    [
        ({"tol": 0.1}, (1.0, -3.0), 0.36),
        ({"tol": 0.1, "exponent": 0.5}, (1.0, -3.0), 0.36349082),
        (
            {"tol": 0.1, "exponent": 0.5, "discard": False, "keep": "half"},
            (0.88, -2.4),
            0.36349082,
        ),
        ({"tol": 1.0, "keep": "half"}, (0.88, -2.4), 0.44),
        ({"tol": 1.0}, (0.8, -2.2), 0.44),
        ({"tol": 0.1, "exponent": 0.5, "discard": False}, (0.8, -2.2), 0.36349082),
        ({"tol": 1.0, "keep": "half", "eta_max": 0.41}, (0.88, -2.4), 0.41),
    ],
)
def test_one_iteration_by_hand(settings, theta, eta):
    state = iterate(AdadpLR(lr=0.4, **settings), (1.0, -3.0), G)
    torch.testing.assert_close(state["theta"][0], torch.tensor(theta, dtype=torch.float64))
    assert state["eta"].item() == pytest.approx(eta, rel=1e-7)


def test_the_error_divides_by_the_full_step_where_it_is_large():
    # (0.08 / 1, 0.2 / 2.2): 0.12109691; eta times tol / err while that lies in the clamp.
    state = iterate(AdadpLR(lr=0.4, tol=0.12), (1.0, -3.0), G)
    assert state["eta"].item() == pytest.approx(0.4 * 0.12 / 0.12109691, rel=1e-6)


def test_the_plain_error_is_the_norm_of_the_difference():
    # (0.08, 0.2) undivided, where the full step is large: 0.21540659.
    state = iterate(AdadpLR(lr=0.4, tol=0.21, error="plain"), (1.0, -3.0), G)
    assert state["eta"].item() == pytest.approx(0.4 * 0.21 / 0.21540659, rel=1e-6)


@pytest.mark.parametrize("keep", ["full", "half"])
@pytest.mark.parametrize("error", ["relative", "plain"])
def test_twenty_iterations_are_those_of_a_plain_loop(error, keep):
    generator = torch.Generator().manual_seed(3)
    gradients = 3 * torch.randn(40, 5, generator=generator, dtype=torch.float64)
    theta = 2 * torch.randn(5, generator=generator, dtype=torch.float64)
    algorithm = AdadpLR(lr=0.05, tol=0.3, error=error, keep=keep)
    state = iterate(algorithm, theta.tolist(), gradients.tolist())
    eta, accepted = 0.05, 0
    for first, second in gradients.view(20, 2, 5):
        full, hat = theta - eta * first, theta - eta / 2 * first - eta / 2 * second
        scale = full.abs().clamp(min=1) if error == "relative" else 1
        err = float(torch.linalg.vector_norm((full - hat) / scale))
        if err <= 0.3:
            theta, accepted = full if keep == "full" else hat, accepted + 1
        eta *= min(max(0.3 / err, 0.9), 1.1)
    torch.testing.assert_close(state["theta"][0], theta, rtol=0, atol=1e-12)
    assert state["eta"].item() == pytest.approx(eta, rel=1e-12)
    assert 0 < state["accepted"].item() == accepted < 20


def test_an_error_equal_to_the_tolerance_is_accepted():
    # full - hat = eta/2 (G2 - G1) = 0.25, exactly.
    state = iterate(AdadpLR(lr=0.5, tol=0.25), (0.0,), [(1.0,), (2.0,)])
    assert state["accepted"].item() == 1
    assert state["eta"].item() == 0.5


def test_rejection_restores_parameters_bit_for_bit():
    start = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    big = [tuple(10.0 * i for i in range(7)), tuple(-9.0 * i for i in range(7))]
    state = iterate(AdadpLR(lr=0.3), start, big)
    assert state["rejected"].item() == 1
    assert state["theta"][0].tolist() == start


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{}, {"discard": False}, {"tol": float("inf")}])
def test_a_step_that_is_not_finite_is_rejected_and_lowers_the_rate(bad, settings):
    state = iterate(AdadpLR(lr=0.3, **settings), (0.5, 0.25), [(0.1, 0.1), (bad, 0.1)])
    assert state["theta"][0].tolist() == [0.5, 0.25]
    assert state["eta"].item() == pytest.approx(0.27)
    assert state["rejected"].item() == 1


def test_an_error_of_zero_raises_the_rate_by_alpha_max():
    state = iterate(AdadpLR(lr=0.3), (0.5,), [(0.0,), (0.0,)])
    assert state["eta"].item() == pytest.approx(0.33)


def test_on_a_quadratic_the_error_is_exact():
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    hessian = root @ root.T / 20
    theta = torch.rand(1, 6, generator=generator, dtype=torch.float64) * 0.2
    eta = 0.05
    first = theta @ hessian
    second = (theta - eta / 2 * first) @ hessian
    expected = eta**2 / 4 * torch.linalg.vector_norm(first @ hessian)
    algorithm = AdadpLR(lr=eta, tol=expected.item() / 0.97)
    state = iterate(algorithm, theta[0].tolist(), [first[0].tolist(), second[0].tolist()])
    assert state["eta"].item() == pytest.approx(eta / 0.97, rel=1e-9)


def test_a_dangling_half_step_is_dropped():
    algorithm = AdadpLR(lr=0.3, tol=10.0)
    two = iterate(algorithm, (0.5, 0.25), G)
    three = iterate(algorithm, (0.5, 0.25), [*G, (1.0, 1.0)])
    assert torch.equal(algorithm.finish(two), algorithm.finish(three))


def run(algorithm, dtype=torch.float64, path="auto", steps=9, **settings):
    data = make_data([9, 14, 5, 30], dtype=dtype)
    trainer = Trainer(
        make_mlp(dtype=dtype), algorithm, data, batch_size=4, steps=steps,
        randomness=Randomness(2), path=path, **settings,
    )  # fmt: skip
    return trainer.fit(trainer.initial(), np.arange(4), 1)


@pytest.mark.parametrize("path", ["plain", "layered"])
def test_without_adaptation_it_is_sgd_with_half_the_rate(path):
    still = AdadpLR(lr=0.4, keep="half", alpha_min=1.0, alpha_max=1.0, discard=False)
    adadp, sgd = run(still, path=path, steps=8), run(SGD(lr=0.2), path=path, steps=8)
    assert torch.equal(adadp.theta, sgd.theta)


def test_decisions_are_each_clients_own():
    local = run(AdadpLR(lr=0.3, tol=0.1))
    assert len(set(local.metrics["eta"])) > 1
    assert (local.metrics["accepted"] + local.metrics["rejected"] == 4).all()
    assert 0 < local.metrics["accepted"].sum() < 16


@pytest.mark.parametrize("error", ["relative", "plain"])
@pytest.mark.parametrize("keep", ["full", "half"])
def test_the_error_from_factors_is_that_of_dense_gradients(keep, error):
    for lr, tol in ((0.3, 0.2), (3.0, 2.0)):  # with the larger rate coordinates exceed 1
        algorithm = AdadpLR(lr=lr, tol=tol, keep=keep, error=error, eta_max=5.0)
        layered, plain = run(algorithm, path="layered"), run(algorithm, path="plain")
        np.testing.assert_allclose(layered.metrics["eta"], plain.metrics["eta"], rtol=1e-10)
        torch.testing.assert_close(layered.theta, plain.theta, rtol=0, atol=1e-10)


def test_the_rate_stays_in_its_bounds_and_moves_at_most_by_alpha():
    for steps in (2, 4, 20):
        eta = run(AdadpLR(lr=0.1, eta_min=0.08, eta_max=0.2), steps=steps).metrics["eta"]
        assert ((eta >= 0.08) & (eta <= 0.2)).all()
        assert (eta <= 0.1 * 1.1 ** (steps // 2) * (1 + 1e-12)).all()
        assert (eta >= 0.1 * 0.9 ** (steps // 2) * (1 - 1e-12)).all()


@pytest.mark.parametrize("lr", [1e-4, 1e-2])
def test_the_limit_of_the_rate_does_not_depend_on_where_it_starts(lr):
    still = [(0.0,)] * 260  # no error: 130 iterations of alpha_max, more than 1e5 in all
    state = iterate(AdadpLR(lr=lr), (0.5,), still)
    assert state["eta"].item() == AdadpLR().eta_max
    assert AdadpLR(lr=lr).report(state)["at-limit"].item() == 1
    early = iterate(AdadpLR(lr=lr), (0.5,), still[:40])
    assert early["eta"].item() == pytest.approx(lr * 1.1**20)
    assert AdadpLR(lr=lr).report(early)["at-limit"].item() == 0


def test_clients_whose_classes_can_be_separated_stay_finite_for_a_thousand_iterations():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 2
    x = torch.randn(40, 3, generator=generator) * 0.1 + 4.0 * (2.0 * y[:, None] - 1)
    model = nn.Sequential(nn.Linear(3, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    trainer = Trainer(
        model, AdadpLR(lr=1.0), ClientData(x, y, [np.arange(0, 20), np.arange(20, 40)]),
        batch_size=10, steps=2000, randomness=Randomness(0),
    )  # fmt: skip
    local = trainer.fit(trainer.initial(), np.arange(2), 1)
    assert torch.isfinite(local.theta).all()
    assert (local.metrics["eta"] <= 10.0).all()


def test_after_its_rounds_of_adaptation_it_steps_plainly_with_a_falling_rate():
    algorithm = AdadpLR(lr=0.4, adapt_rounds=50)
    state = iterate(algorithm, (1.0, -3.0), G, round=53)
    rate = 0.4 / (1 + 0.1 * 3)
    expected = torch.tensor([1.0 - rate * 0.6, -3.0 + rate * 3.0], dtype=torch.float64)
    torch.testing.assert_close(state["theta"][0], expected)
    assert state["eta"].item() == 0.4


def test_rates_of_a_sweep_side_by_side_are_those_of_each_alone():
    data = make_data([9, 14])

    def trainer(lr):
        return Trainer(
            make_mlp(), AdadpLR(lr=lr, tol=5.0, eta_max=limits[lr]), data, batch_size=4,
            steps=80, randomness=Randomness(2),
        )  # fmt: skip

    limits = {0.01: 0.1, 0.2: 20.0}
    numbers = [AdadpLR(lr=lr, tol=5.0, eta_max=limits[lr]).numbers() for lr in limits]
    columns = {name: [numbers[0][name], numbers[1][name]] for name in numbers[0]}
    base = trainer(0.2)
    both = base.fit(base.initial(), np.array([0, 0]), 1, numbers=columns)
    for k, lr in enumerate(limits):
        alone = trainer(lr).fit(base.initial(), np.array([0]), 1)
        assert torch.equal(both.theta[k], alone.theta[0])
        assert both.metrics["eta"][k] == alone.metrics["eta"][0]
    assert both.metrics["eta"][0] == pytest.approx(0.1, rel=1e-6)  # its own limit
    assert both.metrics["at-limit"].tolist() == [1, 0]
