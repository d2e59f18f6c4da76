"""Dense layers of one client or of a block's, forward, backward and updated: a call of ``dense.c``.

Between a layer's products there is little to do and much to launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fedsim.lazy import Tensor, torch

LINE = 64  # bytes: a library picks its kernel by where a matrix lies, and torch's lie on a line

_POINTER = ctypes.c_void_p
_REALS = {"float": ctypes.c_float, "double": ctypes.c_double}


class DenseShape(NamedTuple):
    """A linear layer, and where in a client's row its weight and its bias (-1: none) begin."""

    inputs: int
    outputs: int
    weight: int
    bias: int
    relu: bool


class _Layer(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int)
            for name in ("inputs", "outputs", "relu", "run", "run_back", "folds")
        ),
        *((name, ctypes.c_ssize_t) for name in ("weight", "bias", "values", "deltas")),
    ]


class _Network(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_int) for name in ("count", "batch")),
        *((name, ctypes.c_ssize_t) for name in ("size", "room")),
    ]


@dataclass(frozen=True)
class DenseBatch:
    """The layers, for batches of one size.

    What a pass leaves behind is a buffer ``[size]``, a new one for each.
    """

    shapes: Sequence[DenseShape]
    batch: int
    layers: ctypes.Array[_Layer]
    network: _Network
    ones: Tensor
    blas: Blas

    @cached_property
    def _address(self) -> int:
        return ctypes.addressof(self.network)

    @cached_property
    def _last(self) -> tuple[tuple[int, int], tuple[int, int], int]:
        """Sizes, strides and place of the last layer's outputs in a buffer."""
        outputs = self.shapes[-1].outputs
        return (self.batch, outputs), (outputs, 1), self.layers[len(self.shapes) - 1].values

    def takes(self, *tensors: Tensor) -> bool:
        """Whether the functions below do: of the one dtype, without gaps."""
        dtype = self.ones.dtype
        for tensor in tensors:
            if tensor.dtype is not dtype or not tensor.is_contiguous():
                return False
        return True

    def takes_all(self, *rows: Tensor) -> bool:
        """The same of packed rows ``[n, D]``, which may have gaps between clients."""
        return all(block.dtype is self.ones.dtype and block.stride(1) == 1 for block in rows)

    def forward(self, row: Tensor, x: Tensor) -> Tensor:
        """All outputs for ``x [batch, inputs]`` at a packed ``row [1, D]``: a buffer."""
        buffer = self.ones.new_empty(self.network.size)
        self._forward(1, row, 0, x, 0, buffer)
        return buffer

    def forward_all(self, rows: Tensor, x: Tensor) -> Tensor:
        """For ``x [n, batch, inputs]`` at packed ``rows [n, D]``: their buffers, ``[n, size]``."""
        n = rows.shape[0]
        buffers = self.ones.new_empty(n, self.network.size)
        self._forward(n, rows, rows.stride(0), x, x.stride(0), buffers)
        return buffers

    def _forward(
        self, n: int, rows: Tensor, stride: int, x: Tensor, x_stride: int, buffers: Tensor
    ) -> None:
        # Asking tells the library, in this thread, how many threads torch lets products take.
        torch.get_num_threads()
        places = rows.data_ptr(), stride, x.data_ptr(), x_stride, buffers.data_ptr()
        self.blas.forward(self.blas.product, self._address, n, *places)

    def backward(self, row: Tensor, buffer: Tensor, delta: Tensor, *, below: bool) -> Tensor | None:
        """Put gradients of all outputs into the buffer, from ``delta`` of the last ones.

        ``below``: give that of the inputs, ``[batch, inputs]``.
        """
        inputs = delta.new_empty(self.batch, self.shapes[0].inputs) if below else None
        self._backward(1, row, 0, buffer, delta, None if inputs is None else inputs.data_ptr())
        return inputs

    def backward_all(self, rows: Tensor, buffers: Tensor, delta: Tensor) -> None:
        """The same, of n clients: ``delta [n, batch, outputs]``."""
        self._backward(rows.shape[0], rows, rows.stride(0), buffers, delta, None)

    def _backward(
        self, n: int, rows: Tensor, stride: int, buffers: Tensor, delta: Tensor, below: int | None
    ) -> None:
        places = rows.data_ptr(), stride, buffers.data_ptr(), delta.data_ptr(), below
        self.blas.backward(self.blas.product, self._address, n, *places)

    def update(self, old: Tensor, row: Tensor, x: Tensor, buffer: Tensor, alpha: float) -> None:
        """Put the layers at ``old [1, D]`` plus ``alpha`` times their gradient into ``row``."""
        self.blas.update(
            self.blas.product,
            self.blas.vector_product,
            self._address,
            old.data_ptr(),
            row.data_ptr(),
            x.data_ptr(),
            buffer.data_ptr(),
            self.ones.data_ptr(),
            alpha,
        )

    def subtract_all(
        self, rates: Tensor, old: Tensor, rows: Tensor, x: Tensor, buffers: Tensor
    ) -> None:
        """Put the layers at ``old [n, D]`` less ``rates [n]`` times gradients into ``rows``."""
        self.blas.subtract(
            self.blas.product,
            self._address,
            rows.shape[0],
            rates.data_ptr(),
            old.data_ptr(),
            old.stride(0),
            rows.data_ptr(),
            rows.stride(0),
            x.data_ptr(),
            x.stride(0),
            buffers.data_ptr(),
        )

    def outputs(self, buffer: Tensor) -> Tensor:
        """Of the last layer, ``[batch, outputs]``."""
        return buffer.as_strided(*self._last)

    def inner(self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
        """Inner products of two batches' examples' gradients, ``[batch, batch]``.

        Of each batch its inputs and its buffer.
        """
        stride = _rounded_up(self.batch**2, self.ones)
        matrices = self.ones.new_empty(3 * stride)
        self.blas.inner(
            self.blas.product,
            self._address,
            *(tensor.data_ptr() for tensor in (*one, *other)),
            matrices.data_ptr(),
            stride,
        )
        return matrices.as_strided((self.batch, self.batch), (self.batch, 1), 2 * stride)

    def values(self, buffer: Tensor, layer: int) -> Tensor:
        """A layer's outputs ``[batch, outputs]``, or of n clients' buffers ``[n, ...]``."""
        return self._part(buffer, layer, self.layers[layer].values)

    def deltas(self, buffer: Tensor, layer: int) -> Tensor:
        """Their gradients, before the activation."""
        return self._part(buffer, layer, self.layers[layer].deltas)

    def _part(self, buffer: Tensor, layer: int, first: int) -> Tensor:
        outputs, lead = self.shapes[layer].outputs, buffer.shape[:-1]
        strides = (*buffer.stride()[:-1], outputs, 1)
        return buffer.as_strided((*lead, self.batch, outputs), strides, first)


@dataclass(frozen=True)
class Blas:
    """The functions of one dtype, and the library's products that they are given."""

    forward: Callable[..., None]
    backward: Callable[..., None]
    update: Callable[..., None]
    subtract: Callable[..., None]
    inner: Callable[..., None]
    product: int
    vector_product: int
    makes_few: bool


class Runs(NamedTuple):
    """How many products of a sum are added up before that is added to those before (0: as the
    library does), there and back; and whether sums over examples are folded in without it."""

    forward: int = 0
    back: int = 0
    folds: bool = False


def dense_batch(
    shapes: Sequence[DenseShape], batch: int, like: Tensor, blas: Blas, runs: Sequence[Runs]
) -> DenseBatch:
    """These layers for so many examples, of numbers as in ``like``, with products by these runs."""
    layers, size, room = (_Layer * len(shapes))(), 0, 0
    for layer, shape, run in zip(layers, shapes, runs, strict=True):
        layer.inputs, layer.outputs, layer.relu = shape.inputs, shape.outputs, shape.relu
        layer.run, layer.run_back, layer.folds = run
        layer.weight, layer.bias = shape.weight, shape.bias
        length = _rounded_up(batch * shape.outputs, like)
        layer.values, layer.deltas = size, size + length
        size += 2 * length
        room = max(room, length, _rounded_up(batch * shape.inputs, like) if run.folds else 0)
    network = _Network(layers, len(shapes), batch, size + room, size)
    return DenseBatch(tuple(shapes), batch, layers, network, like.new_ones(batch), blas)


def _rounded_up(size: int, like: Tensor) -> int:
    """To whole lines of numbers as in ``like``."""
    per_line = LINE // like.element_size()
    return -(-size // per_line) * per_line


def blas_of(compiled: ctypes.CDLL, products: ctypes.CDLL, name: str, letter: str) -> Blas:
    """The functions of one C type, and the products whose names begin with a letter."""
    functions = forward, backward, update, subtract, inner = [
        getattr(compiled, f"{function}_{name}")
        for function in ("forward", "backward", "update", "subtract", "inner")
    ]
    clients, strided = (*[_POINTER] * 2, ctypes.c_int), (_POINTER, ctypes.c_ssize_t)
    forward.argtypes = (*clients, *strided * 2, _POINTER)
    backward.argtypes = (*clients, *strided, *[_POINTER] * 3)
    update.argtypes = (*[_POINTER] * 8, _REALS[name])
    subtract.argtypes = (*clients, _POINTER, *strided * 3, _POINTER)
    inner.argtypes = (*[_POINTER] * 7, ctypes.c_ssize_t)
    for function in functions:
        function.restype = None
    product, vector_product = (
        ctypes.cast(getattr(products, f"{letter}{routine}_"), _POINTER).value
        for routine in ("gemm", "gemv")
    )
    assert product is not None
    assert vector_product is not None
    makes_few = name == "float" and bool(compiled.makes_few())
    return Blas(forward, backward, update, subtract, inner, product, vector_product, makes_few)
