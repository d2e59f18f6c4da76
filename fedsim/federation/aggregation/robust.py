"""Robust means: centres of a round's rows, used in place of their sum, without privacy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.base import Weighting
from fedsim.mechanisms.none import NoPrivacy
from fedsim.registry import register
from fedsim.settings import Ge, Lt

CHUNK = 2**22
"""Numbers that are sorted at a time, which bounds the memory needed."""


@dataclass(frozen=True)
class RobustMean(NoPrivacy):
    """A centre of a round's rows that is not a function of their sum, and replaces their mean.

    Every usable client has the same weight, whatever its number of examples. All rows of a round
    are stored: memory is cohort times parameters, where a sum needs that of one row. The influence
    of one client depends on the others' rows and is not bounded by a plan's C, so that noise in
    units of C would not protect it: noise is refused. Subclasses are frozen dataclasses of their
    settings that implement `center`.
    """

    protects_nobody: ClassVar[bool] = True
    no_noise: ClassVar[str] = (
        "how far one client moves a robust mean depends on all other updates, and the plan does "
        "not bound it"
    )
    weighting: Weighting = field(default="uniform", init=False, repr=False)

    @abstractmethod
    def center(self, rows: Tensor) -> Tensor:
        """The centre, float64 ``[d]``, of finite rows ``[n, d]`` sorted by client id, n >= 1."""

    def check(self, expected: float) -> None:
        """Refuse an ``expected`` cohort size that is too small for the settings.

        Raises
        ------
        FedsimError
        """


@register("mechanism", "median")
@dataclass(frozen=True)
class Median(RobustMean):
    """The median of each coordinate over clients (Yin et al. 2018).

    For an even number of rows it is the mean of the two middle values. Of n rows, (n - 1) / 2
    rounded down may be arbitrary. No privacy.
    """

    def center(self, rows: Tensor) -> Tensor:
        """The median of each coordinate."""
        n = len(rows)
        middle = slice((n - 1) // 2, n // 2 + 1)
        return torch.cat(
            [columns.sort(0).values[middle].mean(0) for columns in column_chunks(rows)]
        )


@register("mechanism", "trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean(RobustMean):
    """The mean of each coordinate over clients, without its largest and smallest values.

    Of n rows, trim times n, rounded down, may be arbitrary. No privacy. Source: Yin et al. 2018.
    """

    trim: Annotated[float, Ge(0), Lt(0.5)] = 0.1
    """The share of clients that is left out at each end, in each coordinate."""

    def center(self, rows: Tensor) -> Tensor:
        """The mean of each coordinate's values between the trimmed extremes."""
        n = len(rows)
        # 0.29 * 100 is a little less than 29 in floating point. A row always remains.
        left_out = min(int(self.trim * n + 1e-9), (n - 1) // 2)
        middle = slice(left_out, n - left_out)
        return torch.cat(
            [columns.sort(0).values[middle].mean(0) for columns in column_chunks(rows)]
        )


@register("mechanism", "krum")
@dataclass(frozen=True)
class Krum(RobustMean):
    """The row with the least sum of squared distances to its n - f - 2 nearest rows (Krum).

    f is the number of byzantine clients. With ``keep`` above 1 it is the mean of that many rows
    (multi-Krum), of fewer if clients fail, so that f can be left out. If n - f - 2 is below 1, only
    the nearest row is used, without any guarantee. No privacy. Needs n^2 numbers of memory in
    addition to the rows. Source: Blanchard et al. 2017.
    """

    byzantine: Annotated[int, Ge(0)] = 1
    """The number of Byzantine clients in a cohort, which may send anything; below (n - 2) / 2."""
    keep: Annotated[int, Ge(1)] = 1
    """How many rows are averaged (Multi-Krum), at most the cohort less byzantine; 1 for Krum."""

    def check(self, expected: float) -> None:
        """Refuse a cohort whose byzantine clients could be close together, or must be kept."""
        if expected < max(2 * self.byzantine + 3, self.byzantine + self.keep):
            raise FedsimError(
                f"mechanism.byzantine is {self.byzantine} and mechanism.keep {self.keep}; twice "
                "byzantine plus 3, and byzantine plus keep, must both be at most the cohort's "
                f"{expected:g} clients."
            )

    def center(self, rows: Tensor) -> Tensor:
        """The mean of the ``keep`` rows with the smallest sums of squared distances."""
        n = len(rows)
        squares = _squared_distances(rows).fill_diagonal_(torch.inf)
        neighbours = min(max(1, n - self.byzantine - 2), max(1, n - 1))
        scores = squares.sort(1).values[:, :neighbours].sum(1)
        # Stable: of equal scores the lower client id is chosen, on every engine.
        best = scores.sort(stable=True).indices[: max(1, min(self.keep, n - self.byzantine))]
        return rows[best].to(torch.float64).mean(0)


def _squared_distances(rows: Tensor) -> Tensor:
    """Squared distances between rows, float64 ``[n, n]``: symmetric, and 0 between equal rows."""
    n = len(rows)
    squares = torch.zeros(n, n, dtype=torch.float64, device=rows.device)
    first, second = torch.triu_indices(n, n, offset=1, device=rows.device)
    for columns in column_chunks(rows):
        # pdist computes from differences; with a matrix product, small distances would be rounding
        # errors.
        squares[first, second] += torch.nn.functional.pdist(columns).square()
    return squares + squares.T


def column_chunks(rows: Tensor) -> Iterator[Tensor]:
    """Chunks of columns of rows ``[n, d]``, as float64, of at most about `CHUNK` numbers."""
    size = max(1, CHUNK // len(rows))
    for first in range(0, rows.shape[1], size):
        yield rows[:, first : first + size].to(torch.float64)
