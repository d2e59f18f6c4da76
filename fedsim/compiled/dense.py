"""One client's dense layers, forward, backward and updated, each in a call: ``dense.c``.

It gives the bytes of torch's operations one by one. Its products are those of torch's own library,
called with the same arguments; or, of a few examples, for which libraries are slow, its own in the
library's order, as far as trials find that out. Between them there is little to do and much to
launch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from fedsim.compiled.building import library
from fedsim.lazy import Tensor, torch

__all__ = ["NARROW", "DenseBatch", "DenseShape", "batch_of", "blocks_of"]

FEW = range(4, 13)
"""Examples of which products are made here, where the processor has the registers."""
COLUMNS = 32
"""Fewest inputs and outputs of these."""
NARROW = 16
"""In a block, layers with fewer outputs have as many all the same, which nobody looks at: libraries
have better products for these."""
RUN = 192
"""Longest run of a sum's products that the usual library adds up at once, of float32."""
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
    """The layers, for batches of one size; see `batch_of`.

    What a pass leaves behind is a buffer ``[size]``, a new one for each.
    """

    shapes: Sequence[DenseShape]
    batch: int
    layers: ctypes.Array[_Layer]
    network: _Network
    ones: Tensor
    blas: _Blas

    @cached_property
    def _network(self) -> int:
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
        self.blas.forward(self.blas.product, self._network, n, *places)

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
        self.blas.backward(self.blas.product, self._network, n, *places)

    def update(self, old: Tensor, row: Tensor, x: Tensor, buffer: Tensor, alpha: float) -> None:
        """Put the layers at ``old [1, D]`` plus ``alpha`` times their gradient into ``row``."""
        self.blas.update(
            self.blas.product,
            self.blas.vector_product,
            self._network,
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
            self._network,
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
            self._network,
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
class _Blas:
    """The functions of one dtype, and the library's products that they are given."""

    forward: Callable[..., None]
    backward: Callable[..., None]
    update: Callable[..., None]
    subtract: Callable[..., None]
    inner: Callable[..., None]
    product: int
    vector_product: int
    makes_few: bool


class _Runs(NamedTuple):
    """How many products of a sum are added up before that is added to those before; see `layer`."""

    forward: int = 0
    back: int = 0
    folds: bool = False


def batch_of(shapes: Sequence[DenseShape], batch: int, like: Tensor) -> DenseBatch | None:
    """These layers for so many examples, of numbers as in ``like``; None where they are torch's.

    A matrix of one row or one column can be said in two ways; those are left to torch.
    """
    narrow = min(batch, *(min(shape.inputs, shape.outputs) for shape in shapes)) < 2
    blas = None if narrow or like.is_cuda else _compiled().get(like.dtype)
    if blas is None:
        return None
    runs = [
        _runs(shape.inputs, shape.outputs, batch, shape.bias >= 0)
        if blas.makes_few and torch.get_num_threads() == 1
        else _Runs()
        for shape in shapes
    ]
    return _batch(shapes, batch, like, blas, runs)


def blocks_of(shapes: Sequence[DenseShape], batch: int, like: Tensor) -> Iterator[DenseBatch]:
    """Ways through these layers for so many examples of each of a block's clients, fastest first.

    Where a layer has few outputs (`NARROW`) they are made as if there were that many. Which way
    gives the library's bytes is for the caller to try.
    """
    blas = None if like.is_cuda else _compiled().get(like.dtype)
    # A library makes no sum over more examples than that at once.
    if blas is None or not 2 <= batch <= RUN:
        return
    few = blas.makes_few and torch.get_num_threads() == 1
    narrow = [like.dtype == torch.float32 and shape.outputs < NARROW for shape in shapes]
    if any(narrow) and not (few and batch >= FEW.start and all(s.inputs >= NARROW for s in shapes)):
        return
    runs = [
        _Runs(RUN)
        if is_narrow
        else _runs(shape.inputs, shape.outputs, batch, shape.bias >= 0)
        if few
        else _Runs()
        for is_narrow, shape in zip(narrow, shapes, strict=True)
    ]
    if few and batch in FEW:
        yield _batch(shapes, batch, like, blas, [run._replace(folds=True) for run in runs])
    yield _batch(shapes, batch, like, blas, runs)


def _batch(
    shapes: Sequence[DenseShape], batch: int, like: Tensor, blas: _Blas, runs: Sequence[_Runs]
) -> DenseBatch:
    layers, size, room = (_Layer * len(shapes))(), 0, 0
    for layer, shape, run in zip(layers, shapes, runs, strict=True):
        layer.inputs, layer.outputs, layer.relu = shape.inputs, shape.outputs, shape.relu
        layer.run, layer.run_back, layer.folds = run
        layer.weight, layer.bias = shape.weight, shape.bias
        length = _rounded_up(batch * shape.outputs, like)
        layer.values, layer.deltas = size, size + length
        size, room = size + 2 * length, max(room, length)
    network = _Network(layers, len(shapes), batch, size + room, size)
    return DenseBatch(tuple(shapes), batch, layers, network, like.new_ones(batch), blas)


def _rounded_up(size: int, like: Tensor) -> int:
    """To whole lines of numbers as in ``like``."""
    per_line = LINE // like.element_size()
    return -(-size // per_line) * per_line


@functools.cache
def _runs(inputs: int, outputs: int, batch: int, biased: bool) -> _Runs:
    """In which runs torch's library adds up such products of float32, as trials show; 0: in none.

    That is the only thing in which libraries differ whose products and sums are one rounding each.
    """
    if batch not in FEW or min(inputs, outputs) < COLUMNS:
        return _Runs()
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, (inputs + 1) * outputs, generator=generator)
    shape = DenseShape(inputs, outputs, 0, inputs * outputs if biased else -1, relu=False)
    # A library may have another order for what does not lie on a line.
    xs, deltas = (
        [flat[first : first + batch * width].view(batch, width) for first in (0, 1)]
        for width in (inputs, outputs)
        for flat in [torch.randn(batch * width + 1, generator=generator)]
    )
    blas = _compiled()[torch.float32]

    def outputs_by(run: int) -> list[Tensor]:
        made = _batch([shape], batch, row, blas, [_Runs(run, 0)])
        return [made.values(made.forward(row, x), 0) for x in xs]

    def gradients_by(run: int) -> list[Tensor]:
        made = _batch([shape], batch, row, blas, [_Runs(0, run)])
        buffer = made.forward(row, xs[0])
        below = [made.backward(row, buffer, delta, below=True) for delta in deltas]
        return [gradient for gradient in below if gradient is not None]

    return _Runs(_library_run(inputs, outputs_by), _library_run(outputs, gradients_by))


def _library_run(products: int, made_by: Callable[[int], list[Tensor]]) -> int:
    """Of the runs that libraries are known for, the first that gives what the library gives."""
    wanted = made_by(0)
    for run in (RUN, -(-products // 2), products):
        if all(map(torch.equal, made_by(run), wanted)):
            return run
    return 0


@functools.cache
def _compiled() -> dict[torch.dtype, _Blas]:
    """By what they compute with."""
    found: dict[torch.dtype, _Blas] = {}

    def right(compiled: ctypes.CDLL) -> bool:
        products = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        for name, letter in (("float", "s"), ("double", "d")):
            dtype = torch.float64 if name == "double" else torch.float32
            found[dtype] = blas = _functions(compiled, products, name, letter)
            if not _agrees(blas, dtype):
                return False
        return True

    return found if library("dense.c", right) is not None else {}


def _functions(compiled: ctypes.CDLL, products: ctypes.CDLL, name: str, letter: str) -> _Blas:
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
    return _Blas(forward, backward, update, subtract, inner, product, vector_product, makes_few)


def _agrees(blas: _Blas, dtype: torch.dtype) -> bool:
    """Whether a batch's way through three layers is torch's, to the bit."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator)

    # The second layer without bias, the last one without activation, and room between all.
    shapes = [
        DenseShape(100, 37, 0, 3712, True),
        DenseShape(37, 24, 3776, -1, True),
        DenseShape(24, 10, 4672, 4928, False),
    ]
    x, row, delta = drawn(12, 100), drawn(1, 4944), drawn(12, 10)
    row[0, 3712:3730] = 0.0
    batch = _batch(shapes, len(x), row, blas, [_Runs()] * len(shapes))
    buffer, new, updated = batch.forward(row, x), torch.empty_like(row), row.clone()
    below = batch.backward(row, buffer, delta, below=True)
    batch.update(row, new, x, buffer, -0.3)
    batch.update(updated, updated, x, buffer, -0.3)
    weights, biases = _views(shapes, row[0])
    values = [x]
    for shape, weight, bias in zip(shapes, weights, biases, strict=True):
        h = values[-1]
        h = torch.mm(h, weight.t()) if bias is None else torch.addmm(bias, h, weight.t())
        values.append(torch.relu_(h) if shape.relu else h)
    same = [torch.equal(batch.values(buffer, i), values[i + 1]) for i in range(len(shapes))]
    for i in range(len(shapes) - 1, -1, -1):
        if shapes[i].relu:
            delta = torch.ops.aten.threshold_backward.default(delta, values[i + 1], 0)
        moved = torch.addmm(weights[i], delta.t(), values[i], alpha=-0.3)
        same.append(torch.equal(batch.deltas(buffer, i), delta))
        for ended in (new, updated):
            same.append(torch.equal(_views(shapes, ended[0])[0][i], moved))
            bias, ended_bias = biases[i], _views(shapes, ended[0])[1][i]
            if bias is not None and ended_bias is not None:
                moved_bias = torch.addmv(bias, delta.t(), batch.ones, alpha=-0.3)
                same.append(torch.equal(ended_bias, moved_bias))
        delta = torch.mm(delta, weights[i])
    other_x, other = 2 * x, batch.forward(new, 2 * x)
    batch.backward(new, other, drawn(12, 10), below=False)
    total = x.new_zeros(len(x), len(x))
    for i in range(len(shapes) - 1, -1, -1):
        h, other_h = (batch.values(b, i - 1) for b in (buffer, other)) if i else (x, other_x)
        inputs = torch.mm(h, other_h.t()).add_(shapes[i].bias >= 0)
        total += torch.mm(batch.deltas(buffer, i), batch.deltas(other, i).t()) * inputs
    same.append(torch.equal(batch.inner((x, buffer), (other_x, other)), total))
    return all(same) and below is not None and torch.equal(below, delta)


def _views(shapes: Sequence[DenseShape], row: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases in a row ``[D]``."""
    weights = [
        row[s.weight : s.weight + s.inputs * s.outputs].view(s.outputs, s.inputs) for s in shapes
    ]
    biases = [row[s.bias : s.bias + s.outputs] if s.bias >= 0 else None for s in shapes]
    return weights, biases
