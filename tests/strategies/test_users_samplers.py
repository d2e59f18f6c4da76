"""Samplers of the user's own in a run, and what its statement says of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fixed_clients import Fixed

from fedsim.cohorts import Cohort, PoissonCohort
from fedsim.engines import LocalGrid
from fedsim.engines.arrays import array_record
from fedsim.mechanisms import Clipping
from fedsim.randomness import Draws
from fedsim.strategies import DPFedAvg

TUTORIAL = Path(__file__).parents[2] / "docs" / "your_own_sampler.md"
SAID = "Declared by the user"


@dataclass(frozen=True)
class Everybody(PoissonCohort):
    """Draws everybody, and charges for a Poisson sample."""

    def draw(self, round: int, draws: Draws, step: int = 0) -> np.ndarray:
        return np.arange(self.population or 0)


def strategy_after(cohort: Cohort) -> DPFedAvg:
    assert cohort.population is not None
    strategy = DPFedAvg(mechanism=Clipping(1.0), cohort=cohort, noise_multiplier=1.0, seed=1)
    trainer = Fixed(torch.ones(cohort.population, 3))
    strategy.start(LocalGrid(trainer), array_record({"w": torch.zeros(3)}), 2)
    return strategy


def test_an_event_that_nobody_has_checked_is_declared_by_the_user() -> None:
    assert SAID in str(strategy_after(Everybody(0.1, 20)).privacy_statement())
    assert SAID not in str(strategy_after(PoissonCohort(0.1, 20)).privacy_statement())


def test_the_tutorials_sampler_runs_and_its_event_follows_from_its_probabilities() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.S)
    names: dict[str, object] = {}
    exec(code, names)
    cohort = names["NightAndDay"](population=100, highest=0.2)  # type: ignore[operator]
    strategy = strategy_after(cohort)
    assert SAID not in str(strategy.privacy_statement())
    assert strategy.ledger.epsilon(1e-5) == strategy_after(PoissonCohort(0.2, 100)).ledger.epsilon(
        1e-5
    )
    assert cohort.expected_size == 12.5
