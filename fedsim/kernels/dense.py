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

from fedsim.errors import FedsimError
from fedsim.kernels.arguments import address, sizes, whole
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

    @property
    def ends(self) -> tuple[int, int]:
        """Where the weight ends in a row, and where the bias does (-1: none)."""
        bias_end = self.bias + self.outputs if self.bias >= 0 else -1
        return self.weight + self.inputs * self.outputs, bias_end


def _check(shapes: Sequence[DenseShape], batch: int) -> None:
    """Raise FedsimError unless layers, one after another, are those of a chain."""
    whole("the batch size", batch, 1)
    whole("the number of layers", len(shapes), 1)
    for k, shape in enumerate(shapes):
        whole("a layer's number of inputs", shape.inputs, 1)
        whole("a layer's number of outputs", shape.outputs, 1)
        whole("a weight's offset", shape.weight, 0, 2**62)
        whole("a bias's offset", shape.bias, -1, 2**62)
        if k and shape.inputs != shapes[k - 1].outputs:
            raise FedsimError(
                f"a layer must take the {shapes[k - 1].outputs} outputs of the one before it, not "
                f"{shape.inputs}."
            )


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
    Anything else raises FedsimError.
    """

    def __init__(
        self, compiled: ctypes.CDLL, shapes: Sequence[DenseShape], batch: int, dtype: torch.dtype
    ) -> None:
        _check(shapes, batch)
        self.shapes, self.batch, self.dtype, self._compiled = shapes, batch, dtype, compiled
        self._width = max(end for shape in shapes for end in shape.ends)  # least length of a row
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
        n = sizes("inputs", x, 3)[0]
        buffers = torch.empty(n, self._size, dtype=self.dtype)
        self._compiled.forward(
            self._address,
            n,
            *self._rows("rows", rows, n),
            *self._inputs(x, n),
            self._buffers(buffers, n),
        )
        return buffers

    def backward(
        self, rows: Tensor, buffers: Tensor, delta: Tensor, *, with_inputs: bool
    ) -> Tensor | None:
        """Write gradients of all outputs to the buffers, from ``delta [n, B, out]`` of the last.

        With ``with_inputs``, return the gradient of the inputs, ``[n, B, in]``.
        """
        n = sizes("buffers", buffers, 2)[0]
        shape = n, self.batch, self.shapes[0].inputs
        inputs = torch.empty(shape, dtype=self.dtype) if with_inputs else None
        above = n, self.batch, self.shapes[-1].outputs
        sizes("the gradient of the outputs", delta, 3)
        delta = delta.contiguous()
        self._compiled.backward(
            self._address,
            n,
            *self._rows("rows", rows, n),
            self._buffers(buffers, n),
            address("the gradient of the outputs", delta, above, self.dtype),
            None if inputs is None else self._inputs(inputs, n)[0],
        )
        return inputs

    def subtract(self, rates: Tensor, old: Tensor, new: Tensor, x: Tensor, buffers: Tensor) -> None:
        """Write ``old [n, D]`` minus ``rates [n]`` times the gradients to ``new [n, D]``.

        ``new`` may be ``old``; only the layers' parameters are written.
        """
        n = sizes("buffers", buffers, 2)[0]
        self._compiled.subtract(
            self._address,
            n,
            address("rates", rates, (n,), self.dtype),
            *self._rows("rows", old, n),
            *self._rows("new rows", new, n),
            *self._inputs(x, n),
            self._buffers(buffers, n),
        )

    def inner(self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
        """Inner products ``[n]`` of the gradients of two passes, given as (inputs, buffers)."""
        (x, buffers), (other_x, other_buffers) = one, other
        n, square = sizes("inputs", x, 3)[0], (self.batch, self.batch)
        totals = torch.empty(n, dtype=self.dtype)
        room = torch.empty(2, *square, dtype=self.dtype)
        self._compiled.inner(
            self._address,
            n,
            *self._inputs(x, n),
            self._buffers(buffers, n),
            *self._inputs(other_x, n),
            self._buffers(other_buffers, n),
            address("totals", totals, (n,), self.dtype),
            *(address("scratch", part, square, self.dtype) for part in room),
        )
        return totals

    def _rows(self, name: str, rows: Tensor, n: int) -> tuple[int, int]:
        """Address and stride of rows ``[n, D]``."""
        shape = n, self._width
        return address(name, rows, shape, self.dtype, gaps=True, wider=True), rows.stride(0)

    def _inputs(self, x: Tensor, n: int) -> tuple[int, int]:
        """Address and stride of inputs ``[n, B, in]``."""
        shape = n, self.batch, self.shapes[0].inputs
        return address("inputs", x, shape, self.dtype, gaps=True), x.stride(0)

    def _buffers(self, buffers: Tensor, n: int) -> int:
        return address("buffers", buffers, (n, self._size), self.dtype)

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
