"""Norms of dense rows, and their addition to a sum on a grid, in one pass each: ``rows.c``."""

from __future__ import annotations

import ctypes
import functools

from fedsim.errors import FedsimError
from fedsim.kernels.arguments import address, new_address, sizes
from fedsim.kernels.building import declare, library, loaded
from fedsim.lazy import Tensor, torch

TILE = 4096  # as in rows.c, which makes the same additions
_POINTER = ctypes.c_void_p
_BLOCK = (_POINTER, ctypes.c_ssize_t, ctypes.c_size_t, ctypes.c_size_t)
_ARGUMENTS = {
    "squares": (*_BLOCK, _POINTER, _POINTER),
    "add": (*_BLOCK, _POINTER, _POINTER),
    "add_fine": (*_BLOCK, _POINTER, _POINTER, _POINTER, ctypes.c_double),
}
_TYPES = ("float", "double")


def pairwise_sums(numbers: Tensor) -> Tensor:
    """Sums over the last axis of ``[..., d]``, in one order for every machine and block.

    In each tile of 4,096 numbers (padded with zeros), the second half is added to the first until
    one number is left; then the same is done with the tiles' sums.
    """
    while numbers.shape[-1] != 1:
        d = numbers.shape[-1]
        tile = TILE if d > TILE else 1 << max(d - 1, 1).bit_length()
        tiles = max(1, -(-d // tile))
        if tiles * tile != d:
            numbers = torch.nn.functional.pad(numbers, (0, tiles * tile - d))
        numbers = numbers.reshape(*numbers.shape[:-1], tiles, tile)
        while tile > 1:
            tile //= 2
            numbers = numbers[..., :tile] + numbers[..., tile:]
        numbers = numbers.squeeze(-1)
    return numbers.squeeze(-1)


def is_supported(rows: Tensor) -> bool:
    """Whether the functions below take ``rows``: float32 or float64, on a CPU, each contiguous."""
    if not rows.is_cpu or rows.dim() != 2 or rows.stride(1) != 1:
        return False
    return rows.dtype in (torch.float32, torch.float64) and _compiled() is not None


def squared_norms(rows: Tensor, compiled: ctypes.CDLL | None = None) -> Tensor:
    """Squares of the L2 norms of rows ``[n, d]``, summed as `pairwise_sums` does: float64 ``[n]``.

    ``compiled``: a library to use instead of the default one.
    """
    block = _block(rows)
    squares = torch.empty(len(rows), dtype=torch.float64)
    scratch = torch.empty(rows.shape[1] // TILE + 1, dtype=torch.float64)
    function = getattr(loaded(compiled or _compiled()), f"squares_{_type(rows)}")
    function(*block, new_address(scratch), new_address(squares))
    return squares


def add_rounded(
    rows: Tensor,
    factors: Tensor,
    coarse: Tensor,
    fine: Tensor | None,
    scale: float,
    compiled: ctypes.CDLL | None = None,
) -> None:
    """Add rows ``[n, d]`` times ``factors [n]``, rounded towards zero, to ``coarse [d]``.

    The remainders, times ``scale`` and rounded too, are added to ``fine [d]`` if that is given. All
    but the rows are float64 and contiguous. ``compiled`` as in `squared_norms`.
    """
    compiled = loaded(compiled or _compiled())
    block, size = _block(rows), rows.shape[1:]
    sums = (
        address("the rows' factors", factors, rows.shape[:1], torch.float64),
        address("the sum of rows", coarse, size, torch.float64),
    )
    if fine is None:
        getattr(compiled, f"add_{_type(rows)}")(*block, *sums)
    else:
        remainders = address("the sum of remainders", fine, size, torch.float64)
        getattr(compiled, f"add_fine_{_type(rows)}")(*block, *sums, remainders, scale)


def _block(rows: Tensor) -> tuple[int, int, int, int]:
    """Address, stride, number and size of rows ``[n, d]``."""
    # The one argument whose shape and dtype are its own.
    n, d = sizes("a block of rows", rows, 2)
    if rows.dtype not in (torch.float32, torch.float64):
        raise FedsimError(f"rows must be float32 or float64, not {rows.dtype}.")
    return address("a block of rows", rows, (n, d), rows.dtype, gaps=True), rows.stride(0), n, d


def _type(rows: Tensor) -> str:
    return _TYPES[rows.dtype == torch.float64]


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    return library("rows.c", _self_test)


def _self_test(compiled: ctypes.CDLL) -> bool:
    """Declare the functions' arguments, and compare their results with torch's."""
    declare(compiled, {f"{name}_{kind}": of for name, of in _ARGUMENTS.items() for kind in _TYPES})
    generator = torch.Generator().manual_seed(0)
    # With gaps between rows, as if they were some columns of a block; and with such different
    # magnitudes that sums in another order would be rounded differently.
    block = torch.randn(8, 2 * TILE + 80, dtype=torch.float64, generator=generator).pow(7)
    return all(
        _agrees(compiled, block.to(dtype)[:, 3:]) for dtype in (torch.float32, torch.float64)
    )


def _agrees(compiled: ctypes.CDLL, rows: Tensor) -> bool:
    factors, scale = torch.logspace(-2, 5, len(rows), dtype=torch.float64).neg_(), 2.0**30
    products = rows.double() * factors[:, None]
    coarse = products.trunc()
    fine = ((products - coarse) * scale).trunc().sum(0)
    sums = [torch.zeros(rows.shape[1], dtype=torch.float64) for _ in range(3)]
    add_rounded(rows, factors, sums[0], None, scale, compiled)
    add_rounded(rows, factors, sums[1], sums[2], scale, compiled)
    expected = [pairwise_sums(rows.double().square()), coarse.sum(0), coarse.sum(0), fine]
    results = [squared_norms(rows, compiled), *sums]
    return all(map(torch.equal, results, expected))
