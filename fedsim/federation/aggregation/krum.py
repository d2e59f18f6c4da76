"""Krum: the update, or the mean of the few, that lie closest to most others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.errors import FedsimError
from fedsim.federation.aggregation.robust_mean import RobustMean, column_chunks
from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Doc, Ge


@register("mechanism", "krum")
@dataclass(frozen=True)
class Krum(RobustMean):
    """The row with the least sum of squared distances to its n - f - 2 nearest, f the byzantine.

    With ``keep`` above 1 the mean of that many (multi-Krum). Where clients fail and n - f - 2 is
    below 1, the nearest one counts, and nothing is promised. No privacy. Memory besides the rows
    is n^2 numbers. Source: Blanchard et al. 2017.
    """

    byzantine: Annotated[
        int, Ge(0), Doc("How many of the cohort may send anything at all; below (n - 2) / 2.")
    ] = 1
    keep: Annotated[int, Ge(1), Doc("How many rows the mean is of; 1 for Krum itself.")] = 1

    def check(self, expected: float) -> None:
        """Refuse a cohort in which the byzantine clients could be nearest to each other."""
        if expected < max(2 * self.byzantine + 3, self.keep):
            raise FedsimError(
                f"mechanism.byzantine is {self.byzantine} and mechanism.keep {self.keep}; of a "
                f"cohort of {expected:g} clients, twice the one and 3, and the other, must be at "
                "most as many."
            )

    def center(self, rows: Tensor) -> Tensor:
        """The mean of the ``keep`` rows that lie closest to most others."""
        n = len(rows)
        squares = _squared_distances(rows).fill_diagonal_(torch.inf)
        neighbours = min(max(1, n - self.byzantine - 2), max(1, n - 1))
        scores = squares.sort(1).values[:, :neighbours].sum(1)
        # Of equal scores the lower client id goes first.
        best = scores.sort(stable=True).indices[: self.keep]
        return rows[best].to(torch.float64).mean(0)


def _squared_distances(rows: Tensor) -> Tensor:
    """Of each row from each, float64 ``[n, n]``: symmetric, and 0 between equal rows."""
    n = len(rows)
    squares = torch.zeros(n, n, dtype=torch.float64, device=rows.device)
    first, second = torch.triu_indices(n, n, offset=1, device=rows.device)
    for columns in column_chunks(rows):
        # From differences: of a product of matrices the small distances would be rounding errors.
        squares[first, second] += torch.nn.functional.pdist(columns).square()
    return squares + squares.T
