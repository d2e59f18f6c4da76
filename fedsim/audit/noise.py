"""Conformance of released noise: over a whole run it must be white, normal and never repeated.

Every test takes noise in units of its claimed standard deviation, ``z [runs, rounds, d]``. None
of them knows what bug it looks for: they ask whether rounds, coordinates, layers and runs are
independent, of one size, and of the right shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc, log_ndtr, ndtri, stdtr

from fedsim.audit.checks import Check, chi_square_p, normal_p, smallest

__all__ = ["noise_checks", "pairs_of_rounds", "repeats"]

Floats = npt.NDArray[np.float64]

# Fewer products than that are not yet normal enough for a tail of 1e-9.
FEWEST_PRODUCTS = 4096
REPEAT_RESOLUTION = 1e8


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
        _means(z, looked),
        _accumulated(z, looked),
        _extremes(z, looked),
        _shape(z, looked),
        repeats(z, looked),
    ]
    if runs * rounds > 1:
        checks += [pairs_of_rounds(z.reshape(-1, d), looked), _magnitudes(z, looked)]
    checks.append(_shifts(z, looked))
    if sizes is not None and rounds > 9 and sizes.std() > 0:
        checks.append(_against_sizes(z, sizes, looked))
    return checks


def _variances(of: str, z: Floats, axes: int | tuple[int, int], looked: str) -> Check:
    squares = np.square(z)
    sums = squares.sum(axes)
    count = squares.size / sums.size
    p_values = chi_square_p(sums, count)
    ratio = math.sqrt(float(sums.flat[int(p_values.argmin())]) / count)
    return Check(
        "noise", f"size in {of}", looked,
        f"the oddest has {ratio:.3f} of the claimed std", "1, within chi-square bounds",
        smallest(p_values),
    )  # fmt: skip


def _layers(z: Floats, layers: Sequence[slice], looked: str) -> Check:
    sums = np.stack([np.square(z[:, :, columns]).sum(-1) for columns in layers])
    counts = np.array([columns.stop - columns.start for columns in layers], dtype=np.float64)
    p_values = np.concatenate(
        [
            chi_square_p(sums, counts[:, None, None]).ravel(),
            chi_square_p(sums.sum((1, 2)), counts * z.shape[0] * z.shape[1]),
        ]
    )
    stds = np.sqrt(sums.sum((1, 2)) / (counts * z.shape[0] * z.shape[1]))
    return Check(
        "noise", "size in each layer", f"{looked}, {len(layers)} layers",
        f"stds between {stds.min():.3f} and {stds.max():.3f} of the claimed",
        "1, within chi-square bounds, in every round and over all", smallest(p_values),
    )  # fmt: skip


def _means(z: Floats, looked: str) -> Check:
    runs, rounds, d = z.shape
    scores = z.sum((0, 1)) / math.sqrt(runs * rounds)
    over_all = scores.sum() / math.sqrt(d)
    over_rounds = z.sum(-1).ravel() / math.sqrt(d)
    p_values = normal_p(np.concatenate([scores, over_rounds, [over_all]]))
    return Check(
        "noise", "mean", looked,
        f"{over_all:+.2f} standard errors over all, {np.abs(scores).max():.2f} at most",
        "0, within normal bounds", smallest(p_values),
    )  # fmt: skip


def _accumulated(z: Floats, looked: str) -> Check:
    """Noise must add up over rounds: what cancels, or grows too fast, is not independent."""
    d = z.shape[2]
    sums = np.square(np.cumsum(z, axis=1)).sum(-1) / np.arange(1, z.shape[1] + 1)
    p_values = chi_square_p(sums, float(d))
    ratio = math.sqrt(float(sums.flat[int(p_values.argmin())]) / d)
    return Check(
        "noise", "accumulated over rounds", looked,
        f"the oddest sum has {ratio:.3f} of the std of independent rounds",
        "1, within chi-square bounds", smallest(p_values),
    )  # fmt: skip


def _extremes(z: Floats, looked: str) -> Check:
    """The largest of N normals is neither too large nor too small."""
    largest = np.array([z.max(), -z.min()])
    expected = z.size * np.exp(log_ndtr(-largest))
    too_large, too_small = -np.expm1(-expected), np.exp(-expected)
    p = smallest(np.minimum(1.0, 2 * np.minimum(too_large, too_small)))
    usual = -float(ndtri(1 / z.size))
    return Check(
        "noise", "extreme values", looked,
        f"between {-largest[1]:.2f} and {largest[0]:.2f} std", f"about {usual:.2f} on both sides",
        p,
    )  # fmt: skip


def _shape(z: Floats, looked: str) -> Check:
    """Counts in bins, finer in the tails."""
    tails = np.array([1e-5, 1e-4, 1e-3, 5e-3, 1e-2])
    edges = np.concatenate([tails, np.linspace(0.02, 0.98, 49), 1 - tails[::-1]])
    # Fewer values than ten in a bin are not yet normal.
    edges = edges[np.minimum(edges, 1 - edges) * z.size >= 20]
    expected = np.diff(np.concatenate([[0.0], edges, [1.0]])) * z.size
    counts = np.bincount(np.searchsorted(ndtri(edges), z.ravel()), minlength=len(expected))
    statistic = float((np.square(counts - expected) / expected).sum())
    p = float(chdtrc(len(expected) - 1, statistic)) if len(expected) > 2 else 1.0
    return Check(
        "noise", "shape of the distribution", looked,
        f"chi-square {statistic:.1f} in {len(expected)} bins",
        f"about {len(expected) - 1} if normal", p,
    )  # fmt: skip


def repeats(values: Floats, looked: str) -> Check:
    """Three neighbouring values that stand anywhere else again, whatever their signs."""
    # By their leading digits: noise that is used again at half or twice the size is the same.
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
    return Check(
        "noise", "exact repeats", looked, f"{again:,} values stand there twice", "none",
        0.0 if again else 1.0,
    )  # fmt: skip


def _magnitudes(z: Floats, looked: str) -> Check:
    """The same without signs: noise that is reused under another sign, or common in size."""
    d = z.shape[2]
    mean = math.sqrt(2 / math.pi)
    centred = (np.abs(z.reshape(-1, d)) - mean) / math.sqrt(1 - mean**2)
    return pairs_of_rounds(centred, looked, "pairs of rounds, without signs")


def pairs_of_rounds(rows: Floats, looked: str, name: str = "pairs of rounds") -> Check:
    """Correlations of all pairs of ``rows [n, d]``, one by one and together."""
    d = rows.shape[1]
    norms = np.maximum(np.linalg.norm(rows, axis=1), 1e-300)
    r = (rows @ rows.T / np.outer(norms, norms))[np.triu_indices(len(rows), 1)]
    worst = float(r[int(np.abs(r).argmax())])
    # Of two independent normal vectors, r sqrt(d - 1) / sqrt(1 - r^2) is Student's.
    t = abs(worst) * math.sqrt((d - 1) / max(1 - worst**2, 1e-300))
    p_worst = min(1.0, 2 * float(stdtr(d - 1, -t)) * len(r))
    p_together = float(chi_square_p(d * np.square(r).sum(), len(r)))
    p_common = float(normal_p(r.sum() * math.sqrt(d / len(r))))
    return Check(
        "noise", name, f"{looked}, {len(r):,} pairs", f"correlation {worst:+.4f} at most",
        f"0, within {1 / math.sqrt(d):.4f} each", smallest([p_worst, p_together, p_common]),
    )  # fmt: skip


def _shifts(z: Floats, looked: str) -> Check:
    """Autocorrelation at every shift of rounds and of coordinates at once."""
    runs, rounds, d = z.shape
    total = np.zeros((rounds, 2 * d))
    for run in z:
        spectrum = np.fft.rfft2(run, s=(2 * rounds, 2 * d))
        total += np.fft.irfft2(np.square(np.abs(spectrum)), s=(2 * rounds, 2 * d))[:rounds]
    shift = np.arange(2 * d)
    overlap = np.maximum(d - np.minimum(shift, 2 * d - shift), 0)
    products = runs * (rounds - np.arange(rounds))[:, None] * overlap
    scores = total / np.sqrt(np.maximum(products, 1))
    scores[0, d:] = 0  # a shift back within a round is one forth
    counted = products >= FEWEST_PRODUCTS
    counted[0, 0] = counted[0, d:] = False
    if not counted.any():
        return Check("noise", "shifts", looked, "too few values", "no correlation", 1.0)
    scores[~counted] = 0
    lag, step = np.unravel_index(int(np.abs(scores).argmax()), scores.shape)
    step = int(step) - 2 * d * (step > d)
    worst = float(np.abs(scores).max())
    # What is the same in every round shows at no shift of one by itself.
    by_round = scores[1:, 0][counted[1:, 0]]
    p_values = [min(1.0, float(normal_p(worst)) * int(counted.sum())), smallest(normal_p(by_round))]
    return Check(
        "noise", "shifts in rounds and coordinates", f"{looked}, {int(counted.sum()):,} shifts",
        f"{worst:.2f} standard errors, {lag} rounds and {step} coordinates on",
        f"about {-float(ndtri(0.5 / counted.sum())):.2f} at most", smallest(p_values),
    )  # fmt: skip


def _against_sizes(z: Floats, sizes: Floats, looked: str) -> Check:
    """Whether rounds with larger cohorts have more or less noise."""
    power = np.square(z).sum(-1).ravel()
    power = (power - power.mean()) / max(float(power.std()), 1e-300)
    cohort = (sizes.ravel() - sizes.mean()) / sizes.std()
    r = float((power * cohort).mean())
    n = power.size
    t = abs(r) * math.sqrt((n - 2) / max(1 - r * r, 1e-300))
    return Check(
        "noise", "size against the cohort's", looked, f"correlation {r:+.3f}",
        f"0, within {1 / math.sqrt(n):.3f}", 2 * float(stdtr(n - 2, -t)),
    )  # fmt: skip
