"""Differentially private PCA: one noisy second-moment matrix of normalised examples."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedsim.cohorts import FullCohort
from fedsim.mechanisms import Clipping, NoiseSource, PartialSum, Releaser
from fedsim.privacy import Entry, Event, Independent, Ledger
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import DenseRows, Layout, Rows
from fedsim.rows.dense import MeasuredRows

CHUNK = 6000  # examples in one block of rows


@dataclass(frozen=True, eq=False)
class SquareRows:
    """Rows ``x_k x_k^T`` of ``x [n, p]``, as vectors of ``p (p + 1) / 2`` entries.

    A vector has the upper triangle, with entries off the diagonal times sqrt(2). This preserves
    inner products, so that a row's norm is ``||x_k||^2``, and isotropic noise on the vector is
    isotropic on symmetric matrices.
    """

    x: Tensor

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.x)

    def norms(self, scale: Tensor | None = None, center: Tensor | None = None) -> Tensor:
        """Norms ``[n]``, of rows that are shifted and scaled first if asked."""
        if scale is not None or center is not None:
            return DenseRows(self.dense()).norms(scale, center)
        squares = self.x.double().square().sum(1)
        return torch.where(torch.isfinite(squares), squares, torch.nan)

    def measure(
        self, scale: Tensor | None = None, center: Tensor | None = None
    ) -> MeasuredRows | None:
        """Rows and their norms; None for shifted rows, whose norms may cancel near the centre."""
        return MeasuredRows(self, self.norms()) if scale is None and center is None else None

    def sum(self, weights: Tensor) -> Tensor:
        """Weighted sum of the rows."""
        x = self.x.double().masked_fill((weights == 0)[:, None], 0.0)
        return _to_vector((x * weights[:, None]).T @ x)

    def dense(self) -> Tensor:
        """The rows ``[n, p (p + 1) / 2]``, which fit into memory for small p only."""
        return torch.stack([_to_vector(torch.outer(row, row)) for row in self.x.double()])

    def columns(self, slices: Sequence[slice]) -> Rows:
        """The same rows over these columns only."""
        return DenseRows(self.dense()).columns(slices)


def principal_directions(
    x: Tensor, count: int, *, noise_multiplier: float, seed: int, ledger: Ledger
) -> Tensor:
    """Top eigenvectors of the noisy second moments (Abadi et al. 2016, section 4).

    Every example is scaled to norm 1, so that ``x x^T`` has norm 1 and their sum has
    sensitivity 1. All examples take part once, without amplification by sampling.

    Parameters
    ----------
    x : Tensor ``[N, p]``
    count : int
        Number of directions to keep.
    noise_multiplier : float
        Standard deviation of the noise on the sum, whose sensitivity is 1.
    ledger : Ledger
        Records the release before it is made.

    Returns
    -------
    Tensor
        Orthonormal columns, float64 ``[p, count]``.
    """
    noise = Independent(noise_multiplier, hardened=False)
    ledger.record(
        Entry(
            event=Event.of(FullCohort(population=len(x)), noise.multiplier),
            round=0,
            level="example",
            entropy="config",
            mechanism="second moments",
        )
    )
    source = NoiseSource(Randomness(seed).generator(Purpose.NOISE, level="example"))
    noisy = noise_multiplier > 0  # the grid of the exact sum depends on it
    # A release adds its noise to the sum in place, but the cached sum is used by the next seed too.
    release = _releaser(x, noise).release(copy.deepcopy(_total(x, noisy)), source)
    vectors: Tensor = torch.linalg.eigh(_to_matrix(release.mean, x.shape[1])).eigenvectors
    return vectors[:, -count:].flip(1)


def _releaser(x: Tensor, noise: Independent) -> Releaser:
    p = x.shape[1]
    layout = Layout.of({"moments": torch.empty(p * (p + 1) // 2, dtype=torch.float64)})
    plan = ReleasePlan(
        level="example", sampler=FullCohort(len(x)), mechanism=Clipping(1.0), noise=noise
    )
    return Releaser(plan, layout)


@lru_cache(maxsize=1)
def _total(x: Tensor, noisy: bool) -> PartialSum:
    """Sum before noise, equal for all noise multipliers above 0; cached, as it is the slow part."""
    total = _releaser(x, Independent(float(noisy), hardened=False)).start({})
    for start in range(0, len(x), CHUNK):
        block = x[start : start + CHUNK].double()
        norms = torch.linalg.vector_norm(block, dim=1, keepdim=True).clamp_min(1e-12)
        total.add(SquareRows(block / norms))
    return total


def _to_vector(matrix: Tensor) -> Tensor:
    p = len(matrix)
    upper = torch.triu_indices(p, p)
    return matrix[upper[0], upper[1]].mul_(_scale(upper, math.sqrt(2)))


def _to_matrix(vector: Tensor, p: int) -> Tensor:
    upper = torch.triu_indices(p, p)
    matrix = torch.zeros(p, p, dtype=torch.float64)
    matrix[upper[0], upper[1]] = vector * _scale(upper, math.sqrt(0.5))
    return matrix + matrix.T - torch.diag(matrix.diagonal())


def _scale(upper: Tensor, off_diagonal: float) -> Tensor:
    """Factors: 1 on the diagonal, else ``off_diagonal``; `torch.where` would round to float32."""
    scale = torch.full((upper.shape[1],), off_diagonal, dtype=torch.float64)
    return scale.masked_fill_(upper[0] == upper[1], 1.0)
