from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest

from fedsim import registry
from fedsim.errors import FedsimError
from fedsim.federation.aggregation.robust import Median
from fedsim.mechanisms import AdaptiveNoise, NoPrivacy, PerLayer
from fedsim.privacy import Accountant, epsilon
from fedsim.privacy.laws import FixedSize, Full, Law, Poisson, PoissonLaw, Sampler, ShuffledPasses
from fedsim.privacy.laws.allocation import Allocation
from fedsim.privacy.laws.cyclic import Cyclic
from fedsim.privacy.laws.separated import Separated
from fedsim.privacy.local_work import LocalWork
from fedsim.privacy.losses import gaussian_epsilon
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Draws, Randomness


@dataclass(frozen=True)
class Bounded:
    guarantee: Literal["gaussian", "none"] = "gaussian"


def plan_of(sampler, *, level="client", z=1.1, mechanism=None, **settings) -> ReleasePlan:
    return ReleasePlan(
        level=level,
        sampler=sampler,
        mechanism=mechanism or Bounded(),
        noise=Independent(z),
        **settings,
    )


def examples_of(sampler, **settings) -> ReleasePlan:
    return plan_of(sampler, level="example", **settings)


def test_epsilon_before_and_on_the_way_is_the_accountants() -> None:
    plan = plan_of(Poisson(0.01, 1000), rounds=1000)
    assert plan.epsilon(1e-5) == pytest.approx(1.5154, abs=2e-3)
    cohort = Poisson(0.01)
    spent = epsilon(noise_multiplier=1.1, cohort=cohort, rounds=300, delta=1e-5)
    assert plan.epsilon(1e-5, after_round=300) == pytest.approx(spent)
    assert plan.epsilon(1e-5, after_round=0) == 0
    assert plan.denominator == 10


@dataclass(frozen=True)
class Own(Sampler):
    """Everybody in every round; its law says no more than that an event covers three rounds."""

    name = "own"
    population: int | None = 100

    def draw(self, round, draws, step=0):
        return np.arange(self.population)

    def law(self):
        return ThreeRounds(population=self.population)


@dataclass(frozen=True, kw_only=True)
class ThreeRounds(Law):
    name = "three-rounds"
    rounds = 3
    label = "own"

    def rdp(self, noise_multiplier):
        return PoissonLaw(rate=0.1).rdp(noise_multiplier)

    def sentence(self, row):
        return "own"


KNOWN = {
    "poisson": (Poisson(0.5, 100), 12, 1),
    "full": (Full(100), 12, 1),
    "full, replace-one": (Full(100, adjacency="replace-one"), 12, 2),
    "fixed": (FixedSize(60, 100), 12, 2),
    "cyclic": (Cyclic(5, 0.9, 100), 3, 1),
    "separated": (Separated(5, 0.9, 100), 3, 1),
    "separated, limited": (Separated(5, 0.9, 100, max_participations=2), 3, 1),
    "allocation": (Allocation(5, 12, 100), 5, 1),
    "allocation in blocks": (Allocation(4, 12, 100, blocks=True), 4, 1),
    "a user's": (Own(), 12, 1),
}
DRAWN_ELSEWHERE = {"buffered"}
"""Cohorts that no sampler draws: they follow from devices, and their law counts on no secret."""


@pytest.mark.parametrize(("sampler", "gaussians", "moves"), KNOWN.values(), ids=KNOWN.keys())
def test_a_known_cohort_costs_a_plain_gaussian_for_each_round_that_a_client_can_be_in(
    sampler, gaussians, moves
) -> None:
    rounds, z = 12, 3.0
    plan = plan_of(sampler, z=z, rounds=rounds, cohort_known=True)
    draws = Draws(Randomness(5), level="client", amplified=True)
    joined = np.concatenate([sampler.draw(t, draws) for t in range(1, rounds + 1)])
    assert np.bincount(joined).max() <= gaussians
    exact = gaussian_epsilon(moves * math.sqrt(gaussians) / z, 1e-5)
    charged = Accountant([plan.charge(t) for t in range(1, rounds + 1)]).epsilon(1e-5)
    assert exact * (1 - 1e-9) <= charged <= exact * 1.001
    assert plan.epsilon(1e-5) == pytest.approx(charged)
    assert not plan.amplified


def test_every_cohort_is_tried_with_a_known_one() -> None:
    tried = {sampler.name for sampler, *_ in KNOWN.values()}
    assert set(registry.names("cohort")) - DRAWN_ELSEWHERE <= tried


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
        (plan_of(Poisson(0.1, 9), mechanism=Bounded("none")), False),
        (examples_of(ShuffledPasses(3, 9)), False),
        (examples_of(Poisson(0.1, 9, adjacency="zero-out")), True),
    ],
)
def test_a_draw_is_secret_only_where_a_private_event_counts_on_it(plan, amplified) -> None:
    assert plan.amplified == amplified


@pytest.mark.parametrize(
    ("mechanism", "level", "words"),
    [
        (NoPrivacy(), "client", "noise.{} is 1.0; it must be unset with NoPrivacy (mech"),
        (
            NoPrivacy(),
            "example",
            "client.noise.{} is 1.0; it must be unset with NoPri",
        ),
        (Median(), "client", "how far one client moves a robust mean depends on all other updates"),
        (
            PerLayer(NoPrivacy("uniform")),
            "client",
            "unset with PerLayer (mechanism.name): noise protects",
        ),
    ],
)
def test_noise_that_protects_nobody_is_refused_with_the_bounds_reason(
    mechanism, level, words
) -> None:
    sampler = Poisson(0.1, 100, adjacency="zero-out")
    with pytest.raises(FedsimError, match=re.escape(words.format("multiplier"))):
        plan_of(sampler, z=1.0, mechanism=mechanism, level=level)
    unnoised = plan_of(sampler, z=0.0, mechanism=mechanism, level=level, rounds=3)
    with pytest.raises(FedsimError, match=re.escape(words.format("target-epsilon"))):
        unnoised.calibrated(1.0, 1e-5)


def test_no_noise_is_calibrated_for_a_bound_without_a_guarantee() -> None:
    raw = AdaptiveNoise(unsafe_non_private_raw_statistics=True)
    plan = plan_of(Full(100), mechanism=raw, rounds=3)
    with pytest.raises(FedsimError, match=r"AdaptiveNoise .*gives no guarantee with any noise"):
        plan.calibrated(1.0, 1e-5)


def test_a_plan_without_noise_or_bound_is_not_private() -> None:
    assert plan_of(Full(9)).private
    for plan in (plan_of(Full(9), z=0.0), plan_of(Full(9), mechanism=Bounded("none"))):
        assert not plan.private
        assert plan.epsilon(1e-5, after_round=1) == float("inf")


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
        ({"mechanism": 3}, "mechanism is 3; it must be one of fedsim.mechanisms"),
    ],
)
def test_a_plan_of_nothing_or_without_a_bound_is_refused(changes, words) -> None:
    with pytest.raises(FedsimError, match=words):
        plan_of(Full(100), **changes)
