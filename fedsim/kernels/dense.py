"""Dense layers of some clients in a few calls of ``dense.c``: outputs, gradients, steps.

In small layers launching operations costs more than computing them, so that one call takes all
layers of all clients. ``dense.c`` fixes the order of sums: the same for every processor, compiler,
batch and number of clients. A library's products have other bytes (`client.kernel`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedsim.errors import FedsimError
from fedsim.kernels.arguments import address, is_at, new_address, sizes, whole
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

    Rows ``[n, width]`` and inputs ``[n, B, in]`` have the kernel's dtype and are contiguous for
    each client. Anything else raises FedsimError.
    """

    def __init__(
        self,
        compiled: ctypes.CDLL,
        shapes: Sequence[DenseShape],
        width: int,
        batch: int,
        dtype: torch.dtype,
    ) -> None:
        _check(shapes, batch)
        least = max(end for shape in shapes for end in shape.ends)
        self.width = whole("the length of a row", width, least, 2**62)
        self.shapes, self.batch, self.dtype, self.compiled = shapes, batch, dtype, compiled
        # A client's buffer: outputs and deltas, layer by layer, then scratch for scaled deltas.
        self.layers, size, room = (_Layer * len(shapes))(), 0, 0
        for layer, shape in zip(self.layers, shapes, strict=True):
            layer.inputs, layer.outputs, layer.weight, layer.bias, layer.relu = shape
            values = batch * shape.outputs
            layer.values, layer.deltas = size, size + values
            size, room = size + 2 * values, max(room, values)
        self.size = size + room
        self._network = _Network(self.layers, len(shapes), batch, self.size, size)
        self.address = ctypes.addressof(self._network)

    def gradient(
        self,
        rows: Tensor,
        x: Tensor,
        deltas: Callable[[Tensor], Tensor],
        *,
        with_inputs: bool = False,
    ) -> tuple[DensePass, Tensor | None]:
        """Forward and backward pass of ``x [n, B, in]`` at packed ``rows [n, D]``.

        ``deltas`` maps the outputs ``[n, B, out]`` of the last layer to their gradients. With
        ``with_inputs``, the gradient of the inputs, ``[n, B, in]``, is returned too.
        """
        n = sizes("inputs", x, 3)[0]
        dense_pass = DensePass(self, n, x, torch.empty(n, self.size, dtype=self.dtype))
        rows_place = self.rows_place("rows", rows, n)
        self.compiled.forward(
            self.address, n, *rows_place, *dense_pass.x_place, dense_pass.buffers_place
        )
        delta = deltas(dense_pass.values(len(self.shapes) - 1))
        sizes("the gradient of the outputs", delta, 3)
        delta, shape = delta.contiguous(), (n, self.batch, self.shapes[-1].outputs)
        inputs = torch.empty(x.shape, dtype=self.dtype) if with_inputs else None
        self.compiled.backward(
            self.address,
            n,
            *rows_place,
            dense_pass.buffers_place,
            address("the gradient of the outputs", delta, shape, self.dtype),
            None if inputs is None else new_address(inputs),
        )
        return dense_pass, inputs

    def rows_place(self, name: str, rows: Tensor, n: int) -> tuple[int, int]:
        """Address and stride of rows ``[n, width]``."""
        return address(name, rows, (n, self.width), self.dtype, gaps=True), rows.stride(0)


class DensePass:
    """A pass of ``n`` clients: its inputs, and what a kernel computes from them.

    C is given addresses only. They are those of tensors that are checked here, once, and kept.
    Later calls check only that the tensors are still there: whoever has a gradient's factors has
    these tensors too, and may have resized them.

    Parameters
    ----------
    kernel : DenseKernel
    n : int
    x : Tensor ``[n, B, in]``
        Inputs of the first layer.
    buffers : Tensor ``[n, size]``
        Outputs of all layers, and their gradients.

    Raises
    ------
    FedsimError
        If they are not the kernel's.
    """

    def __init__(self, kernel: DenseKernel, n: int, x: Tensor, buffers: Tensor) -> None:
        self.kernel, self.n, self.x, self.buffers = kernel, n, x, buffers
        shape = n, kernel.batch, kernel.shapes[0].inputs
        self.x_place = address("inputs", x, shape, kernel.dtype, gaps=True), x.stride(0)
        self.buffers_place = address("buffers", buffers, (n, kernel.size), kernel.dtype)

    def __getitem__(self, clients: slice) -> DensePass:
        """The pass of these clients."""
        # A slice with a step has gaps, which C does not take in buffers.
        x = self.x[clients]
        return DensePass(self.kernel, len(x), x, self.buffers[clients].contiguous())

    def scaled(self, factors: Tensor) -> DensePass:
        """The pass with all gradients times ``factors [n]``, in buffers of its own."""
        scaled = DensePass(self.kernel, self.n, self.x, self.buffers.clone())
        for layer in range(len(self.kernel.shapes)):
            scaled.deltas(layer).mul_(factors.view(-1, 1, 1))
        return scaled

    def subtract(self, rates: Tensor, old: Tensor, new: Tensor) -> None:
        """Write ``old [n, D]`` minus ``rates [n]`` times the gradients to ``new [n, D]``.

        ``new`` may be ``old``; only the layers' parameters are written.
        """
        self._require_in_place()
        kernel, n = self.kernel, self.n
        old_place = kernel.rows_place("rows", old, n)
        kernel.compiled.subtract(
            kernel.address,
            n,
            address("rates", rates, (n,), kernel.dtype),
            *old_place,
            *(old_place if new is old else kernel.rows_place("new rows", new, n)),
            *self.x_place,
            self.buffers_place,
        )

    def inner(self, other: DensePass) -> Tensor:
        """Inner products ``[n]`` of the gradients with those of another pass of the kernel."""
        kernel, n = self.kernel, self.n
        if other.kernel is not kernel or other.n != n:
            raise FedsimError("inner products are of two passes of one kernel and as many clients.")
        for one in (self, other):
            one._require_in_place()
        totals = torch.empty(n, dtype=kernel.dtype)
        square = kernel.batch**2
        scratch = torch.empty(2 * square, dtype=kernel.dtype)
        scratch_place = new_address(scratch)
        kernel.compiled.inner(
            kernel.address,
            n,
            *self.x_place,
            self.buffers_place,
            *other.x_place,
            other.buffers_place,
            new_address(totals),
            scratch_place,
            scratch_place + square * scratch.itemsize,
        )
        return totals

    def _require_in_place(self) -> None:
        if not (is_at(self.x, self.x_place[0]) and is_at(self.buffers, self.buffers_place)):
            raise FedsimError(
                "the memory of a gradient's factors has been resized or replaced, which an "
                "algorithm must not do."
            )

    def values(self, layer: int) -> Tensor:
        """A layer's outputs ``[n, B, out]``."""
        return self._part(layer, self.kernel.layers[layer].values)

    def deltas(self, layer: int) -> Tensor:
        """Gradients of a layer's outputs before the activation, ``[n, B, out]``."""
        return self._part(layer, self.kernel.layers[layer].deltas)

    def _part(self, layer: int, first: int) -> Tensor:
        outputs, buffers = self.kernel.shapes[layer].outputs, self.buffers
        shape, strides = (self.n, self.kernel.batch, outputs), (self.kernel.size, outputs, 1)
        return buffers.as_strided(shape, strides, buffers.storage_offset() + first)


def dense_kernel(
    shapes: Sequence[DenseShape], width: int, batch: int, dtype: torch.dtype
) -> DenseKernel | None:
    """The kernel of these layers, for rows and batches of these sizes; None if there is none.

    There is one for float32 and float64, if `fedsim.kernels.building` can build it.
    """
    compiled = _compiled(dtype)
    return None if compiled is None else DenseKernel(compiled, shapes, width, batch, dtype)


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
    kernel = DenseKernel(compiled, shapes, rows.shape[1], 12, dtype)
    dense_pass, below = kernel.gradient(rows, x, lambda _: delta, with_inputs=True)
    updated_rows = rows.clone()
    dense_pass.subtract(rates, updated_rows, updated_rows)
    squares = dense_pass.inner(dense_pass)

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
        (dense_pass.values(2), h.detach()),
        (below, gradient_x),
        (updated_rows, rows - rates[:, None] * gradient),
        (squares, gradient.square().sum(1)),
    )
    tolerance = TOLERANCE[str(dtype).removeprefix("torch.")]
    return all(
        ours is not None and bool((ours - torchs).norm() <= tolerance * torchs.norm())
        for ours, torchs in pairs
    )
