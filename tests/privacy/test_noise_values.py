from __future__ import annotations

from dataclasses import replace

import pytest
from release_helpers import plan_of

from fedsim.cohorts import PoissonCohort
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping, NoPrivacy
from fedsim.privacy import Event
from fedsim.privacy.noise import Independent


def test_independent_noise_is_the_fresh_draws_and_keeps_nothing() -> None:
    noise = Independent(1.1)
    fresh = object()
    assert noise.combine(lambda: fresh, noise.start()) == (fresh, {})
    assert not noise.correlated


def test_a_plans_event_counts_every_release_of_a_round() -> None:
    cohort = PoissonCohort(rate=0.1, population=50)
    plan = plan_of(Clipping(1.0), Independent(1.1), 5)
    plan = replace(plan, sampler=cohort, releases=2)
    assert plan.event().times(20) == Event.of(cohort, 1.1, count=40)
    assert not replace(plan, mechanism=NoPrivacy(), noise=Independent(0.0)).event().private


@pytest.mark.parametrize("multiplier", [-0.1, float("nan")])
def test_a_multiplier_below_zero_is_refused(multiplier: float) -> None:
    with pytest.raises(FedsimError, match="noise-multiplier"):
        Independent(multiplier)
