"""L2 norms of rows: on a CPU summed in one order, so that a compiled sum has the same bytes."""

from __future__ import annotations

from fedsim.kernels.rows import by_halves, is_supported, squared_norms
from fedsim.lazy import Tensor, torch

# Squares of float64 entries beyond these may overflow or lose all their digits.
SMALL, LARGE = 2.0**-400, 2.0**400


def norms_of(y: Tensor) -> Tensor:
    """Norms of rows ``y [..., d]``, float64 ``[...]``, wherever float64 holds their squares.

    Their relative error is below ``2^-44 + d 2^-52``. On a CPU the order of the sum is that of
    `fedsim.kernels.rows.by_halves`; on a GPU it is torch's.
    """
    if y.is_cuda:
        norms: Tensor = torch.linalg.vector_norm(y, dim=-1, dtype=torch.float64)
        return norms
    rows = y.reshape(-1, y.shape[-1])
    squares = squared_norms(rows) if is_supported(rows) else by_halves(rows.double().square())
    return squares.sqrt_().view(y.shape[:-1])


def usual(norms: Tensor) -> bool:
    """Whether all of them are numbers that squaring has not harmed."""
    if not norms.numel():
        return True
    least, most = torch.aminmax(norms)  # NaN fails both comparisons.
    return float(least) > SMALL and float(most) < LARGE


def whiten_(y: Tensor, scale: Tensor | None, center: Tensor | None) -> None:
    """Overwrite rows ``y [..., c, d]`` by ``(y - center) * scale``, where these are given."""
    if center is not None:
        y.sub_(center.unsqueeze(-2))
    if scale is not None:
        y.mul_(scale.unsqueeze(-2))


def norms_(y: Tensor) -> tuple[Tensor, Tensor | float]:
    """Norms of float64 rows ``y [..., d]``, whose extreme rows are rescaled in place.

    Returns
    -------
    norms : float64 ``[...]``
        Of the rows as they now stand; NaN where a row is not finite.
    unit : float64 ``[...]``, or 1.0
        A power of two for each row: the row was ``unit * y``.
    """
    norms = norms_of(y)
    if not y.is_cuda and usual(norms):
        return norms, 1.0
    unharmed = (norms > SMALL) & (norms < LARGE)
    peak = torch.linalg.vector_norm(y, float("inf"), dim=-1)
    finite = torch.isfinite(peak)
    exponent = torch.where(unharmed | ~finite | (peak == 0), 0, torch.frexp(peak).exponent - 1).to(
        torch.float64
    )
    # In two steps: 2^-exponent alone may overflow.
    half = torch.floor(exponent / 2)
    y.mul_(torch.exp2(-half)[..., None]).mul_(torch.exp2(half - exponent)[..., None])
    norms = torch.where(finite, norms_of(y), torch.nan)
    return norms, torch.exp2(exponent)


def round_up(norms: Tensor, d: int) -> Tensor:
    """Norms of rows of length ``d``, raised by more than their rounding error."""
    return norms * (1 + 2.0**-44 + d * 2.0**-52)
