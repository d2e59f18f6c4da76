"""Samplers of the user's own in a run, and what its statement says of them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from fixed_clients import Fixed
from torch import Tensor

from fedsim.cohorts import Cohort, PoissonCohort
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record
from fedsim.mechanisms import Clipping, Mechanism, PerLayer, ScalingMechanism, State
from fedsim.privacy import Accountant, Event, epsilon
from fedsim.randomness import Draws
from fedsim.strategies import DPFedAvg

TUTORIAL = Path(__file__).parents[2] / "docs" / "your_own_sampler.md"
SAID = "Declared by the user"


@dataclass(frozen=True)
class Everybody(PoissonCohort):
    """Draws everybody, and charges for a Poisson sample."""

    def draw(self, round: int, draws: Draws, step: int = 0) -> np.ndarray:
        return np.arange(self.population or 0)


def strategy_after(cohort: Cohort, mechanism: Mechanism = Clipping(1.0)) -> DPFedAvg:  # noqa: B008
    assert cohort.population is not None
    strategy = DPFedAvg(mechanism=mechanism, cohort=cohort, noise_multiplier=1.0, seed=1)
    trainer = Fixed(torch.ones(cohort.population, 3))
    strategy.start(LocalGrid(trainer), array_record({"w": torch.zeros(3)}), 2)
    return strategy


def test_an_event_that_nobody_has_checked_is_declared_by_the_user() -> None:
    assert SAID in str(strategy_after(Everybody(0.1, 20)).privacy_statement())
    assert SAID not in str(strategy_after(PoissonCohort(0.1, 20)).privacy_statement())


@dataclass(frozen=True)
class Listed(PoissonCohort):
    """Draws whom it was told, as it was told."""

    ids: tuple[float, ...] = ()

    def draw(self, round: int, draws: Draws, step: int = 0) -> np.ndarray:
        return np.array(self.ids)


def test_whoever_a_users_sampler_draws_twice_or_out_of_order_is_in_once() -> None:
    models = []
    for ids in ((3, 5, 9), (9, 3, 5), (5, 3, 3, 9, 5)):
        strategy = strategy_after(Listed(0.1, 20, ids=ids))
        assert strategy.report is not None
        assert (strategy.report.asked, strategy.report.usable) == (3, 3)
        assert strategy.result is not None
        models.append(strategy.result.arrays.to_numpy_ndarrays()[0])
    assert abs(models[0] - models[1]).max() > 1e-3  # whose settings differ draws other noise
    again = strategy_after(Listed(0.1, 20, ids=(3, 5, 9))).result
    assert again is not None
    assert np.array_equal(again.arrays.to_numpy_ndarrays()[0], models[0])


def test_a_users_sampler_may_give_a_list() -> None:
    class AsList(Listed):
        def draw(self, round: int, draws: Draws, step: int = 0) -> list[float]:
            return list(self.ids)

    strategy = strategy_after(AsList(0.1, 20, ids=(3, 5, 9)))
    assert strategy.report is not None
    assert strategy.report.usable == 3


@pytest.mark.parametrize("ids", [(3, 20), (-1, 3), (2.0, 3.0)])
def test_a_users_sampler_that_draws_whom_there_cannot_be_is_refused(ids) -> None:
    with pytest.raises(
        FedsimError, match=r"Listed draws clients .* in 0 \.\. 19, of its population"
    ):
        strategy_after(Listed(0.1, 20, ids=ids))


@dataclass(frozen=True)
class Unbounded(ScalingMechanism):
    """Says that no row is longer than 1, and lets all of them pass."""

    def scales(self, norms: Tensor, round_state: State, unit: Tensor | float) -> Tensor:
        return torch.ones_like(norms)

    def radius(self, round_state: State, d: int) -> float:
        return 1.0


def test_a_bound_of_the_users_own_is_declared_by_the_user_wherever_it_stands() -> None:
    cohort = PoissonCohort(0.1, 20)
    listed = PerLayer([("*", Unbounded())])
    for mechanism in (Unbounded(), PerLayer(Unbounded()), PerLayer((("*", Unbounded()),)), listed):
        said = str(strategy_after(cohort, mechanism).privacy_statement())
        assert "Declared by the user: that the mechanism" in said
    for mechanism in (PerLayer(Clipping(1.0)), Clipping(np.float64(1.0))):
        assert SAID not in str(strategy_after(cohort, mechanism).privacy_statement())


def test_a_factor_that_a_users_bound_gives_never_takes_a_row_out_of_the_ball() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [np.nan, 1.0], [np.inf, 0.0]])
    for mechanism in (Unbounded(), PerLayer(Unbounded())):
        assert mechanism.bound(rows).norm(dim=1).tolist() == pytest.approx([1.0, 0.5, 0, 0, 0])
        assert torch.equal(mechanism.bound(rows), Clipping(1.0).bound(rows))


def test_the_tutorials_sampler_runs_and_its_event_follows_from_its_probabilities() -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.S)
    names: dict[str, object] = {}
    exec(code, names)
    cohort = names["NightAndDay"](population=100, highest=0.2)
    strategy = strategy_after(cohort)
    assert SAID not in str(strategy.privacy_statement())
    assert strategy.ledger.epsilon(1e-5) == strategy_after(PoissonCohort(0.2, 100)).ledger.epsilon(
        1e-5
    )
    assert cohort.expected_size == 12.5


def test_the_tutorials_law_and_noise_can_be_accounted_for(monkeypatch) -> None:
    _, law, noise = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.S)
    mine = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", mine)
    names: dict[str, Any] = vars(mine)
    exec(law, names)
    exec(noise, names)
    event = Event(noise_multiplier=1.1, law=names["HalvesLaw"](q=0.1), count=50)
    exact = epsilon(noise_multiplier=1.1, cohort=PoissonCohort(0.1), rounds=50, delta=1e-5)
    assert exact <= Accountant([event]).epsilon(1e-5) <= 1.005 * exact
    assert names["Twice"](1.1).law(event.law) is event.law
    assert names["Twice"](1.1).combine(lambda: 3.0, {}) == (6.0, {})
