"""A batch's way through dense layers in three calls: torch's bytes, or torch's operations."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_bytes import same_bytes
from torch import nn

from fedsim.kernels import dense
from fedsim.kernels.dense import batch_of
from fedsim.kernels.dense_calls import DenseShape
from fedsim.rows import Layout
from fedsim.rows.packing import Packing
from fedsim.training.paths import dense_layers
from fedsim.training.paths.dense_layers import CompiledPass, DenseLayers, EagerPass
from fedsim.training.paths.stacked import DenseLayer

compiled = pytest.mark.skipif(not dense._compiled(), reason="there is no C compiler")

AWKWARD = [0.0, -0.0, 5e-324, 1e-45, 1e30, np.inf, -np.inf, np.nan]


def layers_of(widths, biases, relus, dtype):
    """Layers of a model, and a layout's packing."""
    named, layers = {}, []
    modules = [
        nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
        for inputs, outputs, bias in zip(widths, widths[1:], biases, strict=False)
    ]
    for number, module in enumerate(modules):
        named |= {f"{number}.{name}": p for name, p in module.named_parameters()}
    packing = Packing(Layout.of(named))
    for number, (module, relu) in enumerate(zip(modules, relus, strict=False)):
        slices = [packing.slices.get(f"{number}.{name}") for name in ("weight", "bias")]
        layers.append(DenseLayer(module, *slices, nn.ReLU if relu else None))
    return layers, packing


@st.composite
def batches(draw):
    """Layers, a row, a batch of inputs, and a gradient of its outputs."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    depth = draw(st.integers(1, 4))
    widths = [draw(st.sampled_from([2, 3, 10, 16, 33, 64, 130])) for _ in range(depth + 1)]
    biases, relus = ([draw(st.booleans()) for _ in range(depth)] for _ in range(2))
    layers, packing = layers_of(widths, biases, relus, dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(2, 12))
    row, x, delta = (
        torch.randn(*shape, dtype=dtype, generator=generator)
        for shape in ((1, packing.width), (count, widths[0]), (count, widths[-1]))
    )
    for values in (row, x, delta):
        for _ in range(draw(st.integers(0, 2))):
            place = draw(st.integers(0, values.numel() - 1))
            values.view(-1)[place] = draw(st.sampled_from(AWKWARD))
    return layers, row, x, delta


def there_and_back(layers, row, x, delta):
    """Kind of pass, all that it leaves, and what it makes of it beside another batch."""
    way = DenseLayers(layers).forward(row, x)
    outputs = way.outputs.clone()
    below = way.backward(delta, below=True)
    into, inside = torch.zeros_like(row), row.clone()
    way.subtract_from(row, 0.3, into)
    way.subtract_from(inside, 0.3, inside)
    half = way.scaled(torch.full((1,), 0.5, dtype=row.dtype))
    other = way.dense.forward(into, x.flip(0))
    other.backward(delta, below=False)
    products = [way.inner(way), way.inner(other), other.inner(half)]
    shares = [t for way in (way, half) for _, *factors in way.factors for t in factors]
    return type(way), [outputs, below, into, inside, *products, *shares]


@compiled
@settings(max_examples=80, deadline=None)
@given(batches())
def test_a_pass_has_the_same_bytes_with_and_without_a_compiler(batch) -> None:
    kind, with_compiler = there_and_back(*batch)
    assert kind is CompiledPass
    with pytest.MonkeyPatch.context() as without:
        without.setattr(dense_layers, "batch_of", lambda *_: None)
        kind, launched = there_and_back(*batch)
    assert kind is EagerPass
    assert [same_bytes(*pair) for pair in zip(with_compiler, launched, strict=True)].count(
        False
    ) == 0


@compiled
@settings(max_examples=40, deadline=None)
@given(
    st.integers(32, 500), st.integers(32, 300), st.sampled_from(dense.FEW), st.booleans(), st.data()
)
def test_products_of_few_examples_are_the_librarys(inputs, outputs, count, biased, data) -> None:
    """Whatever their shape, and wherever the batch lies."""
    layers, packing = layers_of([inputs, outputs], [biased], [False], torch.float32)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    row = torch.randn(1, packing.width, generator=generator)
    row[:, ::7] = -0.0
    first = data.draw(st.integers(0, 16))
    flat = torch.randn(first + count * inputs, generator=generator)
    x, delta = (
        flat[first:].view(count, inputs),
        torch.randn(count, outputs, generator=generator),
    )
    x[:, ::3], delta[:, ::4] = 0.0, -0.0
    way = DenseLayers(layers).forward(row, x)
    ((weight, by_input, bias),) = DenseLayers(layers).parameters(row)
    wanted = torch.mm(x, by_input) if bias is None else torch.addmm(bias, x, by_input)
    assert same_bytes(way.outputs, wanted)
    assert same_bytes(way.backward(delta, below=True), torch.mm(delta, weight))
    into, inside = torch.zeros_like(row), row.clone()
    rate = data.draw(st.sampled_from([0.3, -0.3, 1.0, 0.0]))
    way.subtract_from(row, rate, into)
    way.subtract_from(inside, rate, inside)
    wanted = torch.addmm(weight, delta.t(), x, alpha=-rate)
    for ended in (into, inside):
        assert same_bytes(DenseLayers(layers).parameters(ended)[0].weight, wanted)


@pytest.mark.parametrize(("runs_of_the_library", "run"), [({192}, 192), ({50, 100}, 50), ({7}, 0)])
def test_what_no_run_gives_is_left_to_the_library(runs_of_the_library, run) -> None:
    def made_by(tried: int) -> list[torch.Tensor]:
        return [torch.full((3,), float(tried == 0 or tried in runs_of_the_library))]

    assert dense._library_run(100, made_by) == run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_and_what_is_subtracted_are_those_of_autograd(dtype) -> None:
    layers, packing = layers_of([20, 16, 7], [True, False], [True, False], dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 20, dtype=dtype, generator=generator, requires_grad=True)
    delta = torch.randn(5, 7, dtype=dtype, generator=generator)
    parameters = {
        f"{i}.{n}": p for i, la in enumerate(layers) for n, p in la.module.named_parameters()
    }
    row = packing.pack(packing.layout.flatten(parameters).detach()[None])
    outputs = layers[1].module(torch.relu(layers[0].module(x)))
    *gradients, of_x = torch.autograd.grad((outputs * delta).sum(), (*parameters.values(), x))
    way = DenseLayers(layers).forward(row, x.detach())
    below = way.backward(delta, below=True)
    ended = row.clone()
    way.subtract_from(row, 0.1, ended)
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 1e-13}
    torch.testing.assert_close(below, of_x, **tolerance)
    named = packing.named(ended[0])
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        torch.testing.assert_close(named[name], parameter.detach() - 0.1 * gradient, **tolerance)


@pytest.mark.parametrize("shape", [(1, 8, 8), (4, 1, 8), (4, 8, 1)])
def test_what_has_a_single_row_or_column_is_left_to_torch(shape) -> None:
    batch, inputs, outputs = shape
    layer = DenseShape(inputs, outputs, 0, inputs * outputs, relu=True)
    assert batch_of([layer], batch, torch.zeros(1)) is None


@compiled
def test_rows_with_gaps_are_read_and_written_where_they_are() -> None:
    """As an algorithm of one's own may hand them over."""
    layers, packing = layers_of([16, 8], [True], [True], torch.float32)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, packing.width, generator=generator)
    gapped = torch.empty(1, 2 * packing.width)[:, ::2].copy_(rows[:1])
    x, delta = (torch.randn(4, width, generator=generator) for width in (16, 8))
    ended = []
    for row in (rows[:1], gapped):
        out = torch.empty_like(rows[:1])
        way = DenseLayers(layers).forward(row, x)
        way.backward(delta, below=False)
        way.subtract_from(row, 0.1, out)
        ended.append(packing.unpack(out))
    way = DenseLayers(layers).forward(rows[:1], x)
    way.backward(delta, below=False)
    assert isinstance(way, CompiledPass)
    into = torch.empty(1, 2 * packing.width)[:, ::2]
    way.subtract_from(rows[:1], 0.1, into)
    ended.append(packing.unpack(into))
    for other in ended[1:]:
        torch.testing.assert_close(other, ended[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", ["frozen", "tanh", "half"])
def test_layers_that_no_compiled_function_takes_are_left_to_torch(change) -> None:
    dtype = torch.bfloat16 if change == "half" else torch.float32
    (layer,), packing = layers_of([8, 8], [True], [True], dtype)
    if change == "frozen":
        layer = DenseLayer(layer.module, layer.weight, None, nn.ReLU)
    elif change == "tanh":
        layer = DenseLayer(layer.module, layer.weight, layer.bias, nn.Tanh)
    x = torch.ones(4, 8, dtype=dtype)
    way = DenseLayers([layer]).forward(torch.zeros(1, packing.width, dtype=dtype), x)
    assert isinstance(way, EagerPass)


IN_A_NEW_THREAD = """
import os, threading
import torch
from fedsim.kernels.dense import batch_of
from fedsim.kernels.dense_calls import DenseShape
torch.set_num_threads(1)
row, x = torch.randn(1, 2000 * 2001), torch.randn(200, 2000)
batch = batch_of([DenseShape(2000, 2000, 0, 2000 * 2000, True)], 200, row)
tasks = []
def forward():
    tasks.append(len(os.listdir("/proc/self/task")))
    batch.forward(row, x)
    tasks.append(len(os.listdir("/proc/self/task")))
thread = threading.Thread(target=forward)
thread.start()
thread.join()
print(*tasks)
"""


@compiled
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads are not listed")
def test_products_take_no_more_threads_than_torch_lets_them_in_any_thread() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    command = [sys.executable, "-c", IN_A_NEW_THREAD]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    before, after = told.stdout.split()
    assert before == after
