"""A small version of `benchmarks/audit_power.py`: one seed, a small federation, checks alone."""

from __future__ import annotations

import pytest
from bugs import BUGS
from leaks import OF_ATTACKS, OF_BUDGETS
from planted import strategies
from slow_cases import slow_but
from whitebox.strategy_audit import audit
from whitebox.target import StrategyTarget

from fedsim.audit import Verdict
from fedsim.cohorts import Cohort, FixedCohort, FullCohort, PoissonCohort
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    Mechanism,
    Normalization,
    PerLayer,
    PrivateScalar,
    QuantileClipping,
)

POISSON = PoissonCohort(0.2, 200)
OF_CONFIGS = {"two configs of one seed share noise", *OF_BUDGETS, *OF_ATTACKS}
"""Detected only where there are two configs to compare, or runs of many seeds."""
OF_MORE_ROUNDS = {
    "every std times .97",
    "two clients always together",
    "one client half as often again",
}
"""Too small to be seen in so few rounds."""


def checked(mechanism: Mechanism, cohort: Cohort = POISSON, **settings: str) -> Verdict:
    factory = strategies(mechanism, cohort, z=2.0, **settings)
    return audit(factory, worlds=(), canaries=0, full=StrategyTarget(factory, rounds=30), seed=3)


@pytest.mark.parametrize(
    ("name", "seen_by"),
    slow_but(
        1,
        [
            ("no noise from round 21 on", "noise: presence"),
            ("clip after averaging", "bound: what one client moves"),
            ("noise used again in every second round", "noise: exact repeats"),
            ("a cohort's draw used again", "sampler: overlap of rounds"),
            ("every tenth line missing", "ledger: a line for every release"),
            ("no release when a client fails", "plan: releases"),
        ],
    ),
)
@pytest.mark.usefixtures("few_system_rounds")
def test_a_planted_bug_is_caught_and_named(name: str, seen_by: str) -> None:
    with BUGS[name]():
        verdict = checked(Normalization(1.0))
    assert seen_by in verdict.refuting
    assert seen_by in str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BUGS if name not in OF_CONFIGS])
def test_every_planted_bug_is_caught(name: str) -> None:
    factory = strategies(Normalization(1.0), POISSON, z=2.0)
    rounds = 100 if name in OF_MORE_ROUNDS else 30
    with BUGS[name]():
        verdict = audit(
            factory, worlds=(), canaries=0, full=StrategyTarget(factory, rounds=rounds), seed=3
        )
    assert verdict.failed


@pytest.mark.slow
@pytest.mark.usefixtures("few_system_rounds")
def test_a_run_that_is_as_it_should_be_is_accepted() -> None:
    verdict = checked(PrivateScalar(PerLayer(Clipping(1.0)), name="loss", high=4.0, fraction=0.3))
    assert not verdict.failed
    assert "No violation of" in str(verdict)
    assert {check.part for check in verdict.checks} == {
        "sampler", "bound", "noise", "plan", "ledger",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "cohort", "settings"),
    [
        (Clipping(0.1), POISSON, {}),
        (QuantileClipping(bit_noise=0.5), POISSON, {}),
        (AdaClip(), POISSON, {}),
        (AdaptiveNoise(clip_norm=1.0, threshold=0.0, beta=3.0), POISSON, {}),
        (Clipping(1.0), FullCohort(30), {}),
        (Clipping(1.0), FixedCohort(10, 40), {}),
        (Clipping(1.0), PoissonCohort(0.3, 30), {"placement": "client"}),
    ],
    ids=["clipping", "quantile", "adaclip", "xu", "full", "fixed", "shares"],
)
def test_every_kind_of_run_that_is_as_it_should_be_is_accepted(
    mechanism: Mechanism, cohort: Cohort, settings: dict[str, str]
) -> None:
    assert not checked(mechanism, cohort, **settings).failed
