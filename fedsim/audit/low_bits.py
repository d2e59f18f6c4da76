"""Conformance of the last bits of released noise, which could show a sum that it does not reach.

A release lies on a grid of known step, and its noise must be random down to that step: rounded to
it, of as many values as a normal has there, with low bits like fair coins, new in every round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import pdtrc

from fedsim.audit.checks import Check, Statistic, counts_in_bins, invariant, statistical
from fedsim.audit.noise_checks import correlations_of_rows

__all__ = ["grid_checks"]

Floats = npt.NDArray[np.float64]

FIELD = 8
"""Bits that are looked at together."""
OFF_GRID = 0.02
"""In grid steps: what float64 makes of whole numbers after a division and a product."""


def grid_checks(k: Floats, layers: Sequence[slice]) -> list[Check]:
    """Tests of the last bits of noise: those that would show a sum that noise does not reach.

    Parameters
    ----------
    k : float64 ``[..., d]``
        Noise in units of the grid that a release lies on: whole numbers, if it is rounded to it.
        Rows of NaN are not looked at.
    """
    k = k.reshape(-1, k.shape[-1])
    k = k[np.isfinite(k).all(-1)]
    if not len(k):
        return []
    looked = f"{len(k)} releases of {k.shape[-1]:,} coordinates"
    off = float(np.abs(k - np.rint(k)).max())
    rounded = invariant(
        "noise", "rounding to the grid", looked,
        f"values that are {off:.2g} of a step off the grid" if off > OFF_GRID else None,
        "every value a whole number of grid steps",
    )  # fmt: skip
    if not rounded.p_value:
        return [rounded]
    whole = np.rint(k).astype(np.int64)
    stds = np.stack([np.sqrt(np.square(k[:, c]).mean(-1)) for c in layers], -1)
    return [rounded, _equal_values(whole, stds, layers, looked), *_low_bits(whole, stds, looked)]


def _equal_values(
    whole: npt.NDArray[np.int64], stds: Floats, layers: Sequence[slice], looked: str
) -> Check:
    """How many pairs of values are equal: more than chance makes, where noise has few values."""
    _, counts = np.unique(whole, return_counts=True)
    equal = float((counts * (counts - 1) // 2).sum())
    # Two normals on the grid are equal with the density of their difference at zero.
    sizes = np.array([columns.stop - columns.start for columns in layers], dtype=np.float64)
    groups, spread = np.broadcast_to(sizes, stds.shape).ravel(), np.square(stds).ravel()
    density = 1 / np.sqrt(2 * np.pi * np.maximum(spread[:, None] + spread, 1e-300))
    expected = float(groups @ density @ groups) / 2

    def p(pairs: Floats) -> Floats:
        return np.where(pairs < 1, 1.0, pdtrc(np.maximum(pairs - 1, 0), expected))

    compared = Statistic(
        "{} pairs of equal values", np.array([equal]), p(np.array([equal])),
        lambda _, x: float(p(np.asarray(np.floor(x)))), float(math.floor(expected)), whole=True,
    )  # fmt: skip
    return statistical("noise", "equal values", looked, [compared])


def _low_bits(whole: npt.NDArray[np.int64], stds: Floats, looked: str) -> list[Check]:
    """Bits far below the standard deviation are as good as fair coins, new in every round."""
    d = whole.shape[-1]
    smallest = float(stds.min())
    uniform, repeated = [], []
    for offset in range(0, 64, FIELD):
        if 2.0 ** (offset + FIELD + 1) > smallest:
            break
        field = (whole >> offset) & (2**FIELD - 1)
        name = f" in bits {offset} to {offset + FIELD - 1}"
        counts = np.bincount(field.ravel(), minlength=2**FIELD)
        uniform.append(counts_in_bins(counts, whole.size / 2**FIELD, name))
        rows = (field.reshape(-1, d) - (2**FIELD - 1) / 2) / math.sqrt((4**FIELD - 1) / 12)
        repeated += correlations_of_rows(rows)[:1]
    return [
        statistical("noise", "low bits", looked, uniform),
        statistical("noise", "low bits in pairs of rounds", looked, repeated),
    ]
