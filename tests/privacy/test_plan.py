from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from fedsim.errors import FedsimError
from fedsim.privacy import epsilon
from fedsim.privacy.laws import FixedSize, Full, Poisson, ShuffledPasses
from fedsim.privacy.local_work import LocalWork
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import ReleasePlan


@dataclass(frozen=True)
class Bounded:
    guarantee: Literal["gaussian", "none"] = "gaussian"


def plan_of(sampler, *, level="client", z=1.1, bound=None, **settings) -> ReleasePlan:
    return ReleasePlan(
        level=level, sampler=sampler, bound=bound or Bounded(), noise=Independent(z), **settings
    )


def examples_of(sampler, **settings) -> ReleasePlan:
    return plan_of(sampler, level="example", **settings)


def test_epsilon_before_and_on_the_way_is_the_accountants() -> None:
    plan = plan_of(Poisson(0.01, 1000), rounds=1000)
    assert plan.epsilon(1e-5) == pytest.approx(1.5154, abs=2e-3)
    cohort = Poisson(0.01)
    spent = epsilon(noise_multiplier=1.1, cohort=cohort, rounds=300, delta=1e-5)
    assert plan.epsilon(1e-5, after=300) == pytest.approx(spent)
    assert plan.epsilon(1e-5, after=0) == 0
    assert plan.denominator == 10


def test_a_calibrated_plan_costs_the_target_and_no_more() -> None:
    plan = plan_of(Full(100), rounds=500).calibrated(5.0, 1e-6)
    assert plan.noise.multiplier == pytest.approx(21.9146, rel=1e-4)
    assert plan.epsilon(1e-6) <= 5.0
    with pytest.raises(FedsimError, match="has no number of rounds"):
        plan_of(Full(100)).calibrated(5.0, 1e-6)


def test_every_local_step_is_a_release_and_passes_begin_anew_each_round() -> None:
    steps = examples_of(Poisson(0.1, 50, adjacency="zero-out"), releases=7)
    assert steps.event().times(3).count == 21
    # 11 batches of 10 out of 100 begin two passes in every round, not eleven in ten rounds.
    passes = examples_of(ShuffledPasses(10, 100), releases=11, rounds=10)
    assert passes.event().count == 2
    twenty = plan_of(Full(1), rounds=20)
    assert passes.epsilon(1e-5) == pytest.approx(twenty.epsilon(1e-5))
    assert passes.event().times(10).count == 20


@pytest.mark.parametrize(
    "sampler", [FixedSize(3, 9), Poisson(0.1, 9), Full(9, adjacency="replace-one")]
)
def test_neighbours_of_examples_are_zero_out_and_nothing_else(sampler) -> None:
    with pytest.raises(FedsimError, match="at example level it must be zero-out"):
        examples_of(sampler)


@pytest.mark.parametrize(
    ("plan", "amplified"),
    [
        (plan_of(Poisson(0.1, 9)), True),
        (plan_of(FixedSize(3, 9)), True),
        (plan_of(Poisson(1.0, 9)), False),
        (plan_of(Full(9)), False),
        (plan_of(Poisson(0.1, 9), z=0.0), False),
        (plan_of(Poisson(0.1, 9), bound=Bounded("none")), False),
        (examples_of(ShuffledPasses(3, 9)), False),
        (examples_of(Poisson(0.1, 9, adjacency="zero-out")), True),
    ],
)
def test_a_draw_is_secret_only_where_a_private_event_counts_on_it(plan, amplified) -> None:
    assert plan.amplified == amplified


def test_a_plan_without_noise_or_bound_is_not_private() -> None:
    assert plan_of(Full(9)).private
    for plan in (plan_of(Full(9), z=0.0), plan_of(Full(9), bound=Bounded("none"))):
        assert not plan.private
        assert plan.epsilon(1e-5, after=1) == float("inf")


@pytest.mark.parametrize(
    ("work", "size", "steps", "batch"),
    [
        (LocalWork(10), 25, 3, 10),
        (LocalWork(10, epochs=2), 25, 6, 10),
        (LocalWork(10, steps=7), 25, 7, 10),
        (LocalWork(0, epochs=2), 25, 2, 25),
        (LocalWork(10), 4, 1, 4),
        (LocalWork(10), 0, 0, 0),
    ],
)
def test_steps_and_batches_of_a_client_follow_from_its_public_size(
    work, size, steps, batch
) -> None:
    assert (work.steps_of(size), work.batch_of(size)) == (steps, batch)
    if size:
        assert work.poisson(size).expected_size == pytest.approx(batch)
        assert work.passes(size).expected_size == batch
        assert work.poisson(size).adjacency == work.passes(size).adjacency == "zero-out"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch_size": -1}, "client.batch-size is -1"),
        ({"batch_size": 1, "epochs": 0}, "client.epochs is 0"),
        ({"batch_size": 1, "steps": 0}, "client.steps is 0"),
        ({"batch_size": 1, "epochs": 1, "steps": 1}, "set one of them"),
    ],
)
def test_impossible_work_gets_a_sentence(settings, named) -> None:
    with pytest.raises(FedsimError, match=named):
        LocalWork(**settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": 0}, "rounds is 0; it must be at least 1"),
        ({"releases": 0}, "releases is 0; it must be at least 1"),
        ({"bound": 3}, "bound is 3; it must be a mechanism of fedsim.mechanisms"),
    ],
)
def test_a_plan_of_nothing_or_without_a_bound_is_refused(changes, words) -> None:
    with pytest.raises(FedsimError, match=words):
        plan_of(Full(100), **changes)
