"""Dense layers in a few compiled calls: torch's numbers, and one order of sums everywhere."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensor_bytes import same_bytes
from torch import nn

from fedsim.errors import FedsimError
from fedsim.kernels import building, dense
from fedsim.kernels.building import FUSED
from fedsim.kernels.dense import DenseKernel, DenseShape, is_compiled, self_test
from fedsim.rows import Layout
from fedsim.rows.packing import Packing
from fedsim.training.gradients import FactoredGradient
from fedsim.training.paths.dense_layers import CompiledGradient, DenseLayer, DenseLayers

compiled = pytest.mark.skipif(not is_compiled(torch.float32), reason="there is no C compiler")

WIDTHS = [1, 2, 3, 7, 10, 16, 33, 64, 130]


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


def shapes_of(layers):
    return [
        DenseShape(
            layer.module.in_features,
            layer.module.out_features,
            layer.weight.start,
            -1 if layer.bias is None else layer.bias.start,
            layer.activation is nn.ReLU,
        )
        for layer in layers
    ]


@st.composite
def blocks(draw):
    """Layers, some clients' rows, their batches of inputs, and gradients of the outputs."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    depth = draw(st.integers(1, 3))
    widths = [draw(st.sampled_from(WIDTHS)) for _ in range(depth + 1)]
    biases, relus = ([draw(st.booleans()) for _ in range(depth)] for _ in range(2))
    layers, packing = layers_of(widths, biases, relus, dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    n, batch = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5, 6, 10, 23, 64]))
    rows, x, delta = (
        torch.randn(n, *shape, dtype=dtype, generator=generator)
        for shape in ((packing.width,), (batch, widths[0]), (batch, widths[-1]))
    )
    return layers, packing, rows, x, delta


def passed(dense_layers, rows, x, delta):
    """Outputs, gradient and that of the inputs of a pass, whose outputs have the gradient delta."""
    outputs = []

    def deltas(of_outputs):
        outputs.append(of_outputs.clone())
        return delta

    gradient, below = dense_layers.gradient(rows, x, deltas, with_inputs=True)
    return outputs[0], gradient, below


def results(dense_layers, rows, x, delta):
    """All that a pass gives, and what is made of it."""
    n = len(rows)
    outputs, gradient, below = passed(dense_layers, rows, x, delta)
    rates = torch.linspace(0.1, 0.5, n, dtype=rows.dtype)
    into, inside = torch.zeros_like(rows), rows.clone()
    gradient.subtract_from(rows, rates, into)
    gradient.subtract_from(inside, rates)
    half = gradient.scaled(torch.full((n,), 0.5, dtype=rows.dtype))
    other, _ = dense_layers.gradient(into, x.flip(1), lambda _: delta)
    return type(gradient), [
        outputs, below, into, inside, gradient.dense(), gradient.norms(), half.dense(),
        half.norms(), gradient[:1].dense(), 
        # The distance of gradients that are nearly one loses digits, beside their norm.
        gradient.distance(other).square() + gradient.norms().square(),
        *(t for factor in gradient.factors for t in (factor.x, factor.delta)),
    ]  # fmt: skip


@compiled
@given(blocks())
def test_a_compiled_pass_agrees_with_an_eager_one(block) -> None:
    layers, packing, *rest = block
    kind, ours = results(DenseLayers(layers, packing, compiled=True), *rest)
    eager_kind, torchs = results(DenseLayers(layers, packing, compiled=False), *rest)
    assert (kind, eager_kind) == (CompiledGradient, FactoredGradient)
    # Sums of some thousand products of normal numbers may cancel, and keep their terms' rounding.
    tolerance = 1e-4 if rest[0].dtype == torch.float32 else 1e-12
    for mine, other in zip(ours, torchs, strict=True):
        assert float((mine - other).norm()) <= tolerance * max(float(other.norm()), 1.0)


@compiled
@given(blocks())
def test_a_client_has_the_same_bytes_whoever_is_beside_it(block) -> None:
    layers, packing, rows, x, delta = block
    dense_layers = DenseLayers(layers, packing, compiled=True)
    outputs, gradient, below = passed(dense_layers, rows, x, delta)
    written = gradient.dense()
    for k in range(len(rows)):
        client = slice(k, k + 1)
        # At another address, which is on no cache line.
        alone = torch.empty(1 + rows[k].numel(), dtype=rows.dtype)[1:].copy_(rows[k])[None]
        own_outputs, own, own_below = passed(dense_layers, alone, x[client].clone(), delta[client])
        assert same_bytes(own_outputs, outputs[client])
        assert same_bytes(own_below, below[client])
        assert same_bytes(own.dense(), written[client])


def has(*flags: str) -> bool:
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return all(flag in words for flag in flags)


def builds() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Compiler, flags and kind of processor of each build that can be loaded here."""
    found = {"native": ("cc", (), building.PROCESSOR)}
    found["16 bytes"] = ("cc", ("-DBYTES=16",), building.PROCESSOR)
    if has("avx2", "fma"):
        found["AVX2"] = ("cc", (), "-march=x86-64-v3")
    if has("avx512f", "avx512vl", "avx512dq", "avx512bw", "avx512cd"):
        found["AVX-512"] = ("cc", (), "-march=x86-64-v4")
    if shutil.which("clang"):
        found["clang"] = ("clang", (), building.PROCESSOR)
    return found


def built_by(monkeypatch, build, source, *flags: str, archives=(), sums=FUSED) -> ctypes.CDLL:
    compiler, more, processor = builds()[build]
    monkeypatch.setattr(building.shutil, "which", lambda _, which=shutil.which: which(compiler))
    path = Path(building.__file__).with_name(source)
    return ctypes.CDLL(str(building.built(path, archives, (*sums, *more, *flags), processor)))


@pytest.mark.spanning
@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("build", [name for name in builds() if name != "native"])
def test_every_width_of_registers_and_compiler_gives_the_same_bytes(
    build, dtype, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = built_by(
        monkeypatch, build, "dense.c", *(["-DFLOAT64"] if dtype == torch.float64 else [])
    )
    assert self_test(library, dtype)
    generator = torch.Generator().manual_seed(0)
    for widths, batch in [
        ((784, 32, 10), 10), ((37, 5, 3, 2), 7), ((1, 1), 1), ((100, 33, 7), 13), ((130, 64), 64),
        ((5, 300), 3), ((9, 15, 17), 23),
    ]:  # fmt: skip
        layers, packing = layers_of(widths, [True, False, True], [True, False, False], dtype)
        rows, other, x, delta = (
            torch.randn(2, *shape, generator=generator, dtype=dtype)
            for shape in (
                (packing.width,),
                (packing.width,),
                (batch, widths[0]),
                (batch, widths[-1]),
            )
        )
        delta[:, :, ::3], x[..., ::4] = -0.0, 0.0
        rates = torch.tensor([0.3, -1.7], dtype=dtype)
        found = []
        for compiled_library in (dense._compiled(dtype), library):
            kernel = DenseKernel(compiled_library, shapes_of(layers), packing.width, batch, dtype)
            made, below = kernel.gradient(rows, x, lambda _, d=delta: d, with_inputs=True)
            inside, into = rows.clone(), other.clone()
            made.subtract(rates, inside, inside)
            made.subtract(rates, rows, into)
            parts = [f(i) for i in range(len(layers)) for f in (made.values, made.deltas)]
            found.append([*parts, below, inside, into, made.inner(made)])
        assert all(map(same_bytes, *found)), (widths, batch)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_and_steps_are_those_of_autograd(dtype, compiled) -> None:
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
    dense_layers = DenseLayers(layers, packing, compiled=compiled)
    _, gradient, below = passed(dense_layers, row, x.detach()[None], delta[None])
    ended = row.clone()
    gradient.subtract_from(row, torch.tensor([0.1], dtype=dtype), ended)
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 1e-13}
    torch.testing.assert_close(below[0], of_x, **tolerance)
    named = packing.named(ended[0])
    for (name, parameter), of_name in zip(parameters.items(), gradients, strict=True):
        torch.testing.assert_close(named[name], parameter.detach() - 0.1 * of_name, **tolerance)


@compiled
def test_infinities_and_no_numbers_stay_with_their_example() -> None:
    layers, packing = layers_of([40, 16, 7], [True, True], [True, False], torch.float32)
    generator = torch.Generator().manual_seed(0)
    row, x = (torch.randn(1, *shape, generator=generator) for shape in ((packing.width,), (6, 40)))
    x[0, 2, 39], x[0, 4, 0] = np.nan, np.inf
    dense_layers = DenseLayers(layers, packing, compiled=True)
    outputs, *_ = passed(dense_layers, row, x, torch.zeros(1, 6, 7))
    assert outputs.isfinite().all(-1).tolist() == [[True, True, False, True, False, True]]


@compiled
def test_rows_with_gaps_are_read_and_written_where_they_are() -> None:
    """As an algorithm of one's own may hand them over."""
    layers, packing = layers_of([16, 8], [True], [True], torch.float32)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, packing.width, generator=generator)
    gapped = torch.empty(2, 2 * packing.width)[:, ::2].copy_(rows)
    x, delta = (torch.randn(2, 4, width, generator=generator) for width in (16, 8))
    ended = []
    for point in (rows, gapped):
        dense_layers = DenseLayers(layers, packing, compiled=True)
        gradient, _ = dense_layers.gradient(point, x, lambda _: delta)
        assert isinstance(gradient, CompiledGradient)
        for out in (torch.zeros_like(rows), torch.zeros(2, 2 * packing.width)[:, ::2]):
            gradient.subtract_from(point, torch.full((1,), 0.1).expand(2), out)
            ended.append(out)
    assert all(torch.equal(ended[0], other) for other in ended[1:])


@pytest.mark.parametrize("change", ["frozen", "tanh", "half"])
def test_layers_that_no_compiled_function_takes_are_left_to_torch(change) -> None:
    dtype = torch.bfloat16 if change == "half" else torch.float32
    layers, packing = layers_of([8, 8, 8], [True, True], [True, True], dtype)
    if change == "frozen":
        layers[0] = replace(layers[0], bias=None)
    elif change == "tanh":
        layers[0] = replace(layers[0], activation=nn.Tanh)
    x = torch.ones(1, 4, 8, dtype=dtype)
    dense_layers = DenseLayers(layers, packing, compiled=True)
    theta = torch.zeros(1, packing.width, dtype=dtype)
    assert isinstance(dense_layers.gradient(theta, x, torch.ones_like)[0], FactoredGradient)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid])
def test_any_activation_may_follow_the_last_compiled_layer(activation, dtype) -> None:
    (first, last), packing = layers_of([20, 16, 7], [True, True], [True, False], dtype)
    layers = [first, replace(last, activation=activation)]
    generator = torch.Generator().manual_seed(0)
    rows, x, delta = (
        torch.randn(5, *shape, dtype=dtype, generator=generator)
        for shape in ((packing.width,), (3, 20), (3, 7))
    )
    outputs = []

    def deltas(h, delta=delta):
        outputs.append(h.clone())
        return delta

    compiled_layers = DenseLayers(layers, packing, compiled=True)
    together, below = compiled_layers.gradient(rows, x, deltas, with_inputs=True)
    eager, _ = DenseLayers(layers, packing, compiled=False).gradient(rows, x, deltas)
    assert isinstance(together, CompiledGradient)
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 1e-12}
    torch.testing.assert_close(outputs[0], outputs[1], **tolerance)
    torch.testing.assert_close(together.dense() / 10, eager.dense() / 10, **tolerance)
    for k in range(5):
        client = slice(k, k + 1)
        alone, own_below = compiled_layers.gradient(
            rows[client].clone(),
            x[client].clone(),
            partial(deltas, delta=delta[client]),
            with_inputs=True,
        )
        assert same_bytes(alone.dense(), together[client].dense())
        assert same_bytes(own_below, below[client])


@compiled
@pytest.mark.parametrize("size", [0, 2**24])
@pytest.mark.parametrize("name", ["x", "delta"])
def test_factors_whose_memory_was_resized_are_refused(name, size) -> None:
    layers, packing = layers_of([20, 16, 7], [True, False], [True, False], torch.float32)
    rows = packing.pack(torch.randn(2, packing.layout.d))
    dense_layers = DenseLayers(layers, packing, compiled=True)

    def gradient():
        _, made, _ = passed(dense_layers, rows, torch.randn(2, 5, 20), torch.randn(2, 5, 7))
        return made

    untouched, resized = gradient(), gradient()
    getattr(resized.factors[-1], name).untyped_storage().resize_(size)
    for use in (
        lambda: resized.subtract_from(rows, torch.ones(2)),
        lambda: resized.norms(),
        lambda: untouched.distance(resized),
    ):
        with pytest.raises(FedsimError, match="resized or replaced"):
            use()
    assert untouched.norms().isfinite().all()
