"""Scores of federated runs by method, rate, randomness and batch, and claims for both readings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.framework.base import BestOfGrid, PaperClaim
from experiments.framework.config_runs import Score, best
from experiments.framework.spread import Difference, agreed, all_ahead, listed
from experiments.koskela.common import units

SGD, ADAM = "sgd", "adam"
READINGS = {"adadp": "ADADP", "adadp kept": "ADADP, $\\eta$ kept"}
"""Two readings of the paper, with labels: clients restart from eta_0 each round, or keep eta."""
UNITS = {"mean": "eta_0 of the mean gradient", "sum": "of the sum"}
"""What eta_0 multiplies, with labels; the paper does not say this either. See `units`."""
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


def in_both_units(
    judge: Callable[[str, str], tuple[bool | None, str]],
) -> dict[str, tuple[bool | None, str]]:
    """Verdict and measured text by reading; not decided if the units of eta_0 disagree.

    Parameters
    ----------
    judge : callable
        Maps a reading and a unit to a verdict and a text on what was measured.
    """
    judged = {reading: {unit: judge(reading, unit) for unit in UNITS} for reading in READINGS}
    return {
        reading: (
            agreed([verdict for verdict, _ in by_unit.values()]),
            "; ".join(f"{UNITS[unit]}: {text}" for unit, (_, text) in by_unit.items()),
        )
        for reading, by_unit in judged.items()
    }


def ahead(differences: Sequence[Difference], names: Sequence[str] = ()) -> tuple[bool | None, str]:
    """Whether all differences are above 0, and a text that lists them."""
    text = listed(differences, names) if names else differences[0].text
    return all_ahead(differences), text


def claims_of_readings(
    name: str, says: str, verdicts: Mapping[str, tuple[bool | None, str]]
) -> list[PaperClaim]:
    """One claim for each reading of `READINGS`.

    Parameters
    ----------
    name : str
        Begins with the figure's number.
    says : str
        The claim, as a sentence.
    verdicts : mapping of str to pair
        Whether the claim is reproduced and what was measured, by reading.
    """
    ends = {"adadp": ("", "from eta_0 every round"), "adadp kept": ("-kept", "eta kept")}
    return [
        PaperClaim(
            name + ends[reading][0],
            f"Fig. {name.partition('-')[0]}",
            f"{says} ({ends[reading][1]})",
            reproduced,
            measured,
        )
        for reading, (reproduced, measured) in verdicts.items()
    ]
