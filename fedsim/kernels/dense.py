"""Which dense layers are gone through compiled, and how: to the bytes of torch's operations.

Products are those of torch's own library, called with the same arguments; or, of a few examples,
for which libraries are slow, our own in the library's order, as far as trials find that out.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedsim.kernels.building import library
from fedsim.kernels.dense_calls import Blas, DenseBatch, DenseShape, Runs, blas_of, dense_batch
from fedsim.lazy import Tensor, torch

FEW = range(4, 13)
"""Examples of which products are made here, where the processor has the registers."""
COLUMNS = 32
"""Fewest inputs and outputs of these."""
NARROW = 16
"""In a block, layers with fewer outputs have as many all the same, which nobody looks at: libraries
have better products for these."""
RUN = 192
"""Longest run of a sum's products that the usual library adds up at once, of float32."""


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
        else Runs()
        for shape in shapes
    ]
    return dense_batch(shapes, batch, like, blas, runs)


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
        Runs(RUN)
        if is_narrow
        else _runs(shape.inputs, shape.outputs, batch, shape.bias >= 0)
        if few
        else Runs()
        for is_narrow, shape in zip(narrow, shapes, strict=True)
    ]
    for folds in (True, False) if few and batch in FEW else (False,):
        yield dense_batch(shapes, batch, like, blas, [run._replace(folds=folds) for run in runs])


@functools.cache
def _runs(inputs: int, outputs: int, batch: int, biased: bool) -> Runs:
    """In which runs torch's library adds up such products of float32, as trials show; 0: in none.

    That is the only thing in which libraries differ whose products and sums are one rounding each.
    """
    if batch not in FEW or min(inputs, outputs) < COLUMNS:
        return Runs()
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
        made = dense_batch([shape], batch, row, blas, [Runs(run, 0)])
        return [made.values(made.forward(row, x), 0) for x in xs]

    def gradients_by(run: int) -> list[Tensor]:
        made = dense_batch([shape], batch, row, blas, [Runs(0, run)])
        buffer = made.forward(row, xs[0])
        below = [made.backward(row, buffer, delta, below=True) for delta in deltas]
        return [gradient for gradient in below if gradient is not None]

    def updated_by(folds: bool) -> list[Tensor]:
        made = dense_batch([shape], batch, row, blas, [Runs(folds=folds)])
        ended = []
        for x, delta in zip(xs, deltas, strict=True):
            buffer, inside, other = made.forward(row, x), row.clone(), torch.zeros_like(row)
            made.backward(row, buffer, delta, below=False)
            for old, into in ((inside, inside), (row, other)):
                made.update(old, into, x, buffer, -0.3)
            ended += [inside, other]
        return ended

    return Runs(
        _library_run(inputs, outputs_by),
        _library_run(outputs, gradients_by),
        all(map(torch.equal, updated_by(True), updated_by(False))),
    )


def _library_run(products: int, made_by: Callable[[int], list[Tensor]]) -> int:
    """Of the runs that libraries are known for, the first that gives what the library gives."""
    wanted = made_by(0)
    for run in (RUN, -(-products // 2), products):
        if all(map(torch.equal, made_by(run), wanted)):
            return run
    return 0


@functools.cache
def _compiled() -> dict[torch.dtype, Blas]:
    """By what they compute with."""
    found: dict[torch.dtype, Blas] = {}

    def self_test(compiled: ctypes.CDLL) -> bool:
        products = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        for name, letter in (("float", "s"), ("double", "d")):
            dtype = torch.float64 if name == "double" else torch.float32
            found[dtype] = blas = blas_of(compiled, products, name, letter)
            if not _agrees(blas, dtype):
                return False
        return True

    return found if library("dense.c", self_test) is not None else {}


def _agrees(blas: Blas, dtype: torch.dtype) -> bool:
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
    batch = dense_batch(shapes, len(x), row, blas, [Runs()] * len(shapes))
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
