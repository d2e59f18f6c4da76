"""Dense layers of some clients in a few calls of ``dense.c``: outputs, gradients, steps.

In small layers launching operations costs more than computing them, so that one call takes all
layers of all clients. ``dense.c`` fixes the order of sums: the same for every processor, compiler,
batch and number of clients. A library's products have other bytes (`client.kernel`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

from fedsim.kernels.building import FUSED, declare, library
from fedsim.lazy import Tensor, torch

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_ssize_t
_CLIENTS, _STRIDED = (_POINTER, ctypes.c_int), (_POINTER, _SIZE)
_ARGUMENTS = {
    "forward": (*_CLIENTS, *_STRIDED * 2, _POINTER),
    "backward": (*_CLIENTS, *_STRIDED, *[_POINTER] * 3),
    "subtract": (*_CLIENTS, _POINTER, *_STRIDED * 3, _POINTER),
    "inner": (*_CLIENTS, *(*_STRIDED, _POINTER) * 2, *[_POINTER] * 3),
}
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
"""Largest difference from torch's result, relative to its norm, of a library that is used."""


class DenseShape(NamedTuple):
    """A linear layer, with the offsets of its weight and bias (-1: none) in a client's row."""

    inputs: int
    outputs: int
    weight: int
    bias: int
    relu: bool


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("inputs", "outputs", "relu")),
        *((name, _SIZE) for name in ("weight", "bias", "values", "deltas")),
    ]


class _Network(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_int) for name in ("count", "batch")),
        *((name, _SIZE) for name in ("size", "room")),
    ]


class DenseKernel:
    """A chain of layers for one batch size. Made by `dense_kernel`, which checks for a library.

    A pass of ``n`` clients leaves its outputs and their gradients in ``buffers [n, size]``. Rows
    ``[n, D]`` and inputs ``[n, B, in]`` have the kernel's dtype and are contiguous for each client.
    """

    def __init__(
        self, compiled: ctypes.CDLL, shapes: Sequence[DenseShape], batch: int, dtype: torch.dtype
    ) -> None:
        self.shapes, self.batch, self.dtype, self._compiled = shapes, batch, dtype, compiled
        # A client's buffer: outputs and deltas, layer by layer, then scratch for scaled deltas.
        self._layers, size, room = (_Layer * len(shapes))(), 0, 0
        for layer, shape in zip(self._layers, shapes, strict=True):
            layer.inputs, layer.outputs, layer.weight, layer.bias, layer.relu = shape
            values = batch * shape.outputs
            layer.values, layer.deltas = size, size + values
            size, room = size + 2 * values, max(room, values)
        self._size = size + room
        self._network = _Network(self._layers, len(shapes), batch, self._size, size)
        self._address = ctypes.addressof(self._network)

    def forward(self, rows: Tensor, x: Tensor) -> Tensor:
        """Forward pass of ``x [n, B, in]`` at packed ``rows [n, D]``; new buffers ``[n, size]``."""
        n = len(x)
        buffers = torch.empty(n, self._size, dtype=self.dtype)
        self._compiled.forward(
            self._address, n, rows.data_ptr(), rows.stride(0), x.data_ptr(), x.stride(0),
            buffers.data_ptr(),
        )  # fmt: skip
        return buffers

    def backward(
        self, rows: Tensor, buffers: Tensor, delta: Tensor, *, with_inputs: bool
    ) -> Tensor | None:
        """Write gradients of all outputs to the buffers, from ``delta [n, B, out]`` of the last.

        With ``with_inputs``, return the gradient of the inputs, ``[n, B, in]``.
        """
        n, delta = len(buffers), delta.contiguous()
        shape = n, self.batch, self.shapes[0].inputs
        inputs = torch.empty(shape, dtype=self.dtype) if with_inputs else None
        self._compiled.backward(
            self._address, n, rows.data_ptr(), rows.stride(0), buffers.data_ptr(),
            delta.data_ptr(), None if inputs is None else inputs.data_ptr(),
        )  # fmt: skip
        return inputs

    def subtract(self, rates: Tensor, old: Tensor, new: Tensor, x: Tensor, buffers: Tensor) -> None:
        """Write ``old [n, D]`` minus ``rates [n]`` times the gradients to ``new [n, D]``.

        ``new`` may be ``old``; only the layers' parameters are written.
        """
        self._compiled.subtract(
            self._address, len(buffers), rates.data_ptr(), old.data_ptr(), old.stride(0),
            new.data_ptr(), new.stride(0), x.data_ptr(), x.stride(0), buffers.data_ptr(),
        )  # fmt: skip

    def inner(self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
        """Inner products ``[n]`` of the gradients of two passes, given as (inputs, buffers)."""
        (x, buffers), (other_x, other_buffers) = one, other
        totals = torch.empty(len(x), dtype=self.dtype)
        room = torch.empty(2, self.batch, self.batch, dtype=self.dtype)
        self._compiled.inner(
            self._address, len(x), x.data_ptr(), x.stride(0), buffers.data_ptr(),
            other_x.data_ptr(), other_x.stride(0), other_buffers.data_ptr(), totals.data_ptr(),
            room[0].data_ptr(), room[1].data_ptr(),
        )  # fmt: skip
        return totals

    def values(self, buffers: Tensor, layer: int) -> Tensor:
        """A layer's outputs ``[n, B, out]``."""
        return self._part(buffers, layer, self._layers[layer].values)

    def deltas(self, buffers: Tensor, layer: int) -> Tensor:
        """Gradients of a layer's outputs before the activation, ``[n, B, out]``."""
        return self._part(buffers, layer, self._layers[layer].deltas)

    def _part(self, buffers: Tensor, layer: int, first: int) -> Tensor:
        outputs = self.shapes[layer].outputs
        sizes, strides = (self.batch, outputs), (buffers.stride(0), outputs, 1)
        return buffers.as_strided((len(buffers), *sizes), strides, buffers.storage_offset() + first)


def dense_kernel(
    shapes: Sequence[DenseShape], batch: int, dtype: torch.dtype
) -> DenseKernel | None:
    """The kernel of these layers for batches of this size; None if there is none.

    There is one for float32 and float64, if `fedsim.kernels.building` can build it.
    """
    compiled = _compiled(dtype)
    return None if compiled is None else DenseKernel(compiled, shapes, batch, dtype)


def is_compiled(dtype: torch.dtype) -> bool:
    """Whether there are kernels for this dtype."""
    return _compiled(dtype) is not None


@functools.cache
def _compiled(dtype: torch.dtype) -> ctypes.CDLL | None:
    if dtype not in (torch.float32, torch.float64):
        return None
    flags = (*FUSED, "-DFLOAT64") if dtype == torch.float64 else FUSED
    return library("dense.c", functools.partial(self_test, dtype=dtype), flags=flags)


def self_test(compiled: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Declare the functions' arguments, and compare a pass through three layers with torch's."""
    declare(compiled, _ARGUMENTS)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator)

    # The second layer without bias, the last one without activation, and gaps between all.
    shapes = [
        DenseShape(100, 37, 0, 3712, relu=True),
        DenseShape(37, 24, 3776, -1, relu=True),
        DenseShape(24, 10, 4672, 4928, relu=False),
    ]
    x, rows, delta = normal(2, 12, 100), normal(2, 4944), normal(2, 12, 10)
    rates = torch.tensor([0.3, -0.7], dtype=dtype)
    kernel = DenseKernel(compiled, shapes, 12, dtype)
    buffers, updated_rows = kernel.forward(rows, x), rows.clone()
    below = kernel.backward(rows, buffers, delta, with_inputs=True)
    kernel.subtract(rates, updated_rows, updated_rows, x, buffers)
    squares = kernel.inner((x, buffers), (x, buffers))

    leaf, leaf_x = rows.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.enable_grad():
        h = leaf_x
        for shape in shapes:
            end = shape.weight + shape.inputs * shape.outputs
            h = h @ leaf[:, shape.weight : end].view(2, shape.outputs, shape.inputs).mT
            if shape.bias >= 0:
                h = h + leaf[:, None, shape.bias : shape.bias + shape.outputs]
            h = h.relu() if shape.relu else h
        gradient, gradient_x = torch.autograd.grad((h * delta).sum(), (leaf, leaf_x))
    pairs = (
        (kernel.values(buffers, 2), h.detach()),
        (below, gradient_x),
        (updated_rows, rows - rates[:, None] * gradient),
        (squares, gradient.square().sum(1)),
    )
    tolerance = TOLERANCE[str(dtype).removeprefix("torch.")]
    return all(
        ours is not None and bool((ours - torchs).norm() <= tolerance * torchs.norm())
        for ours, torchs in pairs
    )
