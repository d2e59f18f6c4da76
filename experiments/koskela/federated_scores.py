"""Scores of federated runs by method, rate, randomness and batch, and claims for both readings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.framework.base import BestOfGrid, Outcome
from experiments.framework.config_runs import Score, best
from experiments.framework.spread import Difference, all_ahead, listed
from experiments.koskela.common import units

SGD, ADAM = "sgd", "adam"
READINGS = {"adadp": "ADADP", "adadp kept": "ADADP, $\\eta$ kept"}
"""Two readings of the paper, with labels: clients restart from eta_0 each round, or keep eta."""
UNITS = {"mean": "eta_0 of the mean gradient", "sum": "eta_0 of the sum"}
"""What eta_0 multiplies, with labels; the paper does not say this either. See `units`."""
OPEN = "the unit of eta_0 and whether clients keep eta from round to round"
STATES = {"adadp": "from eta_0 every round", "adadp kept": "eta kept"}
STYLES = {"adadp": "adadp", "adadp kept": "kept"}


@dataclass(frozen=True)
class FederatedScores:
    """Scores of all plans.

    Attributes
    ----------
    by_plan : mapping of str to Score
        Scores by `plan_name`.
    start : float
        The run's own eta_0.
    batch : int
        The run's own batch size.
    where : str
        Text on data and scale, for titles.
    """

    by_plan: Mapping[str, Score]
    start: float
    batch: int
    where: str

    def over(
        self, method: str, rates: Sequence[float], rho: float, batch: int | None = None
    ) -> dict[float, Score]:
        """Scores of a method at a randomness ``rho``, by its rate."""
        batch = batch or self.batch
        return {rate: self.by_plan[plan_name(method, rate, rho, batch)] for rate in rates}

    def adadp(self, rho: float, batch: int | None = None, unit: str = "mean") -> dict[str, Score]:
        """ADADP's scores from the run's own eta_0 in a unit ("mean" or "sum"), by reading."""
        start = units(self.start, batch or self.batch)[unit]
        return {reading: self.over(reading, [start], rho, batch)[start] for reading in READINGS}

    def tuned(
        self, method: str, rates: Sequence[float], rho: float, batch: int | None = None
    ) -> tuple[float, Score, BestOfGrid]:
        """The rate with the highest final accuracy, its score, and the choice for the report."""
        of = f"rate of {method} at {100 * rho:g} % random, |B| = {batch or self.batch}"
        return best(of, self.over(method, rates, rho, batch))


def plan_name(method: str, rate: float, rho: float, batch: int) -> str:
    """Name of one run without its seed."""
    return f"{method} rate={rate:g} rho={rho:g} B={batch}"


def ahead(differences: Sequence[Difference], names: Sequence[str] = ()) -> Outcome:
    """Whether all differences are above 0, and a text that lists them."""
    text = listed(differences, names) if names else differences[0].text
    return all_ahead(differences), text


def in_every_reading(judge: Callable[[str, str], Outcome]) -> dict[str, Outcome]:
    """What came out with every reading of `READINGS` and unit of eta_0, by both in words."""
    return {
        f"{STATES[reading]}, {UNITS[unit]}": judge(reading, unit)
        for reading in READINGS
        for unit in UNITS
    }
