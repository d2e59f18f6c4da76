"""Reading an array that a stranger sent: nothing is allocated that its header merely claims.

`numpy.load` believes the header: one of 80 bytes may ask for 73 TiB, or name a pickle or a zip
archive. Here shape and dtype are known before the bytes are looked at, and the bytes are as many
as they must be, or nothing is read.
"""

from __future__ import annotations

import math
import re
import struct

import numpy as np
import torch
from flwr.app import Array
from torch import Tensor

from fedsim.engines.arrays import NUMPY, LazyArray

__all__ = ["MalformedArrayError", "floats"]

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 4096
_HEADER = re.compile(
    rb"\{'descr': '([<>]f[248])', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\), ?\} *\n"
)


class MalformedArrayError(ValueError):
    """An array that is not of the shape and dtype that were asked for."""


def floats(array: Array, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """The values of a floating-point array that must have this shape; not to be written to.

    Parameters
    ----------
    array : Array
        As a client sent it: its own fields are claims.
    shape : tuple of int
    dtype : torch.dtype, optional
        By default float16, float32 or float64, as it comes.

    Raises
    ------
    MalformedArrayError
        If it is anything else.
    """
    if array.stype != NUMPY:
        raise MalformedArrayError(f"it is serialised as {array.stype!r:.60}, not {NUMPY!r}.")
    values = array.tensor if isinstance(array, LazyArray) else _read(array.data, shape)
    if values.shape != shape:
        raise MalformedArrayError(f"its shape is {_short(values.shape)}, not {_short(shape)}.")
    if not values.is_floating_point() or dtype not in (None, values.dtype):
        wanted = "floating point" if dtype is None else str(dtype)
        raise MalformedArrayError(f"its dtype is {values.dtype}, not {wanted}.")
    return values


def _read(data: object, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(data, bytes) or data[:6] != _MAGIC:
        raise MalformedArrayError("its bytes are no numpy array.")
    size, start = _header_bounds(data)
    header = _HEADER.fullmatch(data, start, start + size)
    if header is None:
        raise MalformedArrayError("its header is not one of a floating-point array.")
    descr, fortran, dimensions = header.groups()
    claimed = tuple(int(number) for number in dimensions.split(b",") if number.strip())
    if claimed != shape:
        raise MalformedArrayError(f"its shape is {_short(claimed)}, not {_short(shape)}.")
    dtype = np.dtype(descr.decode())
    count = math.prod(shape)
    if len(data) != start + size + count * dtype.itemsize:
        raise MalformedArrayError(f"it is {len(data)} bytes long, which its header contradicts.")
    flat = np.frombuffer(data, dtype, count, start + size)
    values = flat.reshape(shape, order="F" if fortran == b"True" else "C")
    # A tensor's memory must be the machine's own, and writable.
    return torch.from_numpy(np.array(values, dtype=dtype.newbyteorder("="), order="C"))


def _header_bounds(data: bytes) -> tuple[int, int]:
    """Length of the header's text, and where it begins."""
    version = data[6:8]
    form = {b"\x01\x00": "<H", b"\x02\x00": "<I", b"\x03\x00": "<I"}.get(version)
    if form is None or len(data) < 8 + struct.calcsize(form):
        raise MalformedArrayError("its bytes are no numpy array.")
    (size,) = struct.unpack_from(form, data, 8)
    if size > _LONGEST_HEADER:
        raise MalformedArrayError(f"its header claims {size} bytes.")
    return size, 8 + struct.calcsize(form)


def _short(shape: tuple[int, ...]) -> str:
    text = str(tuple(shape))
    return text if len(text) <= 60 else f"{text[:60]}..."
