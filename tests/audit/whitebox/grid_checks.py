"""Checks of noise that only fedsim's own strategies allow: on the grid, and of few coordinates.

A release lies on a grid of known step: its low bits must be like fair coins, and new in every
round.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import chdtrc, pdtrc

from fedsim.array_types import Floats, Ints
from fedsim.audit.findings import (
    Finding,
    Statistic,
    counted,
    counts_in_bins,
    invariant,
    statistical,
)
from fedsim.audit.noise_checks import NoiseSample, correlations_of_rows

FIELD = 8
"""Number of bits that are tested together."""
OFF_GRID = 0.02
"""Tolerance in grid steps: float64 rounding of a whole number after a division and a product."""


def covariance(noise: NoiseSample) -> Finding:
    """Whether noise of few coordinates has the same size in every direction.

    A likelihood-ratio test that the covariance is a multiple of the identity in each layer, with
    Bartlett's correction (Mauchly's test, for a known mean).
    """
    scaled = noise.rows.copy()
    n, d = scaled.shape
    for columns in noise.layers:
        scaled[:, columns] /= np.sqrt(np.square(scaled[:, columns]).mean())
    _, log_det = np.linalg.slogdet(scaled.T @ scaled / n)
    degrees = d * (d + 1) / 2 - len(noise.layers)
    correction = 1 - (2 * d * d + d + 2) / (6 * n * d)
    ratio = np.array([-n * correction * float(max(log_det, -1e6))])

    def p(x: Floats, _: object) -> Floats:
        return np.asarray(chdtrc(degrees, np.maximum(x, 0.0)))

    return statistical(noise.examined, Statistic("a likelihood ratio of {}", ratio, p))


def off_grid(grid: NoiseSample) -> float:
    """Largest distance of noise in grid steps, ``z``, from whole numbers."""
    return float(np.abs(grid.z - np.rint(grid.z)).max())


def on_grid(grid: NoiseSample) -> bool:
    """Whether ``z``, in grid steps, lies on the grid."""
    return off_grid(grid) <= OFF_GRID


def rounding(grid: NoiseSample) -> Finding:
    """Whether releases are whole numbers of grid steps."""
    off = off_grid(grid)
    fault = None if on_grid(grid) else f"values that are {off:.2g} of a step off the grid"
    return invariant(grid.examined, fault, "every value a whole number of grid steps")


def _steps(grid: NoiseSample) -> tuple[Ints, Floats]:
    """Whole grid steps ``[n, d]``, and their standard deviations ``[n, layers]``."""
    parts = [np.sqrt(np.square(grid.rows[:, c]).mean(-1)) for c in grid.layers]
    return np.rint(grid.rows).astype(np.int64), np.stack(parts, -1)


def equal_values(grid: NoiseSample) -> Finding:
    """Whether no more pairs of values are equal than by chance; finds noise with few values."""
    whole, stds = _steps(grid)
    _, counts = np.unique(whole, return_counts=True)
    equal = float((counts * (counts - 1) // 2).sum())
    # Two normals on the grid are equal with a probability that is their difference's density at 0.
    sizes = np.array([columns.stop - columns.start for columns in grid.layers], dtype=np.float64)
    groups, spread = np.broadcast_to(sizes, stds.shape).ravel(), np.square(stds).ravel()
    density = 1 / np.sqrt(2 * np.pi * np.maximum(spread[:, None] + spread, 1e-300))
    expected = float(groups @ density @ groups) / 2

    def p_of(pairs: Floats) -> Floats:
        return np.where(pairs < 1, 1.0, pdtrc(np.maximum(pairs - 1, 0), expected))

    words = "{} pairs of equal values"
    return statistical(grid.examined, counted(words, [equal], p_of, math.floor(expected)))


def low_bits(grid: NoiseSample) -> Finding:
    """Whether bits far below the standard deviation are uniform."""
    fields = _low_bits(grid)
    return statistical(
        grid.examined,
        *(
            counts_in_bins(np.bincount(bits.ravel(), minlength=2**FIELD), bits.size / 2**FIELD, at)
            for at, bits in fields.items()
        ),
    )


def low_bits_of_pairs(grid: NoiseSample) -> Finding:
    """Whether bits far below the standard deviation are uncorrelated between rounds."""
    mean, std = (2**FIELD - 1) / 2, math.sqrt((4**FIELD - 1) / 12)
    largest = [correlations_of_rows((bits - mean) / std)[:1] for bits in _low_bits(grid).values()]
    return statistical(grid.examined, *(statistic for one in largest for statistic in one))


def _low_bits(grid: NoiseSample) -> dict[str, Ints]:
    """Fields of bits far below the standard deviation, by their positions."""
    # A normal wider than 2^k grid steps is nearly uniform modulo 2^k, whatever is added to it: so
    # only fields of bits below half of the smallest standard deviation are tested.
    whole, stds = _steps(grid)
    return {
        f" in bits {first} to {first + FIELD - 1}": (whole >> first) & (2**FIELD - 1)
        for first in range(0, 64, FIELD)
        if 2.0 ** (first + FIELD + 1) <= float(stds.min())
    }
