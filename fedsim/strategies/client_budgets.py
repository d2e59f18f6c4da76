"""What clients' own budgets, for the privacy of their examples, mean for the whole run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedsim.strategies.outcome import RoundReport

__all__ = ["ClientBudget", "ClientBudgets"]

ClientBudget = Callable[[Tensor, npt.NDArray[np.int64], int], str | None]
"""``(vector [d], client ids, round)`` to why their budgets do not allow the round, or None."""


@dataclass(frozen=True)
class ClientBudgets:
    """When they end a run: never one that is private at client level.

    There it would show who was drawn.

    Attributes
    ----------
    ask : callable or None
        Knows before clients are asked, where that may be.
    one_ends_run : bool
        Whether one client that says that its budget is spent ends the run; else it takes all of
        several.
    heard : bool
        Whether the run goes by what clients say.
    """

    ask: ClientBudget | None
    one_ends_run: bool
    heard: bool

    def exceeded(
        self, vector: Tensor, client_ids: npt.NDArray[np.int64], server_round: int
    ) -> str | None:
        """Why these clients may not be asked for a round from ``vector [d]``, if so."""
        return None if self.ask is None else self.ask(vector, client_ids, server_round)

    def spent(self, report: RoundReport) -> str | None:
        """Why the run ends after what clients have said in a round, if so."""
        spent = report.reasons.get("budget", 0)
        if not self.heard or not (spent > 0 if self.one_ends_run else 1 < spent == report.asked):
            return None
        return (
            f"round {report.round} would exceed client.noise.max-epsilon of {spent} of the clients "
            "asked"
        )
