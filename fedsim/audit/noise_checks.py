"""Conformance of released noise: over a whole run it must be white, normal and never repeated.

Every test takes noise in units of its claimed standard deviation, ``z [runs, rounds, d]``. None
of them knows what bug it looks for: they ask whether rounds, coordinates, directions, layers and
runs are independent, of one size, and of the right shape. A release lies on a grid of known step:
its noise must be random down to that step, with low bits like fair coins, new in every round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.fft import dct
from scipy.special import chdtrc, log_ndtr, ndtri, pdtrc

from fedsim.audit.checks import (
    Check,
    Floats,
    Ids,
    Statistic,
    chi_square,
    correlations,
    counts_in_bins,
    invariant,
    normal,
    statistical,
)

FEWEST_PRODUCTS = 4096
"""Sums of fewer products are not yet normal enough for a tail of 1e-9."""
REPEAT_RESOLUTION = 1e8
FEWEST_ROUNDS = 16
"""Fewer rounds say nothing about pairs of coordinates."""
FIELD = 8
"""Bits that are tested together."""
OFF_GRID = 0.02
"""In grid steps: rounding of whole numbers in float64 after a division and a product."""


def noise_checks(z: Floats, layers: Sequence[slice], sizes: Floats | None = None) -> list[Check]:
    """Every test of one array of noise.

    Parameters
    ----------
    z : float64 ``[runs, rounds, d]``
        Standard normal if the claim is true.
    layers : sequence of slice
        Columns of each layer.
    sizes : float64 ``[runs, rounds]``, optional
        Sizes of the cohorts, which the noise may not depend on.
    """
    runs, rounds, d = z.shape
    looked = f"{runs} x {rounds} rounds of {d:,} coordinates"
    checks = [
        _variances("each round", z, -1, looked),
        _layers(z, layers, looked),
        _variances("each coordinate", z, (0, 1), looked),
        _directions(z, layers, looked),
        _means(z, looked),
        _accumulated(z, looked),
        _extremes(z, looked),
        _shape(z, looked),
        repeats(z, looked),
    ]
    if runs * rounds > 1:
        checks += [pairs_of_rounds(z.reshape(-1, d), looked), _magnitudes(z, looked)]
    if runs * rounds >= FEWEST_ROUNDS:
        checks.append(_pairs_of_coordinates(z.reshape(-1, d), looked))
    checks.append(_shifts(z, looked))
    if sizes is not None and rounds > 9 and sizes.std() > 0:
        checks.append(_against_sizes(z, sizes, looked))
    return checks


def _variances(of: str, z: Floats, axes: int | tuple[int, int], looked: str) -> Check:
    squares = np.square(z)
    sums = squares.sum(axes)
    compared = chi_square("a std of {} of the claimed", sums, squares.size / sums.size)
    return statistical("noise", f"size in {of}", looked, [compared])


def _layers(z: Floats, layers: Sequence[slice], looked: str) -> Check:
    sums = np.stack([np.square(z[:, :, columns]).sum(-1) for columns in layers])
    counts = np.array([columns.stop - columns.start for columns in layers], dtype=np.float64)
    degrees = np.broadcast_to(counts[:, None, None], sums.shape)
    return statistical(
        "noise", "size in each layer", f"{looked}, {len(layers)} layers",
        [
            chi_square("a std of {} of the claimed in one round", sums, degrees),
            chi_square(
                "a std of {} of the claimed over all rounds",
                sums.sum((1, 2)), counts * z.shape[0] * z.shape[1],
            ),
        ],
    )  # fmt: skip


def _directions(z: Floats, layers: Sequence[slice], looked: str) -> Check:
    """Projections on directions that no coordinate shows: noise must be as large along each.

    They are those of the cosine transform of all coordinates and of each layer's, and of the
    Hadamard transform: sums, differences, alternating signs, blocks.
    """
    runs, rounds, d = z.shape
    rows = z.reshape(-1, d)
    transformed = [dct(rows, norm="ortho", axis=-1), _hadamard(rows)]
    if len(layers) > 1:
        transformed += [dct(rows[:, columns], norm="ortho", axis=-1) for columns in layers]
    sums = np.concatenate([np.square(values).sum(0) for values in transformed])
    return statistical(
        "noise", "size in each direction", f"{looked}, {len(sums):,} projections",
        [chi_square("a std of {} of the claimed along one", sums, runs * rounds)],
    )  # fmt: skip


def _hadamard(rows: Floats) -> Floats:
    """Orthonormal Walsh-Hadamard transform of the first ``2^k`` columns."""
    width = 1 << (rows.shape[1].bit_length() - 1)
    values = rows[:, :width].copy()
    half = 1
    while half < width:
        pairs = values.reshape(len(rows), -1, 2, half)
        values = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half *= 2
    return np.asarray(values.reshape(len(rows), width) / math.sqrt(width))


def covariance_check(z: Floats, layers: Sequence[slice]) -> Check:
    """Whether noise of few coordinates is as large in every direction there is: ``z [n, d]``.

    A likelihood-ratio test of a covariance that is the identity times a number a layer, with
    Bartlett's correction (Mauchly's test, for a known mean).
    """
    n, d = z.shape
    scaled = z.copy()
    for columns in layers:
        scaled[:, columns] /= np.sqrt(np.square(z[:, columns]).mean())
    _, log_det = np.linalg.slogdet(scaled.T @ scaled / n)
    degrees = d * (d + 1) / 2 - len(layers)
    correction = 1 - (2 * d * d + d + 2) / (6 * n * d)
    statistic = -n * correction * float(max(log_det, -1e6))
    compared = Statistic(
        "a likelihood ratio of {}",
        np.array([statistic]),
        lambda x, _: chdtrc(degrees, np.maximum(x, 0.0)),
    )
    return statistical(
        "noise", "size in any direction", f"{n:,} rounds of {d} coordinates", [compared]
    )


def _means(z: Floats, looked: str) -> Check:
    runs, rounds, d = z.shape
    scores = z.sum((0, 1)) / math.sqrt(runs * rounds)
    return statistical(
        "noise", "mean", looked,
        [
            normal("{} standard errors in one coordinate", scores),
            normal("{} standard errors in one round", z.sum(-1) / math.sqrt(d)),
            normal("{} standard errors over all", [scores.sum() / math.sqrt(d)]),
        ],
    )  # fmt: skip


def _accumulated(z: Floats, looked: str) -> Check:
    """Sums over rounds: noise that cancels, or grows too fast, is not independent."""
    d = z.shape[2]
    sums = np.square(np.cumsum(z, axis=1)).sum(-1) / np.arange(1, z.shape[1] + 1)
    words = "a sum with a std of {} of that of independent rounds"
    return statistical("noise", "accumulated over rounds", looked, [chi_square(words, sums, d)])


def _extremes(z: Floats, looked: str) -> Check:
    """The largest of N normals is neither too large nor too small."""

    def p(largest: Floats, _: object) -> Floats:
        expected = z.size * np.exp(log_ndtr(-largest))
        too_large, too_small = -np.expm1(-expected), np.exp(-expected)
        return np.asarray(np.minimum(1.0, 2 * np.minimum(too_large, too_small)))

    largest = np.array([z.max(), -z.min()])
    usual = -float(ndtri(0.7 / z.size))
    compared = Statistic("the largest value on one side is {} std", largest, p, usual)
    return statistical("noise", "extreme values", looked, [compared])


def _shape(z: Floats, looked: str) -> Check:
    """Counts in bins, narrower in the tails."""
    tails = np.array([1e-5, 1e-4, 1e-3, 5e-3, 1e-2])
    edges = np.concatenate([tails, np.linspace(0.02, 0.98, 49), 1 - tails[::-1]])
    # Counts below ten are not yet normal.
    edges = edges[np.minimum(edges, 1 - edges) * z.size >= 20]
    expected = np.diff(np.concatenate([[0.0], edges, [1.0]])) * z.size
    counts = np.bincount(np.searchsorted(ndtri(edges), z.ravel()), minlength=len(expected))
    return statistical(
        "noise", "shape of the distribution", f"{looked}, {len(expected)} bins",
        [counts_in_bins(counts, expected)] if len(expected) > 2 else [],
    )  # fmt: skip


def repeats(values: Floats, looked: str) -> Check:
    """Three neighbouring values that occur in the same order elsewhere, whatever their signs."""
    # By their mantissas: noise that is used again at half or twice the size is found too.
    mantissas = np.round(np.frexp(np.abs(values))[0] * REPEAT_RESOLUTION).astype(np.uint64)
    if mantissas.shape[-1] < 3:
        mantissas = mantissas.reshape(*mantissas.shape[:-2], -1)
    # Wrapping products of odd numbers: a hash of the triple.
    factors = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
    width = mantissas.shape[-1] - 2
    keys = np.zeros(1, dtype=np.uint64)
    for offset, factor in enumerate(factors):
        keys = keys + mantissas[..., offset : offset + width] * np.uint64(factor)
    again = keys.size - np.unique(keys).size
    return invariant(
        "noise", "exact repeats", looked, f"{again:,} values occur again" if again else None,
        "no value occurs again",
    )  # fmt: skip


def _magnitudes(z: Floats, looked: str) -> Check:
    """Pairs of rounds without signs: noise reused with another sign, or of a common size."""
    d = z.shape[2]
    mean = math.sqrt(2 / math.pi)
    centred = (np.abs(z.reshape(-1, d)) - mean) / math.sqrt(1 - mean**2)
    return pairs_of_rounds(centred, looked, "pairs of rounds, without signs")


def pairs_of_rounds(rows: Floats, looked: str, name: str = "pairs of rounds") -> Check:
    """Correlations of all pairs of ``rows [n, d]``, one by one and together."""
    pairs = len(rows) * (len(rows) - 1) // 2
    return statistical("noise", name, f"{looked}, {pairs:,} pairs", correlations_of_rows(rows))


def _pairs_of_coordinates(rows: Floats, looked: str) -> Check:
    """Correlations of all pairs of columns: coordinates that share noise, in whatever order."""
    pairs = rows.shape[1] * (rows.shape[1] - 1) // 2
    return statistical(
        "noise", "pairs of coordinates", f"{looked}, {pairs:,} pairs", correlations_of_rows(rows.T)
    )


def correlations_of_rows(rows: Floats) -> list[Statistic]:
    """Of all pairs of ``rows [n, d]``: the largest, their squares together, and their sum."""
    n, d = rows.shape
    pairs = n * (n - 1) // 2
    if not pairs:
        return []
    norms = np.maximum(np.linalg.norm(rows, axis=1), 1e-300)
    r = rows @ rows.T
    r /= norms[:, None]
    r /= norms
    np.fill_diagonal(r, 0.0)
    worst = float(r.flat[int(np.abs(r).argmax())])
    largest = correlations("correlation {} of one pair", [worst], d)
    together = chi_square(
        "correlations of {} times the size of independent ones",
        [d * float(np.square(r).sum()) / 2], pairs,
    )  # fmt: skip
    common = normal(
        "{} standard errors of the mean correlation", [r.sum() / 2 * math.sqrt(d / pairs)]
    )
    return [replace(largest, count=pairs), together, common]


def _shifts(z: Floats, looked: str) -> Check:
    """Autocorrelation at every shift of rounds and of coordinates at once."""
    runs, rounds, d = z.shape
    # By the convolution theorem, padded with zeros to twice the size: without padding a shift
    # would wrap around, and mix the last rounds with the first ones.
    total = np.zeros((rounds, 2 * d))
    for run in z:
        spectrum = np.fft.rfft2(run, s=(2 * rounds, 2 * d))
        total += np.fft.irfft2(np.square(np.abs(spectrum)), s=(2 * rounds, 2 * d))[:rounds]
    shift = np.arange(2 * d)
    overlap = np.maximum(d - np.minimum(shift, 2 * d - shift), 0)
    products = runs * (rounds - np.arange(rounds))[:, None] * overlap
    scores = total / np.sqrt(np.maximum(products, 1))
    scores[0, d:] = 0  # within a round a negative shift is the same as a positive one
    counted = products >= FEWEST_PRODUCTS
    counted[0, 0] = counted[0, d:] = False
    scores[~counted] = 0
    lag, step = np.unravel_index(int(np.abs(scores).argmax()), scores.shape)
    worst = float(scores[lag, step])
    step = int(step) - 2 * d * (step > d)
    count = int(counted.sum())
    words = f"{{}} standard errors at a shift of {lag} rounds and {step} coordinates"
    one = replace(normal(words, [worst]), count=count)
    # A value that is the same in every round is not seen at any single shift.
    by_round = normal("{} standard errors at a shift of rounds", scores[1:, 0][counted[1:, 0]])
    looked = f"{looked}, {count:,} shifts"
    kinds = [one, by_round] if count else []
    return statistical("noise", "shifts in rounds and coordinates", looked, kinds)


def _against_sizes(z: Floats, sizes: Floats, looked: str) -> Check:
    """Whether rounds with larger cohorts have more or less noise."""
    power = np.square(z).sum(-1).ravel()
    power = (power - power.mean()) / max(float(power.std()), 1e-300)
    cohort = (sizes.ravel() - sizes.mean()) / sizes.std()
    # Two means are estimated: as many degrees as n - 1 pairs with known ones.
    compared = correlations("correlation {}", [float((power * cohort).mean())], power.size - 1)
    return statistical("noise", "size against the cohort's", looked, [compared])


def grid_checks(k: Floats, layers: Sequence[slice]) -> list[Check]:
    """Tests of the low bits of noise, where an exact sum would show if noise did not cover them.

    Parameters
    ----------
    k : float64 ``[..., d]``
        Noise in units of the grid that a release lies on: whole numbers, if it is rounded to it.
        Rows of NaN are left out.
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


def _equal_values(whole: Ids, stds: Floats, layers: Sequence[slice], looked: str) -> Check:
    """How many pairs of values are equal: more than by chance, where noise has few values."""
    _, counts = np.unique(whole, return_counts=True)
    equal = float((counts * (counts - 1) // 2).sum())
    # Two normals on the grid are equal with the density of their difference at zero.
    sizes = np.array([columns.stop - columns.start for columns in layers], dtype=np.float64)
    groups, spread = np.broadcast_to(sizes, stds.shape).ravel(), np.square(stds).ravel()
    density = 1 / np.sqrt(2 * np.pi * np.maximum(spread[:, None] + spread, 1e-300))
    expected = float(groups @ density @ groups) / 2

    def p(pairs: Floats, _: object) -> Floats:
        return np.where(pairs < 1, 1.0, pdtrc(np.maximum(pairs - 1, 0), expected))

    usual = float(math.floor(expected))
    compared = Statistic("{} pairs of equal values", np.array([equal]), p, usual, whole=True)
    return statistical("noise", "equal values", looked, [compared])


def _low_bits(whole: Ids, stds: Floats, looked: str) -> list[Check]:
    """Bits far below the standard deviation are as good as fair coins, new in every round."""
    d = whole.shape[-1]
    # A normal that is wider than 2^k grid steps is nearly uniform modulo 2^k, whatever is added to
    # it: only fields of bits below half of the smallest standard deviation are tested.
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
