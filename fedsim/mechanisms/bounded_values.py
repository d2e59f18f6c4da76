"""Clients' numbers encoded as bounded rows: noisy sums give means and quantiles over clients.

A number v in [0, 1] is encoded as the pair (v, 1 - v), whose norm is at most 1. The mean is the
sum of the first entries divided by the sum of both; a client without a number is a row of zeros and
changes neither. For quantiles the number's bin is encoded as a column of a matrix C, the square
root of the prefix-sum matrix, so that cumulative counts have less than half of the noise that they
would have with plain counts (Fichtenberger, Henzinger and Upadhyay 2023; Henzinger, Upadhyay and
Upadhyay 2023). Several numbers of a client enter as the mean of their rows, whose norm is no
larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from fedsim.array_types import Floats
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.settings import check_settings

BINS = 32
"""Number of bins of a range, for quantiles."""

QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}
"""Quantiles to release. Minima and maxima are not released: a single client could move them."""


@cache
def _square_root() -> Floats:
    """The matrix C ``[BINS, BINS]``, lower triangular, scaled so that its longest column is 1.

    Its columns are the coefficients of ``(1 - x)^(-1/2)``, shifted down: its square is, up to
    the scale, the matrix of prefix sums.
    """
    coefficients = np.cumprod([1.0, *((2 * j - 1) / (2 * j) for j in range(1, BINS))])
    places = np.arange(BINS)
    matrix: Floats = np.tril(coefficients[places[:, None] - places])
    return matrix / np.linalg.norm(coefficients)


@dataclass(frozen=True)
class ValueRange:
    """Encoding of one number of each client, clamped to a range.

    Parameters
    ----------
    name : str
    low, high : float
        The range.
    quantiles : bool
        Whether quantiles are released with the mean.

    Raises
    ------
    FedsimError
        If the range is empty or not finite.
    """

    name: str
    low: float
    high: float
    quantiles: bool = False

    def __post_init__(self) -> None:
        check_settings(self)
        if not -math.inf < self.low < self.high < math.inf:
            raise FedsimError(
                f"the range of '{self.name}' is {self.low:g} to {self.high:g}; it must be finite, "
                "its first number the smaller."
            )

    @property
    def size(self) -> int:
        """Number of entries of a row."""
        return 2 + BINS * self.quantiles

    @property
    def vector_count(self) -> int:
        """Number of vectors of norm at most 1 that a row consists of."""
        return 1 + self.quantiles

    @property
    def result_names(self) -> tuple[str, ...]:
        """Names of the results of `summary`."""
        return (self.name, *(f"{self.name}-{q}" for q in QUANTILES if self.quantiles))

    def rows(self, values: Floats) -> Floats:
        """Encode numbers ``[n]`` as rows ``[n, size]``; NaN becomes zeros."""
        present = ~np.isnan(values)
        scaled = (np.clip(values, self.low, self.high) - self.low) / (self.high - self.low)
        scaled = np.where(present, scaled, 0.0)
        rows = np.zeros((len(values), self.size))
        rows[:, 0], rows[:, 1] = scaled, 1.0 - scaled
        if self.quantiles:
            bins = np.minimum((scaled * BINS).astype(np.int64), BINS - 1)
            rows[:, 2:] = _square_root().T[bins]
        rows[~present] = 0.0
        return rows

    def count(self, sums: Floats) -> float:
        """Estimated number of clients, from the noisy sums ``[size]`` of rows."""
        return float(sums[0] + sums[1])

    def mean(self, sums: Floats) -> float:
        """Estimated mean; NaN if the estimated number of clients is below 1."""
        count = self.count(sums)
        if count < 1:
            return math.nan
        share = min(max(float(sums[0]) / count, 0.0), 1.0)
        return self.low + share * (self.high - self.low)

    def summary(self, sums: Floats) -> Iterator[tuple[str, float]]:
        """Mean and quantiles, with their names."""
        yield self.name, self.mean(sums)
        for name, share in QUANTILES.items() if self.quantiles else ():
            yield f"{self.name}-{name}", self.quantile(sums, share)

    def mean_error(self, mean: float, noise: float, count: float) -> float:
        """Standard deviation of the mean's error, given that of the noise on every sum."""
        share = (mean - self.low) / (self.high - self.low)
        return noise * math.hypot(share, 1 - share) * (self.high - self.low) / max(count, 1.0)

    def cumulative(self, sums: Floats) -> Floats:
        """Estimated share of clients below each edge of a bin, ``[BINS + 1]``, from 0 to 1."""
        # The sums are C times the counts by bin: solve for these, and accumulate.
        below = np.cumsum(np.linalg.solve(_square_root(), sums[2:]))
        count = max(self.count(sums), 1.0)
        shares = np.clip(np.concatenate([[0.0], below[:-1] / count, [1.0]]), 0.0, 1.0)
        # Noise may make the shares decrease. Take the middle between the least increasing curve
        # above them and the largest one below.
        rising = np.maximum.accumulate(shares)
        return (rising + np.minimum.accumulate(shares[::-1])[::-1]) / 2

    def quantile(self, sums: Floats, share: float) -> float:
        """Value below which this share of the clients is, interpolated; NaN as in `mean`."""
        if self.count(sums) < 1:
            return math.nan
        edges = np.linspace(self.low, self.high, BINS + 1)
        shares = self.cumulative(sums)
        last = int(np.searchsorted(shares, share, side="left"))
        before, after = shares[max(last - 1, 0)], shares[last]
        fraction = (share - before) / (after - before) if after > before else 0.0
        return float(edges[max(last - 1, 0)] + fraction * (edges[1] - edges[0]))


@dataclass(frozen=True)
class Moments:
    """Encoding of a number of each example: its mean, standard deviation and quantiles.

    Parameters
    ----------
    name : str
    low, high : float
        The range to which it is clamped.
    quantiles : bool
        Whether quantiles are released.

    Raises
    ------
    FedsimError
        As `ValueRange` does.
    """

    name: str
    low: float
    high: float
    quantiles: bool = False

    @property
    def ranges(self) -> tuple[ValueRange, ValueRange]:
        """Encodings of the number, and of its squared distance from the middle of its range."""
        half = (self.high - self.low) / 2
        return (
            ValueRange(self.name, self.low, self.high, self.quantiles),
            ValueRange(f"{self.name}, squared", 0.0, half * half),
        )

    @property
    def size(self) -> int:
        """Number of entries of a row."""
        return sum(value_range.size for value_range in self.ranges)

    def encoded(self, values: Tensor) -> Tensor:
        """Means ``[..., size]`` of the rows of n numbers, ``[..., n]``; NaN counts as zeros."""
        present = ~values.isnan()
        scaled = ((values - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        scaled = torch.where(present, scaled, 0.0)
        square = (2 * scaled - 1).square()
        parts = [torch.stack([scaled, 1 - scaled], -1)]
        if self.quantiles:
            columns = torch.from_numpy(_square_root().T.copy()).to(values)
            parts.append(columns[(scaled * BINS).long().clamp_max(BINS - 1)])
        parts.append(torch.stack([square, 1 - square], -1))
        rows = torch.cat(parts, -1) * present[..., None]
        return rows.mean(-2)

    def deviation(self, sums: Floats) -> float:
        """Standard deviation over examples, with equal weight for each client; NaN as in `mean`."""
        value, square = self.ranges
        mean = value.mean(sums[: value.size]) - (self.low + self.high) / 2
        variance = square.mean(sums[value.size :]) - mean**2
        return math.nan if math.isnan(variance) else math.sqrt(max(variance, 0.0))


def joint_norm(ranges: Sequence[ValueRange]) -> float:
    """Largest norm of a joint row of several ranges: the sensitivity of its sum."""
    return math.sqrt(sum(value_range.vector_count for value_range in ranges))


def joint_rows(ranges: Sequence[ValueRange], values: Mapping[str, Floats], count: int) -> Floats:
    """Joint rows ``[n, sum of sizes]`` of ``count`` clients; missing numbers count as NaN."""
    unreported = np.full(count, np.nan)
    parts = [
        value_range.rows(np.asarray(values.get(value_range.name, unreported)))
        for value_range in ranges
    ]
    return np.concatenate(parts, axis=1)


def split_sums(ranges: Sequence[ValueRange], sums: Floats) -> dict[str, Floats]:
    """The sums of each range, by its name."""
    ends = np.cumsum([value_range.size for value_range in ranges])
    parts = np.split(sums, ends[:-1])
    return {value_range.name: sums for value_range, sums in zip(ranges, parts, strict=True)}
