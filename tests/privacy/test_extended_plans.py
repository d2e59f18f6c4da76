"""Plans of correlated noise that are made longer: what the rounds that are added cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedsim.cli.privacy_question import read_source
from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.federation.strategy_state import plan_state, resumed_plan
from fedsim.privacy import Accountant, Budget, Entry, Event, Ledger
from fedsim.privacy.events import dominating_event
from fedsim.privacy.laws import Full, Participation
from fedsim.privacy.laws.allocation import Allocation
from fedsim.privacy.laws.correlated import ExtendedLaw, Extension
from fedsim.privacy.laws.cyclic import Cyclic
from fedsim.privacy.losses import gaussian_epsilon
from fedsim.privacy.noise import Independent
from fedsim.privacy.noise.banded import Banded
from fedsim.privacy.noise.blt import BLT
from fedsim.privacy.noise.lambda_cgd import LambdaCGD
from fedsim.privacy.noise.tree import Tree
from fedsim.privacy.plan import ReleasePlan

DELTA = 1e-5


class Gaussian:
    guarantee = "gaussian"


def plan_of(noise, rounds=20, sampler=None, **more) -> ReleasePlan:
    sampler = sampler or Cyclic(5, population=100)
    return ReleasePlan(
        level="client", sampler=sampler, bound=Gaussian(), noise=noise, rounds=rounds, **more
    )


def extended(plan: ReleasePlan, rounds: int, after: int) -> ReleasePlan:
    """The plan of a run of ``plan`` that is resumed after some rounds, with so many."""
    state = {"round": after, "plan": plan_state(plan), "noise": {}}
    return resumed_plan(replace(plan, rounds=rounds, extension=None), state)


@pytest.mark.parametrize("family", [Banded, BLT, LambdaCGD, Tree])
@pytest.mark.parametrize("sampler", [Cyclic(5, population=100), Full(100, adjacency="replace-one")])
def test_what_is_charged_is_the_longer_plan_and_never_the_sum(family, sampler) -> None:
    plan = plan_of(family(6.0), sampler=sampler)
    plan = replace(plan, noise=plan.noise)  # its coefficients are found by now
    longer = extended(plan, 33, after=7)
    charges = [plan.charge(t) for t in range(1, 8)] + [longer.charge(t) for t in range(8, 34)]
    whole = plan_of(plan.noise, 33, sampler)
    assert Accountant(charges).epsilon(DELTA) == pytest.approx(whole.epsilon(DELTA), rel=1e-9)
    assert longer.epsilon(DELTA) == whole.epsilon(DELTA)
    assert [event.count for event in charges] == [1] + 6 * [0] + [1] + 25 * [0]
    # Once more, and a round that is made again of other data.
    last = extended(longer, 40, after=20)
    assert last.extension == Extension(33, 20)
    charges = [plan.charge(1), longer.charge(8), last.charge(21)]
    everything = plan_of(plan.noise, 40, sampler)
    assert Accountant(charges).epsilon(DELTA) == pytest.approx(everything.epsilon(DELTA), rel=1e-9)
    assert last.charge(30, 1) == everything.charge(30, 1)
    for event in charges:
        assert Event.from_dict(event.to_dict()) == event
    # A run that is resumed without more rounds continues the extension.
    assert extended(longer, 33, after=20) == longer


def test_rounds_that_are_sampled_within_groups_go_on_as_before() -> None:
    sampler = Cyclic(5, 0.3, population=100)
    plan = plan_of(Banded(2.0, bands=5), 12, sampler)
    longer = extended(plan, 23, after=12)
    assert longer.extension is None
    charges = [plan.charge(t) for t in range(1, 13)] + [longer.charge(t) for t in range(13, 24)]
    assert Accountant(charges).epsilon(DELTA) == plan_of(plan.noise, 23, sampler).epsilon(DELTA)


@pytest.mark.parametrize(
    ("plan", "rounds"),
    [
        (plan_of(LambdaCGD(2.0)), 19),
        (plan_of(LambdaCGD(2.0), 20, Allocation(4, 20, 100)), 24),
        (plan_of(Independent(2.0), 20, Allocation(4, 20, 100)), 24),
        # With so few rounds nobody is in two of them, and sampling amplifies; then not any more.
        (plan_of(LambdaCGD(2.0), 4, Cyclic(5, 0.3, population=100)), 24),
    ],
)
def test_a_plan_whose_first_rounds_would_change_keeps_its_rounds(plan, rounds) -> None:
    with pytest.raises(FedsimError, match=f"rounds = {rounds}; it must be {plan.rounds}, as it w"):
        extended(plan, rounds, after=3)


def test_coefficients_that_were_found_for_fewer_rounds_are_not_changed_on_the_way() -> None:
    plan = plan_of(BLT(2.0), 8, Full(100, adjacency="replace-one"))
    longer = plan_of(BLT(2.0), 64, Full(100, adjacency="replace-one"))
    state = {"round": 4, "plan": plan_state(plan), "noise": {}}
    with pytest.raises(FedsimError, match=f"must be '{plan.noise.coefficients}', as it was"):
        resumed_plan(longer, state)
    assert resumed_plan(replace(plan, rounds=64), state).extension == Extension(8, 4)
    del state["plan"]["coefficients"]  # as an older checkpoint, whose ledger still refuses
    assert resumed_plan(longer, state).extension == Extension(8, 4)


def test_a_plan_without_what_its_noise_needs_cannot_be_extended() -> None:
    plan = plan_of(Banded(2.0))
    with pytest.raises(FedsimError, match="a secret that was removed after the last round"):
        resumed_plan(replace(plan, rounds=30), {"round": 20, "plan": plan_state(plan)})
    # Before the first round nothing was charged.
    longer = replace(plan, rounds=30)
    assert resumed_plan(longer, {"round": 0, "plan": plan_state(plan), "noise": {}}) == longer


def test_a_ledger_has_the_plan_before_its_extension_and_holds_the_budget(tmp_path) -> None:
    plan = plan_of(Banded(9.0))
    longer = extended(plan, 30, after=2)
    whole = plan_of(plan.noise, 30).epsilon(DELTA)
    ledger = Ledger(tmp_path / "ledger.jsonl", delta=DELTA, max_epsilon=whole * 0.999)
    with pytest.raises(
        FedsimError, match="round 3 extends a plan of 20 rounds, and no earlier line"
    ):
        ledger.record(Entry(round=3, event=longer.charge(3)))
    for number in (1, 2):
        ledger.record(Entry(round=number, event=plan.charge(number)))
    # Of another multiplier, too, it is not the plan that was charged.
    louder = replace(longer, noise=longer.noise.scaled(10.0))
    with pytest.raises(FedsimError, match="no earlier line charges that plan"):
        ledger.record(Entry(round=3, event=louder.charge(3)))
    assert ledger.would_exceed(longer.charge(3))
    with pytest.raises(BudgetSpentError):
        ledger.record(Entry(round=3, event=longer.charge(3)))
    ledger.record(Entry(round=3, event=longer.charge(3)), budget=Budget(whole * (1 + 1e-9), DELTA))
    ledger.record(Entry(round=4, event=longer.charge(4)), budget=Budget(whole * (1 + 1e-9), DELTA))
    read = Ledger.read(tmp_path / "ledger.jsonl", delta=DELTA)
    assert read.epsilon() == pytest.approx(whole, rel=1e-9)
    said = " ".join(str(read.statement()).split())
    assert "4 releases" in said
    assert "a plan of 20 rounds was extended to 30, which are charged together" in said
    # What further rounds would cost is asked of the whole plan, not of what extended it.
    assert read_source(tmp_path / "ledger.jsonl", [], None).question.law == longer.law
    # An extension that claims a larger plan before it than was charged is refused.
    base, z = longer.law, 9.0
    larger = replace(base, rounds=29, sensitivity=base.sensitivity * 0.99)
    forged = ExtendedLaw(base=base, shorter=larger, population=100, adjacency=base.adjacency)
    with pytest.raises(FedsimError, match="extends a plan of 29 rounds"):
        ledger.record(Entry(round=5, event=Event(noise_multiplier=z, law=forged)))


def test_what_is_no_extension_is_refused() -> None:
    base = plan_of(Banded(2.0)).law
    other = plan_of(BLT(2.0), 10).law
    for shorter in (base, other, replace(base, rounds=3, sensitivity=base.sensitivity * 2)):
        with pytest.raises(FedsimError, match="it must have the same noise, in fewer rounds"):
            ExtendedLaw(base=base, shorter=shorter, adjacency=base.adjacency)


def test_a_torn_line_costs_no_less_than_a_plan_beside_other_releases() -> None:
    plan = plan_of(LambdaCGD(4.0))
    evaluation = Event.of(Full(100), 5.0)
    worst = dominating_event([plan.charge(1), evaluation])
    assert worst is not None
    assert Accountant([worst]).epsilon(DELTA) == pytest.approx(plan.epsilon(DELTA))
    mu = plan.noise.sensitivity(Participation(20, 5)) / 4.0
    assert plan.epsilon(DELTA) == pytest.approx(gaussian_epsilon(mu, DELTA))
    assert mu > 1 / 4.0 > 1 / 5.0
    assert not math.isinf(worst.noise_multiplier)


def test_against_a_server_that_knows_the_cohort_a_plan_keeps_its_sensitivity() -> None:
    plan = plan_of(LambdaCGD(4.0), cohort_known=True)
    assert plan.epsilon(DELTA) == plan_of(LambdaCGD(4.0)).epsilon(DELTA)
    sampled = plan_of(Banded(4.0, bands=5), 20, Cyclic(5, 0.2, population=100))
    known = replace(sampled, cohort_known=True)
    mu = known.noise.sensitivity(Participation(20, 5)) / 4.0  # type: ignore[attr-defined]
    assert known.epsilon(DELTA) == pytest.approx(gaussian_epsilon(mu, DELTA))
    assert sampled.epsilon(DELTA) < known.epsilon(DELTA)
