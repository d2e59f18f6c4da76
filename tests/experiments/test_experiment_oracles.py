"""Closed forms and independent implementations behind the experiments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from experiments.adaclip.central import DenseNet, train
from experiments.adaclip.dp_pca import SquareRows, principal_directions
from experiments.adaclip.regression import descend
from experiments.adaclip.theory import descents, distortion, momentum_noise, variances
from experiments.adaclip.whitening import Whitened, noises, spread
from experiments.das.least_squares import ClosedForm, LeastSquares, Watched, snr_of_normalization
from experiments.das.proposition import HuberProblem
from experiments.das.proposition import descend as descend_huber
from experiments.xu.beale import MINIMUM, beale, gradient
from experiments.xu.formulas import (
    constraint,
    cosines,
    optimal_noise,
    paper_rdp,
    proportional_noise,
    theorem_1,
)
from fedsim.clients import SGD
from fedsim.cohorts import FullCohort, PoissonCohort
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import array_record, tensors
from fedsim.mechanisms import AdaClip, Clipping, NoPrivacy
from fedsim.privacy import Ledger, calibrate
from fedsim.randomness import Randomness
from fedsim.strategies import DPFedAvg, sgd
from fedsim.training import ClientData, Trainer


def test_whitening_meets_adaclips_constraint_with_more_noise() -> None:
    """Section 4.3: d sum s^2 against (sum s)^2, both with sum s^2 / b^2 = gamma."""
    s = torch.tensor([4.0, 1.0], dtype=torch.float64)
    assert noises(s) == pytest.approx((2 * 17.0, 25.0))
    for gamma in (1.0, 0.5):
        state = {"m": torch.zeros(2, dtype=torch.float64), "s": s}
        whitening = Whitened(1.0, h2=1.0, gamma=gamma).round_state(state)
        optimal = AdaClip(1.0, h2=1.0, gamma=gamma).round_state(state)
        assert whitening["b"].tolist() == pytest.approx(
            [4 * (2 / gamma) ** 0.5, (2 / gamma) ** 0.5]
        )
        for round_state, total in ((whitening, 34.0), (optimal, 25.0)):
            assert float((s / round_state["b"]).square().sum()) == pytest.approx(gamma)
            assert float(round_state["b"].square().sum()) == pytest.approx(total / gamma)
            assert torch.equal(round_state["scale"], 1 / round_state["b"])


def test_spread_of_the_first_gradients_is_that_of_autograds() -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.rand(30, 4, dtype=torch.float64, generator=draws)
    y = torch.randint(0, 10, (30,), generator=draws)
    rows = []
    for one, label in zip(x, y, strict=True):
        weights = torch.zeros(10, 5, dtype=torch.float64, requires_grad=True)
        logits = weights @ torch.cat([one, torch.ones(1, dtype=torch.float64)])
        cross_entropy(logits[None], label[None]).backward()
        assert weights.grad is not None
        rows.append(weights.grad.flatten())
    torch.testing.assert_close(spread(x, y), torch.stack(rows).std(0, correction=0))


def small_problem(heterogeneity: float = 0.1) -> LeastSquares:
    return LeastSquares(n=30, d=40, m=8, heterogeneity=heterogeneity, seed=3)


class TestQuadratic:
    def test_the_slides_snr_is_the_constant_032307(self) -> None:
        z = calibrate(target_epsilon=5.0, cohort=FullCohort(), rounds=500, delta=1e-6)
        assert z == pytest.approx(21.91456, rel=2e-5)
        assert snr_of_normalization(z, clients=100, d=200) == pytest.approx(0.032307, abs=5e-7)

    def test_snr_is_c_over_the_mean_norm_of_a_share(self) -> None:
        z, n, d = 3.0, 50, 20
        shares = np.random.default_rng(0).standard_normal((20_000, d)) * z / math.sqrt(n)
        mean_norm = np.linalg.norm(shares, axis=1).mean()
        assert snr_of_normalization(z, n, d) == pytest.approx(1 / mean_norm, rel=5e-3)

    def test_gradient_is_zero_at_the_optimum(self) -> None:
        problem = small_problem()
        pulls = [
            A @ A.T @ (problem.optimum - own)
            for A, own in zip(problem.A, problem.optima, strict=True)
        ]
        assert np.abs(np.sum(pulls, axis=0)).max() < 1e-10
        assert problem.gap(problem.optimum) == 0

    def test_gap_is_the_difference_of_the_mean_objective(self) -> None:
        problem = small_problem()

        def objective(w: np.ndarray) -> float:
            residuals = [A.T @ (w - o) for A, o in zip(problem.A, problem.optima, strict=True)]
            return float(np.mean([r @ r / 2 for r in residuals]))

        w = problem.start(1.0)
        assert problem.gap(w) == pytest.approx(objective(w) - objective(problem.optimum))

    def test_trainer_takes_the_closed_forms_step(self) -> None:
        problem, w = small_problem(), small_problem().start(1.0)
        trainer = problem.trainer(lr=0.05, steps=7)
        (block,) = trainer.train(torch.from_numpy(w), np.arange(problem.n), 1)
        assert block.rows is not None
        for client in (0, 11, 29):
            expected = problem.update(w, client, lr=0.05, steps=7)
            np.testing.assert_allclose(block.rows[client].numpy(), expected, rtol=1e-4, atol=1e-5)

    def test_closed_form_sends_the_trainers_rows(self) -> None:
        problem, w = small_problem(), torch.from_numpy(small_problem().start(1.0))
        asked = np.array([0, 4, 11, 29])
        (stepped,) = problem.trainer(lr=0.05, steps=7).train(w, asked, 1)
        (closed,) = ClosedForm(problem, lr=0.05, steps=7).train(w, asked, 1)
        assert stepped.rows is not None
        assert closed.rows is not None
        torch.testing.assert_close(closed.rows, stepped.rows, rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    def test_fedavg_without_noise_reaches_the_optimum_of_agreeing_clients(self) -> None:
        problem = small_problem(heterogeneity=0.0)
        strategy = DPFedAvg(mechanism=NoPrivacy("uniform"), cohort=FullCohort(problem.n))
        start = array_record({"0.weight": torch.from_numpy(problem.start(1.0)[None]).float()})
        grid = LocalGrid(problem.trainer(lr=0.3, steps=10))
        reached = tensors(strategy.start(grid, start, 40).arrays)["0.weight"].numpy().ravel()
        away = np.linalg.norm(problem.start(1.0) - problem.optimum)
        assert np.linalg.norm(reached - problem.optimum) < away / 30

    def test_clipped_updates_are_never_longer_than_normalised_ones(self) -> None:
        problem, bound = small_problem(), 0.4
        watched = Watched(problem.trainer(lr=0.02, steps=5), Clipping(bound))
        strategy = DPFedAvg(
            mechanism=Clipping(bound),
            cohort=FullCohort(problem.n),
            noise_multiplier=0.5,
            seed=1,
        )
        start = array_record({"0.weight": torch.from_numpy(problem.start(1.0)[None]).float()})
        strategy.start(LocalGrid(watched), start, 15)
        assert len(watched.bounded) == 15
        assert max(watched.bounded) <= bound
        assert min(watched.bounded) < 0.9 * bound


class TestXu:
    def test_lemma_1s_numbers(self) -> None:
        s = np.array([12.0, 6.0])
        np.testing.assert_allclose(proportional_noise(s), [16.970563, 8.485281], rtol=1e-7)
        np.testing.assert_allclose(optimal_noise(s), [14.696938, 10.392305], rtol=1e-7)
        assert constraint(s, proportional_noise(s)) == pytest.approx(1)
        assert constraint(s, optimal_noise(s)) == pytest.approx(1)
        assert constraint(s, np.array([17.0, 8.5])) == pytest.approx(0.9965, abs=5e-5)
        assert (optimal_noise(s) ** 2).sum() == pytest.approx(324)

    @pytest.mark.parametrize(
        ("sigma", "mean", "median"),
        [
            ((17.0, 8.5), 0.470, 0.829),
            ((13.5, 13.5), 0.478, 0.734),
            ((12.4, 24.8), 0.400, 0.572),
        ],
    )
    def test_cosines_of_lemma_1s_example(
        self, sigma: tuple[float, float], mean: float, median: float
    ) -> None:
        # 200,000 draws: standard error 1.4e-3.
        here = cosines(np.array([10.0, 5.0]), np.array(sigma), 200_000, seed=2)
        assert here[:2] == pytest.approx((mean, median), abs=6e-3)
        assert here[2] == pytest.approx(0.6, abs=0.1)

    def test_theorem_1_gives_8_54_and_at_best_6_92(self) -> None:
        orders = [
            theorem_1(noise_multiplier=0.9, rate=0.01, steps=1800, delta=1e-5, alpha=order)
            for order in range(2, 9)
        ]
        assert orders[4] == pytest.approx(8.54, abs=0.01)
        assert min(orders) == orders[2] == pytest.approx(6.92, abs=0.01)

    def test_the_papers_four_is_poisson_rdp_with_the_conversion_of_2017(self) -> None:
        epsilon = paper_rdp(noise_multiplier=0.9, rate=0.01, steps=1800, delta=1e-5, alpha=6)
        assert epsilon == pytest.approx(4.015, abs=1e-3)

    def test_beale_function_and_its_gradient(self) -> None:
        assert beale(*MINIMUM) == 0
        w, step = np.array([1.0, 1.8]), 1e-6
        for k in range(2):
            ahead, behind = w.copy(), w.copy()
            ahead[k] += step
            behind[k] -= step
            slope = (beale(*ahead) - beale(*behind)) / (2 * step)
            assert gradient(w)[k] == pytest.approx(slope, rel=1e-6)


class OfClients(Randomness):
    """Gives examples the draws of clients."""

    def generators(self, purpose, *, level, **address):
        return super().generators(purpose, level="client", **address)


class TestAdaClip:
    @pytest.mark.parametrize("gamma", [1.0, 0.1])
    def test_distortion_is_what_clipping_loses_plus_the_noise(self, gamma: float) -> None:
        found = distortion(gamma, z=0.3, draws=20_000)
        sum_of_s = (0.01 ** (np.arange(20) / 19)).sum()
        assert found["noise"] == pytest.approx(0.09 * sum_of_s**2 / gamma)
        assert abs(found["measured"] - found["closed"]) < 4 * found["error"]
        assert found["error"] < 0.01 * found["closed"]
        assert found["clipped"] <= gamma
        assert (found["clipping"] > 1e-3) == (gamma == 1.0)

    def test_noises_variance_has_to_be_subtracted_from_the_estimate(self) -> None:
        found = variances(0.1, z=0.1, draws=40_000)
        assert found["clipped"] == 0
        assert abs(found["measured"] - found["closed"]) < 4 * found["error"]
        # With the noise's own variance it would be off by 150 standard errors.
        assert distortion(0.1, z=0.1, draws=2)["noise"] > 100 * found["error"]

    def test_mean_squared_gradients_are_those_of_the_recursion_and_below_the_bound(self) -> None:
        d, z, rate, steps = 30, 0.5, 0.1, 200
        found = descents(d, z, rate, steps, runs=400)
        s = np.array([1.0, *[0.01] * (d - 1)])
        noises = {"adaclip": s.sum() ** 2, "isotropic": d * (s**2).sum()}
        for name, noise in noises.items():
            variance, square, total = (s**2).sum() + z**2 * noise, 1.0, 0.0
            for _ in range(steps):
                total += square
                square = (1 - rate) ** 2 * square + rate**2 * variance
            # 400 runs from starts of mean square 1: 2 % is four standard errors.
            assert found[f"{name} measured"] == pytest.approx(total / steps, rel=0.02)
            assert found[f"{name} bound"] == pytest.approx(
                1 / (rate * steps) + rate * variance, rel=0.02
            )
            assert found[f"{name} measured"] < found[f"{name} bound"]

    @pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
    def test_momentum_scales_the_noise_of_a_step(self, momentum: float) -> None:
        found = momentum_noise(momentum, draws=40_000)
        assert found["closed"] == pytest.approx(((1 - momentum) / (1 + momentum)) ** 0.5)
        assert found["measured"] == pytest.approx(found["closed"], rel=0.015)

    @pytest.mark.slow
    def test_error_of_clipping_by_dimension(self) -> None:
        # An autoregression in every coordinate: rate / (2 - rate) times the variance of what is
        # added, 5.03e-5 a coordinate of noise and .005 for the one in which the data vary.
        settings = {
            "dimension": 400, "steps": 1500, "rates": [0.01, 0.03], "noise-multiplier": 0.1,
            "method": "clipping", "clip-norm": 10.0, "law": "two-point",
        }  # fmt: skip
        error, noise, clipped = descend(settings, range(1, 13))
        for rate, found in zip((0.01, 0.03), error.mean(1).tolist(), strict=True):
            assert found == pytest.approx(rate / (2 - rate) * (400 + 1), rel=0.1)
        assert noise.mean().item() == pytest.approx(400, rel=0.01)
        assert not clipped.any()

    def test_rows_are_the_descents_of_autograd(self) -> None:
        net = DenseNet((5, 7, 6, 3))
        vector = net.start(4)
        draws = torch.Generator().manual_seed(0)
        x = torch.randn(9, 5, dtype=torch.float64, generator=draws)
        y = torch.randint(0, 3, (9,), generator=draws)
        rows = net.descents(vector, x, y).dense()
        for k in range(len(x)):
            leaf = vector.clone().requires_grad_()
            loss = cross_entropy(net.logits(leaf, x[k : k + 1]), y[k : k + 1])
            (slope,) = torch.autograd.grad(loss, leaf)
            torch.testing.assert_close(rows[k], -slope)

    def test_central_dp_sgd_is_dp_fedavg_with_one_example_a_client(self) -> None:
        draws = torch.Generator().manual_seed(1)
        x = torch.randn(80, 6, dtype=torch.float64, generator=draws)
        y = torch.randint(0, 3, (80,), generator=draws)
        mechanism, z, rate, seed = Clipping(0.7), 0.8, 0.3, 5
        model = nn.Sequential(nn.Linear(6, 3)).double()
        clients = Trainer(
            model,
            SGD(lr=1.0),
            ClientData(x, y, [np.array([k]) for k in range(80)]),
            batch_size=1,
            steps=1,
            randomness=Randomness(seed),
        )
        strategy = DPFedAvg(
            mechanism=mechanism,
            cohort=PoissonCohort(0.2, population=80),
            noise_multiplier=z,
            seed=seed,
            server_optimizer=sgd(rate),
            hardened_noise=False,
        )
        central = train(
            DenseNet((6, 3)),
            lambda index: x[index],
            y,
            (x, y),
            mechanism=mechanism,
            noise_multiplier=z,
            batch=16.0,
            epochs=2,
            optimizer=sgd(rate),
            seed=seed,
            ledger=Ledger(delta=1e-5),
            randomness=OfClients(seed, strategy.randomness.release),
        )
        zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        reached = tensors(strategy.start(LocalGrid(clients), array_record(zero), 10).arrays)
        federated = torch.cat([tensor.ravel() for tensor in reached.values()])
        torch.testing.assert_close(federated, central.vector, rtol=0, atol=1e-6)
        assert strategy.ledger.epsilon(1e-5) == pytest.approx(central.ledger.epsilon(1e-5))


class TestPrivatePca:
    def test_inner_products_of_rows_are_those_of_the_matrices(self) -> None:
        x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        dense = SquareRows(x).dense()
        torch.testing.assert_close(dense @ dense.T, (x @ x.T).square())
        torch.testing.assert_close(SquareRows(x).norms(), dense.norm(dim=1))
        weights = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(SquareRows(x).sum(weights), weights @ dense)

    def test_without_noise_it_is_the_pca_of_normalised_rows(self) -> None:
        x = torch.randn(300, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        x = x * torch.tensor([4.0, 3.0, 2.0, 1.0, 0.5, 0.5, 0.5, 0.5], dtype=torch.float64)
        found = principal_directions(x, 3, noise_multiplier=0.0, seed=1, ledger=Ledger(delta=1e-5))
        unit = x / x.norm(dim=1, keepdim=True)
        _, vectors = torch.linalg.eigh(unit.T @ unit)
        overlap = (found * vectors[:, -3:].flip(1)).sum(0).abs()
        torch.testing.assert_close(overlap, torch.ones(3, dtype=torch.float64), atol=1e-6, rtol=0)

    def test_noise_on_the_matrix_is_symmetric_and_isotropic(self) -> None:
        # No signal at all: each entry's std is z on the diagonal and z / sqrt(2) off it.
        x, z = torch.full((1, 40), 1e-30), 1e6
        ledger = Ledger(delta=1e-5)
        directions = principal_directions(x, 40, noise_multiplier=z, seed=3, ledger=ledger)
        torch.testing.assert_close(
            directions.T @ directions, torch.eye(40, dtype=torch.float64), atol=1e-9, rtol=0
        )
        assert len(ledger.entries) == 1


def test_hubers_gradient_is_that_of_its_loss_and_at_most_g_long() -> None:
    problem = HuberProblem(LeastSquares(4, 6, 3, 1.0, seed=2), threshold=0.5)
    points = 3 * np.random.default_rng(0).standard_normal((5, 6))
    at = np.repeat(points[None], 4, axis=0)
    gradients = problem.gradients(at)
    for k, step in enumerate(1e-6 * np.eye(6)):
        slopes = (problem.values(points + step) - problem.values(points - step)) / 2e-6
        np.testing.assert_allclose(gradients.mean(0)[:, k], slopes, atol=1e-8)
    assert 0 < np.linalg.norm(gradients, axis=2).max() <= problem.lipschitz


def test_without_noise_and_threshold_a_round_is_that_of_the_quadratic() -> None:
    squares = LeastSquares(4, 6, 3, 1.0, seed=2)
    problem = HuberProblem(squares, threshold=1e6)
    start = squares.start(1.0)
    values = descend_huber(
        problem, start[None], eta=0.1, steps=3, noise=0.0, rounds=1, seeds=[1, 2]
    )
    after = start + np.mean([squares.update(start, i, lr=0.1, steps=3) for i in range(4)], axis=0)
    np.testing.assert_allclose(values[-1], np.repeat(problem.values(after[None]), 2), rtol=1e-10)
    np.testing.assert_allclose(problem.optimum[0], squares.optimum, atol=1e-6)
