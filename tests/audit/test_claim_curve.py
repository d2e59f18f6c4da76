from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from fedsim.audit import Claim
from fedsim.cohorts import FixedCohort, FullCohort, PoissonCohort
from fedsim.errors import FedsimError
from fedsim.privacy import Entry, Event, Ledger
from fedsim.privacy.laws import PoissonLaw

RATES = np.linspace(0.001, 0.999, 200)


@pytest.mark.parametrize("mu", [0.4, 1.0, 2.5])
def test_a_gaussians_curve_is_the_analytic_one_from_below(mu: float) -> None:
    exact = norm.cdf(norm.ppf(1 - RATES) - mu)
    curve = Claim.gaussian(mu).curve(RATES)
    assert (curve <= exact + 1e-9).all()
    np.testing.assert_allclose(curve, exact, atol=3e-3)


def test_releases_compose_and_replacing_doubles_the_shift() -> None:
    three = Claim((Event.of(FullCohort(), 2.0),) * 3).curve(RATES)
    np.testing.assert_allclose(three, Claim.gaussian(3**0.5 / 2).curve(RATES), atol=1e-9)
    replaced = Claim((Event.of(FullCohort(adjacency="replace-one"), 2.0),)).curve(RATES)
    np.testing.assert_allclose(replaced, Claim.gaussian(1.0).curve(RATES), atol=1e-9)


@pytest.mark.parametrize("cohort", [PoissonCohort(0.2), FixedCohort(3, 10), FullCohort()])
def test_a_curve_falls_is_convex_and_ends_at_zero(cohort: PoissonCohort) -> None:
    curve = Claim((Event.of(cohort, 1.0),) * 2).curve(np.linspace(0, 1, 101))
    slopes = np.diff(curve)
    assert (slopes <= 1e-12).all()
    assert (np.diff(slopes) >= -1e-9).all()
    assert curve[-1] == 0
    assert 0.99 < curve[0] <= 1


def test_sampling_raises_the_curve() -> None:
    sampled = Claim((Event.of(PoissonCohort(0.2), 1.0),)).curve(RATES)
    assert (sampled >= Claim.gaussian(1.0).curve(RATES) - 1e-3).all()
    assert sampled[100] > Claim.gaussian(1.0).curve(RATES)[100] + 0.1


def test_a_ledger_that_claims_nothing_cannot_be_audited() -> None:
    ledger = Ledger()
    ledger.record(
        Entry(event=Event(noise_multiplier=1.0, law=PoissonLaw(), guarantee=False), round=1)
    )
    with pytest.raises(FedsimError, match="no claim to audit"):
        Claim.from_entries(ledger.entries, 1e-5).curve(0.5)
