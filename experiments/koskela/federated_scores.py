"""Scores of federated runs by method, rate, randomness and batch, and claims for every reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.framework.base import BestOfGrid, Outcome
from experiments.framework.config_runs import Score, best
from experiments.framework.spread import Difference, all_ahead, listed
from experiments.koskela.common import units

SGD, ADAM = "sgd", "adam"
READINGS = {
    "adadp full": "ADADP",
    "adadp full kept": "ADADP, $\\eta$ kept",
    "adadp": "ADADP, half steps",
    "adadp kept": "ADADP, half steps, $\\eta$ kept",
}
"""Readings of the paper, with labels: clients restart from eta_0 each round, which the paper does
not say, or keep eta; an iteration keeps the full step, as in the paper, or the half steps, as in
the authors' code."""
UNITS = {"mean": "eta_0 of the mean gradient", "sum": "eta_0 of the sum"}
"""What eta_0 multiplies, with labels; the paper does not say this either. See `units`."""
OPEN = "the unit of eta_0, whether clients keep eta"
STATES = {
    "adadp full": "from eta_0 every round",
    "adadp full kept": "eta kept",
    "adadp": "half steps, from eta_0 every round",
    "adadp kept": "half steps, eta kept",
}
STYLES = {
    "adadp full": "adadp",
    "adadp full kept": "kept",
    "adadp": "fifth",
    "adadp kept": "second",
}


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
    keeps : sequence of str
        The iterates of the runs, of `KEEPS`.
    """

    by_plan: Mapping[str, Score]
    start: float
    batch: int
    where: str
    keeps: Sequence[str]

    @property
    def readings(self) -> list[str]:
        """Those of `READINGS` that were run."""
        return readings_of(self.keeps)

    @property
    def columns(self) -> list[str]:
        """Headings of ADADP's columns, with both units of eta_0."""
        labels = [READINGS[reading].replace("$\\eta$", "eta") for reading in self.readings]
        return [f"{label} (%)" for label in labels] + [f"{label}, of the sum" for label in labels]

    def in_every_reading(self, judge: Callable[[str, str], Outcome]) -> dict[str, Outcome]:
        """What came out with every reading and unit of eta_0, by both in words."""
        return {
            f"{STATES[reading]}, {UNITS[unit]}": judge(reading, unit)
            for reading in self.readings
            for unit in UNITS
        }

    def over(
        self, method: str, rates: Sequence[float], rho: float, batch: int | None = None
    ) -> dict[float, Score]:
        """Scores of a method at a randomness ``rho``, by its rate."""
        batch = batch or self.batch
        return {rate: self.by_plan[plan_name(method, rate, rho, batch)] for rate in rates}

    def adadp(self, rho: float, batch: int | None = None, unit: str = "mean") -> dict[str, Score]:
        """ADADP's scores from the run's own eta_0 in a unit ("mean" or "sum"), by reading."""
        start = units(self.start, batch or self.batch)[unit]
        return {
            reading: self.over(reading, [start], rho, batch)[start] for reading in self.readings
        }

    def tuned(
        self, method: str, rates: Sequence[float], rho: float, batch: int | None = None
    ) -> tuple[float, Score, BestOfGrid]:
        """The rate with the highest final accuracy, its score, and the choice for the report."""
        of = f"rate of {method} at {100 * rho:g} % random, |B| = {batch or self.batch}"
        return best(of, self.over(method, rates, rho, batch))


def readings_of(keeps: Sequence[str]) -> list[str]:
    """The `READINGS` in which these iterates are kept."""
    return [reading for reading in READINGS if keep_of(reading) in keeps]


def keep_of(reading: str) -> str:
    """Which iterate is kept in a reading: "full" or "half"."""
    return "full" if "full" in reading else "half"


def plan_name(method: str, rate: float, rho: float, batch: int) -> str:
    """Name of one run without its seed."""
    return f"{method} rate={rate:g} rho={rho:g} B={batch}"


def ahead(differences: Sequence[Difference], names: Sequence[str] = ()) -> Outcome:
    """Whether all differences are above 0, and a text that lists them."""
    text = listed(differences, names) if names else differences[0].text
    return all_ahead(differences), text
