"""Audits of plans whose rounds share draws: honest ones are accepted, planted bugs are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from planted import Adding
from slow_cases import slow_but
from whitebox.strategy_audit import audit
from whitebox.target import StrategyTarget

from fedsim.audit import Verdict
from fedsim.cohorts import AllocationCohort, Cohort, CyclicCohort, FullCohort, SeparatedCohort
from fedsim.mechanisms import Clipping
from fedsim.privacy.laws import Participation
from fedsim.privacy.noise import Independent, Noise, NoiseDraws
from fedsim.privacy.noise.banded import Banded
from fedsim.privacy.noise.blt import BLT
from fedsim.privacy.noise.lambda_cgd import LambdaCGD
from fedsim.privacy.noise.tree import Tree
from fedsim.privacy.plan import ReleasePlan
from fedsim.strategies import DPFedAvg

pytestmark = pytest.mark.usefixtures("few_system_rounds")

ROUNDS = 24
GROUPS = CyclicCohort(4, 0.7, population=120)
APART = SeparatedCohort(4, 0.5, population=120)


def strategies(noise: Noise, cohort: Cohort) -> Callable[[int | None], DPFedAvg]:
    plan = ReleasePlan(
        level="client", sampler=cohort, mechanism=Clipping(1.0), noise=noise, rounds=ROUNDS
    )
    return lambda seed: DPFedAvg(plan=plan, seed=seed, server_optimizer=Adding())


def checked(noise: Noise, cohort: Cohort = GROUPS) -> Verdict:
    factory = strategies(noise, cohort)
    return audit(
        factory, worlds=(), canaries=0, full=StrategyTarget(factory, rounds=ROUNDS), seed=3
    )


@pytest.mark.parametrize(
    ("noise", "cohort"),
    slow_but(
        1,
        [
            (Banded(2.0, bands=3), AllocationCohort(2, ROUNDS, 120)),
            (Banded(2.0), GROUPS),
            (Banded(2.0), CyclicCohort(3, 1.0, population=120)),
            (Banded(2.0, bands=6), APART),
            (BLT(2.0), GROUPS),
            (LambdaCGD(2.0), GROUPS),
            (Tree(2.0), APART),
            (LambdaCGD(2.0, coefficients="0.4"), FullCohort(40)),
            (Independent(2.0), AllocationCohort(3, ROUNDS, 120)),
        ],
    ),
    ids=lambda value: type(value).__name__,
)
def test_honest_plans_are_accepted(noise: Noise, cohort: Cohort) -> None:
    verdict = checked(noise, cohort)
    assert not verdict.refuting, str(verdict)
    tested = any("rounds of each" in check.name for check in verdict.checks)
    assert tested is not isinstance(cohort, FullCohort)


@dataclass(frozen=True)
class Forgetful(Banded):
    """Adds fresh draws and takes nothing away again."""

    def combine(self, draws: NoiseDraws, state: Any) -> tuple[Any, Any]:
        return draws(), state


@dataclass(frozen=True)
class TooFar(LambdaCGD):
    """Takes away what was added two rounds ago."""

    def combine(self, draws: NoiseDraws, state: Any) -> tuple[Any, Any]:
        noise = draws()
        if draws.round > 2:
            noise.add_(draws(2), alpha=-self._lambda)
        return noise, state


@dataclass(frozen=True)
class TakesAll(BLT):
    """Takes away twice what it should."""

    def combine(self, draws: NoiseDraws, state: Any) -> tuple[Any, Any]:
        noise, kept = super().combine(draws, state)
        return noise - 0.3 * state["0"] if state else noise, kept


@dataclass(frozen=True)
class OneDraw(Tree):
    """Has one draw for all nodes that a round completes."""

    def combine(self, draws: NoiseDraws, state: Any) -> tuple[Any, Any]:
        first = draws()
        same = replace(draws, of=lambda age, number: first.clone())
        return super().combine(same, state)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [TooFar(2.0), Forgetful(2.0), TakesAll(2.0), OneDraw(2.0)])
def test_noise_that_is_not_what_the_plan_says_is_caught(noise: Noise) -> None:
    assert any(name.startswith("noise: ") for name in checked(noise).refuting)


@dataclass(frozen=True)
class Anew(CyclicCohort):
    """Draws its groups anew in every round."""

    name: ClassVar[str] = "anew"

    def draw(self, round: int, draws: Any, step: int = 0) -> Any:
        numbers = draws.generator(round, 1).random(self.population)
        self.memory["groups"] = (numbers * self.groups).astype(int)
        return super().draw(round, draws, step)


@dataclass(frozen=True)
class Longer(SeparatedCohort):
    """Says that rounds are farther apart than they are."""

    def participation(self, rounds: int) -> Participation:
        return Participation(rounds, 2 * self.separation)


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [Anew(4, 0.7, population=120), Longer(4, 0.9, population=120)])
def test_rows_in_more_rounds_than_the_plan_counts_on_are_caught(cohort: Cohort) -> None:
    assert "plan: rounds of each client" in checked(LambdaCGD(2.0), cohort).refuting
