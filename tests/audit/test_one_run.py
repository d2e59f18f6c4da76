from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from whitebox.one_run import is_refuted, refuted_p_value

from fedsim.audit import Claim
from fedsim.privacy.losses import gaussian_epsilon


def gaussian_mu_bound(canaries: int, guesses: int, correct: int, risk: float) -> float:
    """Largest mu of a Gaussian claim that these guesses refute."""
    low, high = 0.0, 50.0
    for _ in range(40):
        mu = (low + high) / 2

        def shrink(probability: float, mu: float = mu) -> float:
            return float(ndtr(ndtri(probability) - mu))

        refuted = is_refuted(canaries, guesses, correct, risk, shrink)
        low, high = (mu, high) if refuted else (low, mu)
    return low


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "epsilon"),
    [(1000, 100, 95, 3.323300), (200, 200, 150, 1.734801)],
)
def test_the_bound_from_the_whole_curve_is_the_published_one(
    canaries: int, guesses: int, correct: int, epsilon: float
) -> None:
    mu = gaussian_mu_bound(canaries, guesses, correct, 0.05)
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(epsilon, abs=1e-5)


def test_a_claim_is_refuted_at_the_risk_at_which_its_mu_is_the_bound() -> None:
    mu = gaussian_mu_bound(400, 100, 90, 0.01)
    assert refuted_p_value(400, 100, 90, Claim.gaussian(mu)) == pytest.approx(0.01, rel=1e-3)
    assert refuted_p_value(400, 100, 90, Claim.gaussian(2 * mu)) > 0.01
    assert refuted_p_value(400, 100, 50, Claim.gaussian(mu)) == 1


def test_guesses_at_the_claim_refute_it_no_more_often_than_stated() -> None:
    # The best guesser of a Gaussian's coins, each canary on its own coordinate.
    rng, mu, m, k = np.random.default_rng(1), 1.0, 300, 60
    claim = Claim.gaussian(mu)
    p_values = []
    for _ in range(100):
        coins = rng.random(m) < 0.5
        scores = mu * coins + rng.standard_normal(m)
        order = np.argsort(scores)
        correct = int((~coins[order[: k // 2]]).sum() + coins[order[-k // 2 :]].sum())
        p_values.append(refuted_p_value(m, k, correct, claim))
    assert (np.array(p_values) <= 0.05).mean() <= 0.05
