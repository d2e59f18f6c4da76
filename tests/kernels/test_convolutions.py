"""Pooling is torch's; gradients from windows' winners are those of products over all places."""

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
from fedsim.kernels.convolutions import Patches, input_gradient, max_pool, weight_gradient

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
    """Images, and a window, stride and padding."""
    window = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    stride = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    padding = tuple(draw(st.integers(0, size // 2)) for size in window)
    sides = [size + draw(st.integers(0, 6)) for size in window]
    n, channels = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 6, 8, 13, 16, 37]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = random.normal(size=(n, channels, *sides)).astype(np.float32)
    if draw(st.booleans()):
        np.maximum(x, 0, out=x)  # of equal values the first wins
    for _ in range(draw(st.integers(0, 9))):
        x.flat[random.integers(x.size)] = draw(st.sampled_from([*SPOILT, -np.inf, -np.nan]))
    layout = draw(st.sampled_from([torch.channels_last, torch.contiguous_format]))
    return torch.from_numpy(x).contiguous(memory_format=layout), window, stride, padding


@compiled
@given(poolings())
def test_pooling_gives_torchs_bytes_and_places(pooling) -> None:
    x, window, stride, padding = pooling
    expected = F.max_pool2d(x, window, stride, padding, return_indices=True)
    for library in (convolutions._compiled(), *other_widths()):
        convolutions.self_test(library)
        for ours, torchs in zip(convolutions._max_pool(library, *pooling), expected, strict=True):
            assert same_bytes(ours.contiguous(), torchs.contiguous())
    assert max_pool(*pooling)[0].is_contiguous(memory_format=torch.channels_last)


@compiled
@given(poolings())
def test_pooling_writes_nothing_beyond_its_outputs(pooling) -> None:
    x, *sides = pooling
    expected = F.max_pool2d(x, *sides, return_indices=True)
    n, _, down, across = expected[0].shape
    size, guard = expected[0].numel(), 64
    largest, places = torch.full((size + guard,), 7.0), torch.full((size + guard,), 7)
    pairs = [(ctypes.c_int64 * 2)(*pair) for pair in sides]
    images = x.permute(0, 2, 3, 1).contiguous()
    for library in (convolutions._compiled(), *other_widths()):
        convolutions.self_test(library)
        library.max_pool(
            images.data_ptr(), n, *images.shape[1:], *pairs, down, across,
            largest.data_ptr(), places.data_ptr(),
        )  # fmt: skip
        for made, torchs in zip((largest, places), expected, strict=True):
            assert (made[size:] == 7).all()
            assert same_bytes(made[:size], torchs.permute(0, 2, 3, 1).flatten())


@compiled
@given(pooled_convolutions())
def test_every_width_of_registers_gives_the_same_bytes(convolution) -> None:
    x, weight, delta, places, patches = convolution
    found = []
    for library in (convolutions._compiled(), *other_widths()):
        convolutions.self_test(library)
        found.append(
            (
                convolutions._weight_gradient(library, x, delta, places, patches),
                convolutions._input_gradient(library, weight, delta, places, patches),
            )
        )
    for other in found[1:]:
        assert all(map(same_bytes, found[0], other))


@functools.cache
def other_widths() -> list[ctypes.CDLL]:
    """The kernels as for other processors and by other compilers."""
    with pytest.MonkeyPatch.context() as patch:
        return [built_by(patch, build, "convolutions.c") for build in builds() if build != "native"]


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
