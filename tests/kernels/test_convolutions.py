"""Pooled convolutions, and their gradients from windows' winners, are those of torch."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tensor_bytes import same_bytes
from test_dense import builds, built_by

from fedsim.kernels import convolutions
from fedsim.kernels.convolutions import (
    Patches,
    Windows,
    convolve_and_pool,
    input_gradient,
    weight_gradient,
)

compiled = pytest.mark.skipif(convolutions._compiled() is None, reason="there is no C compiler")

SPOILT = [0.0, -0.0, 1e-45, 3e38, -3e38, np.inf, np.nan]


@st.composite
def pooled_convolutions(draw):
    """Images, weights, the gradient of what windows give, who won them, and what is read."""
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    stride = (draw(st.integers(1, 2)), draw(st.integers(1, 3)))
    channels, outputs = draw(st.sampled_from([1, 3, 16, 37])), draw(st.sampled_from([1, 6, 67]))
    height, width = (side + draw(st.integers(0, 5)) for side in kernel)
    patches = Patches((height, width, channels), kernel, stride)
    n, windows = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = random.normal(size=(n, *patches.image)).astype(np.float32)
    weight = random.normal(size=(outputs, kernel[0], patches.length)).astype(np.float32)
    delta = random.normal(size=(n, windows, outputs)).astype(np.float32)
    delta *= random.random(delta.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    for values in (x, weight, delta):
        for _ in range(draw(st.integers(0, 2))):
            values.flat[random.integers(values.size)] = draw(st.sampled_from(SPOILT))
    places = random.integers(len(patches.pixels), size=delta.shape)
    return (*map(torch.from_numpy, (x, weight, delta, places)), patches)


@st.composite
def poolings(draw):
    """Images, weights, a bias or none, what is read of them, and the windows of a pooling."""
    x, weight, *_, patches = draw(pooled_convolutions())
    bias = torch.arange(len(weight)) / 7 if draw(st.booleans()) else None
    size = [draw(st.integers(1, min(places, 4))) for places in patches.places]
    stride = [draw(st.integers(1, 4)) for _ in size]
    padding = [draw(st.integers(0, side // 2)) for side in size]
    return x, weight, bias, patches, Windows(tuple(size), tuple(stride), tuple(padding))


def last(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 2, 3, 1).contiguous()


def of_torch(x, weight, bias, patches, windows):
    """What torch convolves, and the largest of its windows."""
    kernels = weight.view(len(weight), *patches.kernel, -1).permute(0, 3, 1, 2)
    convolved = F.conv2d(x.permute(0, 3, 1, 2), kernels, bias, patches.stride)
    return convolved, F.max_pool2d(convolved, windows.size, windows.stride, windows.padding)


@compiled
@given(poolings())
def test_pooled_convolutions_are_torchs_whatever_the_width_of_registers(pooling) -> None:
    x, weight, bias, patches, windows = pooling
    found = [convolutions.convolve_and_pool(*pooling, library) for library in libraries()]
    for other in found[1:]:
        assert all(map(same_bytes, found[0], other))
    largest, winners = found[0]
    # In double precision, so that torch's rounding is none.
    wide = (x.double(), weight.double(), None if bias is None else bias.double())
    convolved, expected = of_torch(*wide, patches, windows)
    terms = of_torch(*(t if t is None else t.abs() for t in wide), patches, windows)[0]
    if not terms.isfinite().all() or terms.max() > 3e38:
        return  # beyond single precision; that all widths agree is enough
    # Of the sum's rounding, and of products below the smallest number of single precision.
    error = (patches.length * patches.kernel[0] + 1) * (1e-6 * float(terms.max()) + 2.0**-149)
    assert (largest - last(expected)).abs().max() <= error
    at_winners = convolved.flatten(2).gather(2, winners.flatten(1, 2).transpose(1, 2))
    assert (at_winners.view(expected.shape) - expected).abs().max() <= 2 * error


@compiled
@given(poolings())
def test_nan_wins_a_window_and_of_equals_the_first_does(pooling) -> None:
    x, weight, _, patches, windows = pooling
    # Whole numbers are added without rounding, and are often equal.
    x, weight = (t.nan_to_num(0, 1, -1).clamp(-2, 2).round() for t in (x, weight))
    x.flatten()[:: max(x.numel() // 3, 1)] = float("nan")
    # In double precision: oneDNN's of single precision can be no whole numbers, nor sums at all.
    convolved, _ = of_torch(x.double(), weight.double(), None, patches, windows)
    expected = F.max_pool2d(
        convolved.float(), windows.size, windows.stride, windows.padding, return_indices=True
    )
    for ours, torchs in zip(
        convolve_and_pool(x, weight, None, patches, windows), expected, strict=True
    ):
        assert same_bytes(ours + 0, last(torchs) + 0)  # 0 and -0 are equal


@compiled
@given(pooled_convolutions())
def test_every_width_of_registers_gives_the_same_bytes(convolution) -> None:
    x, weight, delta, places, patches = convolution
    found = [
        (
            convolutions.weight_gradient(x, delta, places, patches, library),
            convolutions.input_gradient(weight, delta, places, patches, library),
        )
        for library in libraries()
    ]
    for other in found[1:]:
        assert all(map(same_bytes, found[0], other))


@functools.cache
def libraries() -> list[ctypes.CDLL]:
    """The kernels of this machine, and as for other processors and by other compilers."""
    with pytest.MonkeyPatch.context() as patch:
        others = [built_by(patch, build, "convolutions.c") for build in builds()]
    for library in others:
        convolutions.self_test(library)  # which also says what its functions take
    return others


@compiled
@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (2, 3)])
def test_gradients_are_those_that_autograd_gives(stride) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 13, 12, generator=generator, requires_grad=True)
    weight = torch.randn(7, 5, 3, 2, generator=generator, requires_grad=True)
    convolved = F.conv2d(x, weight, stride=stride)
    pooled, places = F.max_pool2d(convolved, 3, 2, return_indices=True)
    delta = torch.randn(pooled.shape, generator=generator)
    delta = delta * (torch.rand(pooled.shape, generator=generator) < 0.6)
    of_x, of_weight = torch.autograd.grad((pooled * delta).sum(), (x, weight))
    patches = Patches((13, 12, 5), (3, 2), stride)
    assert patches.places == tuple(convolved.shape[2:])
    images = x.detach().permute(0, 2, 3, 1).contiguous()
    rows = weight.detach().permute(0, 2, 3, 1).flatten(2)
    windows, winners = (t.permute(0, 2, 3, 1).flatten(1, 2).contiguous() for t in (delta, places))
    tolerance = {"rtol": 0, "atol": 1e-4}
    by_winners = weight_gradient(images, windows, winners, patches)
    torch.testing.assert_close(by_winners, of_weight.permute(0, 2, 3, 1).flatten(2), **tolerance)
    by_winners = input_gradient(rows, windows, winners, patches)
    torch.testing.assert_close(by_winners, of_x.permute(0, 2, 3, 1), **tolerance)
