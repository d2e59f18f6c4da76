"""The best of a random number of runs: its price against oracles, exact leaks and another code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Event
from fedsim.privacy.laws import FullLaw, Law, PoissonLaw
from fedsim.privacy.laws.selection import Selection, SelectionLaw
from fedsim.privacy.losses import ORDERS

SAMPLED, ALONE = PoissonLaw(rate=0.01), FullLaw(adjacency="add-remove")


def epsilon(base: Law, rounds: int, z: float, distribution, mean: float) -> float:
    law = SelectionLaw(
        base=base,
        invocations=rounds,
        distribution=distribution,
        mean=mean,
        rounds=rounds,
        adjacency=base.adjacency,
    )
    event = Event(noise_multiplier=z, law=law)
    assert Event.from_dict(event.to_dict()) == event
    return Accountant([event]).epsilon(1e-5)


@pytest.mark.parametrize(
    ("base", "rounds", "z", "distribution", "expected"),
    [
        (SAMPLED, 1000, 1.1, "logarithmic", [2.3057, 2.6885, 2.9189, 3.3757, 3.5541]),
        (SAMPLED, 1000, 1.1, "geometric", [2.5145, 3.0829, 3.4328, 4.1301, 4.4010]),
        (SAMPLED, 1000, 1.1, "poisson", [2.1250, 2.7302, 3.6391, 9.5059, 13.570]),
        (ALONE, 1, 4.0, "logarithmic", [1.4184, 1.6505, 1.7841, 2.0358, 2.1299]),
        (ALONE, 1, 4.0, "geometric", [1.5795, 1.9397, 2.1537, 2.5628, 2.7162]),
        (ALONE, 1, 4.0, "poisson", [1.2966, 1.7141, 2.3538, 6.1260, 8.3872]),
    ],
)
def test_the_price_is_the_published_one(base, rounds, z, distribution, expected) -> None:
    found = [epsilon(base, rounds, z, distribution, mean) for mean in (2, 5, 10, 50, 100)]
    assert found == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize(("distribution", "shape"), [("logarithmic", 0.0), ("geometric", 1.0)])
@pytest.mark.parametrize("mean", [3.0, 20.0])
def test_another_accountant_agrees(distribution, shape, mean) -> None:
    base = SelfComposedDpEvent(PoissonSampledDpEvent(0.05, GaussianDpEvent(1.3)), 200)
    other = RdpAccountant(ORDERS)
    other.compose(RepeatAndSelectDpEvent(base, mean, shape))
    found = epsilon(PoissonLaw(rate=0.05), 200, 1.3, distribution, mean)
    assert found == pytest.approx(other.get_epsilon(1e-5), rel=1e-6)


def leak(distribution, mean: float, z: float, at: float) -> float:
    """Delta at epsilon ``at`` of the best of K draws of one Gaussian, by a threshold on it.

    In closed form, by the generating function of K; 0 draws are among the smallest values.
    """
    selection = Selection(distribution, mean)

    def largest(shift: float) -> np.ndarray:
        """Distribution function of the largest draw."""
        below = norm.cdf(np.linspace(-12, 14, 200_001) - shift)
        if distribution == "poisson":
            return np.exp(mean * (below - 1))
        p = 1 - selection.gamma
        if distribution == "geometric":
            return selection.gamma * below / (1 - p * below)
        return np.log1p(-p * below) / math.log1p(-p)

    without, present = largest(0.0), largest(1 / z)
    # Events above and below a threshold, in both directions.
    above = (1 - present) - math.exp(at) * (1 - without)
    below = without - math.exp(at) * present
    return max(above.max(), below.max())


@pytest.mark.parametrize("z", [4.0, 1.0])
@pytest.mark.parametrize("distribution", ["geometric", "poisson", "logarithmic"])
@pytest.mark.parametrize("mean", [2.0, 10.0, 50.0])
def test_no_price_is_below_what_a_selected_gaussian_leaks(z, distribution, mean) -> None:
    assert leak(distribution, mean, z, epsilon(ALONE, 1, z, distribution, mean)) <= 1e-5


@pytest.mark.parametrize(
    ("distribution", "mean", "z", "expected"),
    [
        ("geometric", 2.0, 4.0, 0.9684),
        ("geometric", 10.0, 4.0, 1.0606),
        ("geometric", 50.0, 4.0, 1.1463),
        ("poisson", 50.0, 4.0, 3.6147),
        ("geometric", 2.0, 1.0, 4.5362),
        ("geometric", 10.0, 1.0, 4.8865),
        ("geometric", 50.0, 1.0, 5.2141),
        ("poisson", 50.0, 1.0, 17.91),
    ],
)
def test_what_a_selected_gaussian_leaks_is_the_published_figure(
    distribution, mean, z, expected
) -> None:
    found = brentq(
        lambda at: leak(distribution, mean, z, at) - 1e-5, 0.5 * expected, 1.2 * expected
    )
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("distribution", ["logarithmic", "geometric", "poisson"])
def test_the_number_of_runs_has_its_mean(distribution) -> None:
    generator = np.random.default_rng(3)
    drawn = [Selection(distribution, 6.0).draw(generator) for _ in range(20_000)]
    error = np.std(drawn) / math.sqrt(len(drawn))
    assert np.mean(drawn) == pytest.approx(6.0, abs=5 * error)
    assert min(drawn) == (0 if distribution == "poisson" else 1)


def test_what_is_no_selection_is_refused() -> None:
    with pytest.raises(FedsimError, match="of a mean above 1"):
        Selection("geometric", 1.0)
    with pytest.raises(FedsimError, match="must be logarithmic, geometric, poisson"):
        Selection("uniform", 3.0)  # type: ignore[arg-type]
