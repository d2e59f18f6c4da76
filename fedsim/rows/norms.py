"""L2 norms of rows. On a CPU squares are summed in one fixed order, as in the compiled kernel."""

from __future__ import annotations

from fedsim.kernels.rows import is_supported, pairwise_sums, squared_norms
from fedsim.lazy import Tensor, torch

# Norms outside of this range may come from squares that overflowed or underflowed in float64.
SMALL, LARGE = 2.0**-400, 2.0**400


def norms_of(y: Tensor) -> Tensor:
    """Norms of rows ``y [..., d]``, float64 ``[...]``, if float64 can represent their squares.

    The relative error is below ``2^-44 + d 2^-52``. On a CPU the order of summation is that of
    `fedsim.kernels.rows.pairwise_sums`; on a GPU it is torch's.
    """
    if y.is_cuda:
        norms: Tensor = torch.linalg.vector_norm(y, dim=-1, dtype=torch.float64)
        return norms
    rows = y.reshape(-1, y.shape[-1])
    squares = squared_norms(rows) if is_supported(rows) else pairwise_sums(rows.double().square())
    return squares.sqrt_().view(y.shape[:-1])


def in_safe_range(norms: Tensor) -> bool:
    """Whether all norms are finite numbers whose squares neither overflowed nor underflowed."""
    if not norms.numel():
        return True
    smallest, largest = torch.aminmax(norms)  # NaN fails both comparisons.
    return float(smallest) > SMALL and float(largest) < LARGE


def whiten_(y: Tensor, scale: Tensor | None, center: Tensor | None) -> None:
    """Overwrite rows ``y [..., c, d]`` by ``(y - center) * scale``; None leaves either out."""
    if center is not None:
        y.sub_(center.unsqueeze(-2))
    if scale is not None:
        y.mul_(scale.unsqueeze(-2))


def norms_(y: Tensor) -> tuple[Tensor, Tensor | float]:
    """Norms of float64 rows ``y [..., d]``; extremely long or short rows are rescaled in place.

    Returns
    -------
    norms : float64 ``[...]``
        Norms of the rescaled rows; NaN where a row is not finite.
    unit : float64 ``[...]``, or 1.0
        Power of two by which each row was divided: the original row is ``unit * y``.
    """
    norms = norms_of(y)
    if not y.is_cuda and in_safe_range(norms):
        return norms, 1.0
    is_safe = (norms > SMALL) & (norms < LARGE)
    peak = torch.linalg.vector_norm(y, float("inf"), dim=-1)
    finite = torch.isfinite(peak)
    exponent = torch.where(is_safe | ~finite | (peak == 0), 0, torch.frexp(peak).exponent - 1).to(
        torch.float64
    )
    # In two steps, since 2^-exponent may overflow. Powers of two lose no digits.
    half = torch.floor(exponent / 2)
    y.mul_(torch.exp2(-half)[..., None]).mul_(torch.exp2(half - exponent)[..., None])
    norms = torch.where(finite, norms_of(y), torch.nan)
    return norms, torch.exp2(exponent)


def round_up(norms: Tensor, d: int) -> Tensor:
    """Upper bounds on the true norms of rows of length ``d``, given those of `norms_of`."""
    return norms * (1 + 2.0**-44 + d * 2.0**-52)
