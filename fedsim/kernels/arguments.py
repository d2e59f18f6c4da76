"""The one place where an array becomes an address for C, which can check nothing itself."""

from __future__ import annotations

from typing import Any

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch

LINE = 64  # bytes of a cache line


def address(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    gaps: bool = False,
) -> int:
    """Address of the first number of a tensor, which must be what a C function takes.

    Parameters
    ----------
    name : str
        Name for messages.
    shape, dtype
        Its shape and dtype.
    gaps : bool
        Whether the first axis may have any stride; what is behind it must be contiguous.

    Raises
    ------
    FedsimError
        If it is not a tensor in the CPU's memory, or its shape, dtype, strides or alignment differ.
    """
    try:
        place: int = tensor.data_ptr()
        fits = (
            tensor.dtype is dtype
            and tensor.is_cpu
            and tensor.shape == shape
            and (tensor.is_contiguous() or (gaps and _is_contiguous_behind(tensor)))
            # An empty tensor, or one whose storage is gone, has the address 0.
            and (place != 0 or tensor.numel() == 0)
            and place % dtype.itemsize == 0
            and not tensor.is_neg()  # in memory the numbers have the other sign
        )
    # Not a tensor, or one without memory of its own: sparse, or inside a transform of torch.func.
    except (AttributeError, RuntimeError, TypeError):
        fits = False
    if fits:
        return place
    raise FedsimError(
        f"{name} must be a contiguous, aligned {_plain(dtype)} tensor {list(shape)} on the CPU, "
        f"not {_described(tensor)}."
    )


def new_address(tensor: Tensor) -> int:
    """Address of a tensor that was made for this call, so that its shape and dtype are right.

    Torch puts those on cache lines.

    Raises
    ------
    FedsimError
        If torch has made it elsewhere, since its default device is not the CPU.
    """
    place: int = tensor.data_ptr()
    if tensor.is_cpu and place % LINE == 0:
        return place
    raise FedsimError(f"torch's default device must be the CPU, not {tensor.device}.")


def is_at(tensor: Tensor, place: int) -> bool:
    """Whether a tensor's memory is still at the address that was taken of it."""
    return tensor.data_ptr() == place


def sizes(name: str, tensor: Tensor, rank: int) -> tuple[int, ...]:
    """Shape of a tensor of which only the number of axes is known.

    Raises
    ------
    FedsimError
        If it is not a dense tensor in the CPU's memory with so many axes.
    """
    # Not `Tensor`, which is slower: this is called some times a step.
    fits = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.is_cpu
    if fits and tensor.dim() == rank:
        return tensor.shape
    axes = "axis" if rank == 1 else "axes"
    raise FedsimError(
        f"{name} must be a tensor with {rank} {axes} on the CPU, not {_described(tensor)}."
    )


def whole(name: str, number: int, low: int, high: int = 2**31 - 1) -> int:
    """A whole number from ``low`` to ``high``, which C could not tell from one that wraps round.

    Raises
    ------
    FedsimError
    """
    if isinstance(number, int) and low <= number <= high:
        return number
    raise FedsimError(f"{name} must be a whole number from {low} to {high}, not {number!r}.")


def _is_contiguous_behind(tensor: Tensor) -> bool:
    """Whether each entry of the first axis is contiguous."""
    strides = tensor.stride()
    if len(strides) == 2 and strides[1] == 1:  # rows with gaps between them
        return True
    return len(strides) > 1 and bool(tensor[:1].is_contiguous())


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"an object of type {type(value).__name__}"
    if value.layout is not torch.strided:
        return f"a {_plain(value.layout)} one"
    return (
        f"{_plain(value.dtype)} {list(value.shape)} with strides {list(value.stride())} on "
        f"{value.device.type}"
    )
