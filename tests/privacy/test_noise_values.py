from __future__ import annotations

import pytest

from fedsim.cohorts import FullCohort, PoissonCohort
from fedsim.errors import FedsimError
from fedsim.privacy.noise import Independent


def test_independent_noise_is_the_fresh_draws_and_keeps_nothing() -> None:
    noise = Independent(1.1)
    fresh = object()
    assert noise.combine(fresh, noise.start()) == (fresh, {})
    assert not noise.correlated


def test_a_runs_event_counts_every_release_of_every_round() -> None:
    cohort = PoissonCohort(rate=0.1, population=50)
    event = Independent(1.1).event(cohort, rounds=20, releases=2)
    assert event == cohort.event(1.1, count=40)
    assert not Independent(1.1).event(FullCohort(9), guarantee=False).private


@pytest.mark.parametrize("multiplier", [-0.1, float("nan")])
def test_a_multiplier_below_zero_is_refused(multiplier: float) -> None:
    with pytest.raises(FedsimError, match="noise-multiplier"):
        Independent(multiplier)
