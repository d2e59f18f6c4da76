"""The privacy statement: what is covered, at which level, against which neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fedsim.privacy.accountant import Cost
from fedsim.privacy.events import Adjacency, Level, Sampling

__all__ = ["NOT_COVERED", "Statement"]

NOT_COVERED = (
    "metrics that clients report",
    "example counts",
    "who took part, and cohort sizes",
    "anything else the operator sees or logs",
)

_SAMPLERS: dict[Sampling, str] = {
    "poisson": "Poisson sampling (each {row} independently)",
    "fixed": "samples of a fixed size without replacement",
    "full": "full participation (no amplification by sampling)",
    "shuffle": "shuffled passes (one unamplified release a pass)",
}

_ADJACENCIES: dict[Adjacency, str] = {
    "add-remove": "adding or removing one {row}",
    "zero-out": "one {row} contributing nothing instead",
    "replace-one": "replacing one {row} by any other",
}

_METHODS = {
    "analytic": "the exact curve of the Gaussian mechanism",
    "pld": "privacy loss distributions (PLD)",
    "rdp": "Rényi accounting (RDP)",
}


@dataclass(frozen=True)
class Statement:
    """What may be claimed about a run.

    Attributes
    ----------
    cost : Cost
        Epsilon, delta, adjacency, and how they were found.
    level : "client" or "example"
        Whose participation is hidden: a client with all its data, or one example.
    samplers, entropies : tuple of str
        All that the ledger has.
    torn : int
        Releases counted from lines that were torn in writing.
    ledger : str or None
        Where it is written; None when it was kept in memory only.
    """

    cost: Cost
    level: Level
    samplers: tuple[Sampling, ...] = ()
    entropies: tuple[str, ...] = ()
    torn: int = 0
    ledger: str | None = None

    @property
    def epsilon(self) -> float:
        """Infinite where a release had no guarantee."""
        return self.cost.epsilon

    @property
    def delta(self) -> float:
        """Where epsilon is reported."""
        return self.cost.delta

    @property
    def adjacency(self) -> Adjacency:
        """Which neighbouring federations it is about."""
        return self.cost.adjacency

    @property
    def private(self) -> bool:
        """Whether epsilon is finite."""
        return math.isfinite(self.cost.epsilon)

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """The statement in plain words, one sentence a line."""
        if not self.cost.releases:
            return ["Nothing was released."]
        if not self.private:
            return [
                "No privacy guarantee: at least one release was made without sufficient noise, "
                f"so epsilon is infinite at {self.level} level."
            ]
        cost = self.cost
        said = [
            f"The sequence of global models is ({cost.epsilon:.4g}, {cost.delta:g})-differentially "
            f"private at {self.level} level.",
            f"Neighbours: {_ADJACENCIES[cost.adjacency].format(row=self._row)} ({cost.adjacency}).",
            f"{cost.releases:,} release{'s' if cost.releases != 1 else ''}; {self._sampling}; "
            f"accounted for by {_METHODS[cost.method]}; Rényi accounting gives "
            f"{cost.rdp_epsilon:.4g}.",
        ]
        if cost.poisson_epsilon is not None:
            said.append(
                f"Poisson cohorts of the same expected size would have cost epsilon "
                f"{cost.poisson_epsilon:.4g} (add-remove)."
            )
        if "config" in self.entropies:
            said.append(
                "Noise and sampling come from the config's seed: the guarantee holds against "
                "those who do not know it."
            )
        if self.torn:
            said.append(f"{self.torn} torn ledger line(s) are counted as releases.")
        said.append(f"Not covered: {', '.join(NOT_COVERED)}.")
        said.append(f"Ledger: {self.ledger or 'kept in memory only'}.")
        return said

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe mapping; an infinite epsilon is the string "inf"."""
        cost = self.cost

        def safe(value: float | None) -> float | str | None:
            return "inf" if value is not None and math.isinf(value) else value

        return {
            "epsilon": safe(cost.epsilon),
            "delta": cost.delta,
            "adjacency": cost.adjacency,
            "level": self.level,
            "method": cost.method,
            "rdp-epsilon": safe(cost.rdp_epsilon),
            "poisson-epsilon": safe(cost.poisson_epsilon),
            "releases": cost.releases,
            "samplers": list(self.samplers),
            "entropies": list(self.entropies),
            "torn": self.torn,
            "covers": "the sequence of global models",
            "not-covered": list(NOT_COVERED),
            "ledger": self.ledger,
        }

    @property
    def _row(self) -> str:
        return "client with all its data" if self.level == "client" else "example"

    @property
    def _sampling(self) -> str:
        row = self.level
        return " and ".join(_SAMPLERS[name].format(row=row) for name in self.samplers)
