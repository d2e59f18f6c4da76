"""Max-pooled convolutions, and their gradients from windows' winners: ``convolutions.c``.

An image is convolved and pooled before the next one, so that only pooled outputs leave the cache;
few channels cost nothing extra. Of a convolution's outputs only those that win a window (are its
largest) have a gradient: one in five, say. So gradients are sums over winners, not products over
all positions: a weight's gradient sums over the windows, image by image; an image's gradient adds
up, position by position, the sums over the channels that won there. Each float32 number is one sum
in one order, on every processor.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedsim.errors import FedsimError
from fedsim.kernels.arguments import address, new_address, sizes, whole
from fedsim.kernels.building import FUSED, declare, library, loaded
from fedsim.lazy import Tensor, torch

NARROWEST, WIDEST = 4, 16  # float32 numbers in a register
WORD = 64  # bits
TOLERANCE = 1e-5
"""Largest difference from torch's gradient, relative to its norm, of a library that is used."""

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "convolve_and_pool": (
        _POINTER,
        *[_NUMBER] * 2,
        *[_POINTER] * 2,
        _NUMBER,
        _POINTER,
        *[_NUMBER] * 6,
        *[_POINTER] * 3,
        *[_NUMBER] * 2,
        *[_POINTER] * 5,
    ),
    "weight_gradient": (
        _POINTER,
        *[_NUMBER] * 2,
        *[_POINTER] * 2,
        *[_NUMBER] * 2,
        _POINTER,
        *[_NUMBER] * 3,
        *[_POINTER] * 6,
    ),
    "input_gradient": (
        *[_POINTER] * 3,
        *[_NUMBER] * 4,
        _POINTER,
        *[_NUMBER] * 4,
        *[_POINTER] * 7,
    ),
}


@dataclass(frozen=True)
class Patches:
    """Geometry of the patches that a convolution reads from padded images ``[n, H, W, C]``.

    Attributes
    ----------
    image : (int, int, int)
        H, W, C.
    kernel, stride : (int, int)
        A kernel may not be larger than the image.
    """

    image: tuple[int, int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]

    def __post_init__(self) -> None:
        for number in (*self.image, *self.kernel, *self.stride):
            whole("a side of a convolution", number, 1)
        whole("the number of patches of an image", self.places[0] * self.places[1], 1)
        if self.kernel[0] > self.image[0] or self.kernel[1] > self.image[1]:
            raise FedsimError(f"a kernel {self.kernel} is larger than its image {self.image}.")

    @property
    def length(self) -> int:
        """Numbers in a row of a patch, which are contiguous."""
        return self.kernel[1] * self.image[2]

    @property
    def step(self) -> int:
        """Distance between two rows of a patch, in numbers."""
        return self.image[1] * self.image[2]

    @property
    def places(self) -> tuple[int, int]:
        """Number of patches, downwards and across."""
        down, across = (
            (side - kernel) // stride + 1
            for side, kernel, stride in zip(self.image[:2], self.kernel, self.stride, strict=True)
        )
        return down, across

    @cached_property
    def pixels(self) -> Tensor:
        """Index of the first pixel of each patch of an image, int64."""
        down, across = (torch.arange(count) for count in self.places)
        first = down[:, None] * (self.stride[0] * self.image[1]) + across * self.stride[1]
        return first.flatten()

    @cached_property
    def offsets(self) -> Tensor:
        """Index of the first number of each patch of an image, int64."""
        return self.pixels * self.image[2]


def is_compiled(dtype: torch.dtype) -> bool:
    """Whether the functions below can be called, with this dtype."""
    return dtype == torch.float32 and _compiled() is not None


@dataclass(frozen=True)
class Windows:
    """Geometry of max-pooling windows, downwards and across; places beyond the edge are ignored."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def __post_init__(self) -> None:
        for size, stride, pad in zip(self.size, self.stride, self.padding, strict=True):
            whole("a side of a pooling window", size, 1)
            whole("the stride of pooling windows", stride, 1)
            whole("the padding of pooling", pad, 0, size // 2)  # each window has a place

    def count(self, places: tuple[int, int]) -> tuple[int, int]:
        """Number of windows over so many places, downwards and across."""
        sides = zip(places, self.size, self.stride, self.padding, strict=True)
        down, across = ((side + 2 * pad - size) // stride + 1 for side, size, stride, pad in sides)
        return down, across


def convolve_and_pool(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    patches: Patches,
    windows: Windows,
    compiled: ctypes.CDLL | None = None,
) -> tuple[Tensor, Tensor]:
    """Largest output of a convolution in each window, and the position of that winner.

    Parameters
    ----------
    x : float32 Tensor ``[n, H, W, C]``
        The images, contiguous.
    weight : float32 Tensor ``[O, kernel height, kernel width * C]``
    bias : float32 Tensor ``[O]``, optional
    patches : Patches
    windows : Windows
    compiled : CDLL, optional
        A library to use instead of the default one.

    Returns
    -------
    float32 and int64 Tensor ``[n, H', W', O]``

    Raises
    ------
    FedsimError
        If an argument is another array, here and in the functions below.
    """
    n, outputs = sizes("images", x, 4)[0], sizes("weights", weight, 3)[0]
    whole("the number of channels", outputs, 1)
    x, weight = x.contiguous(), weight.contiguous()
    channels = -(-outputs // WIDEST) * WIDEST
    down, across = windows.count(patches.places)
    scratch = (
        torch.empty(patches.kernel[0] * patches.length, channels, dtype=torch.float32),
        torch.empty(channels, dtype=torch.float32),
        torch.empty(len(patches.pixels), channels, dtype=torch.float32),
    )
    largest = torch.empty(n, down, across, outputs, dtype=torch.float32)
    winners = torch.empty(n, down, across, outputs, dtype=torch.int64)
    whole("the number of windows", down, 1)
    whole("the number of windows", across, 1)
    loaded(compiled or _compiled()).convolve_and_pool(
        *_images(x, n, patches),
        _weights(weight, outputs, patches),
        None if bias is None else address("biases", bias, (outputs,), torch.float32),
        outputs,
        _offsets(patches),
        patches.kernel[0],
        patches.length,
        patches.step,
        patches.stride[1] * patches.image[2],
        *patches.places,
        *((_NUMBER * 2)(*pair) for pair in (windows.size, windows.stride, windows.padding)),
        down,
        across,
        *map(new_address, (*scratch, largest, winners)),
    )
    return largest, winners


def weight_gradient(
    x: Tensor, delta: Tensor, places: Tensor, patches: Patches, compiled: ctypes.CDLL | None = None
) -> Tensor:
    """Gradient of the weights, ``[O, kernel height, kernel width * C]``.

    Parameters
    ----------
    x : float32 Tensor ``[n, H, W, C]``
        The images, contiguous.
    delta : float32 Tensor ``[n, Q, O]``
        Gradient of each window's output, contiguous.
    places : int64 Tensor ``[n, Q, O]``
        Position of each window's winner.
    patches : Patches
    compiled
        As in `convolve_and_pool`.
    """
    n, windows, outputs = shape = sizes("gradients of windows' outputs", delta, 3)
    scratch = (
        *_registers(patches),
        torch.empty(outputs, n * windows, dtype=torch.int64),
        torch.empty(outputs, n * windows, dtype=torch.float32),
        torch.empty(outputs, dtype=torch.int64),
    )
    gradient = torch.empty(outputs, patches.kernel[0], patches.length, dtype=torch.float32)
    loaded(compiled or _compiled()).weight_gradient(
        *_images(x, n, patches),
        *_winners(delta, places, shape, patches),
        windows,
        outputs,
        _offsets(patches),
        patches.kernel[0],
        patches.length,
        patches.step,
        *map(new_address, (*scratch, gradient)),
    )
    return gradient


def input_gradient(
    weight: Tensor,
    delta: Tensor,
    places: Tensor,
    patches: Patches,
    compiled: ctypes.CDLL | None = None,
) -> Tensor:
    """Gradient of the images, ``[n, H, W, C]``; ``weight`` in the layout of `weight_gradient`."""
    n, windows, outputs = shape = sizes("gradients of windows' outputs", delta, 3)
    positions = len(patches.pixels)
    scratch = (
        *_registers(patches),
        torch.empty(positions, outputs, dtype=torch.float32),
        torch.empty(positions, -(-outputs // WORD), dtype=torch.int64),
        torch.empty(outputs, dtype=torch.int64),
        torch.empty(outputs, dtype=torch.float32),
    )
    images = torch.zeros(n, *patches.image, dtype=torch.float32)
    loaded(compiled or _compiled()).input_gradient(
        _weights(weight, outputs, patches),
        *_winners(delta, places, shape, patches),
        n,
        _images(images, n, patches)[2],
        windows,
        outputs,
        _offsets(patches),
        positions,
        patches.kernel[0],
        patches.length,
        patches.step,
        *map(new_address, (*scratch, images)),
    )
    return images


def _images(x: Tensor, n: int, patches: Patches) -> tuple[int, int, int]:
    """Address of images, their number, and the numbers in each."""
    height, width, channels = patches.image
    place = address("images", x, (n, height, width, channels), torch.float32)
    return place, n, height * width * channels


def _weights(weight: Tensor, outputs: int, patches: Patches) -> int:
    return address("weights", weight, (outputs, patches.kernel[0], patches.length), torch.float32)


def _offsets(patches: Patches) -> int:
    return address("offsets", patches.offsets, (len(patches.pixels),), torch.int64)


def _winners(
    delta: Tensor, places: Tensor, shape: tuple[int, ...], patches: Patches
) -> tuple[int, int]:
    """Addresses of windows' gradients and of their winners' positions."""
    addresses = (
        address("gradients of windows' outputs", delta, shape, torch.float32),
        address("winners", places, shape, torch.int64),
    )
    if places.numel():
        # Negative ones are very large as unsigned numbers, so that one pass finds both.
        largest = int(places.numpy().view(np.uint64).max())
        whole("the position of a winner", largest, 0, len(patches.pixels) - 1)
    return addresses


def _registers(patches: Patches) -> tuple[Tensor, Tensor]:
    """Scratch for the offsets of a patch's registers, and for their sums, on a cache line."""
    narrow = -(-patches.length // NARROWEST)
    places = torch.empty(patches.kernel[0] * narrow, dtype=torch.int64)
    return places, torch.empty(
        patches.kernel[0], -(-patches.length // WIDEST), WIDEST, dtype=torch.float32
    )


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    return library("convolutions.c", self_test, flags=FUSED)


def self_test(compiled: ctypes.CDLL) -> bool:
    """Declare the functions' arguments, and compare their results with autograd's."""
    declare(compiled, _ARGUMENTS)
    generator = torch.Generator().manual_seed(0)
    return all(
        _agrees(compiled, patches, outputs, generator)
        for patches, outputs in (
            # Registers one by one, and in groups of all sizes.
            (Patches((9, 8, 3), (2, 3), (1, 1)), 5),
            # In neither case do the numbers of a row fill whole registers, of any width.
            (Patches((11, 13, 41), (3, 5), (2, 1)), 67),
            # A part of a register at the images' end, in one group with whole registers.
            (Patches((6, 9, 7), (4, 3), (1, 1)), 13),
        )
    )


def _agrees(
    compiled: ctypes.CDLL, patches: Patches, outputs: int, generator: torch.Generator
) -> bool:
    channels, (rows, across) = patches.image[2], patches.kernel
    x = torch.randn(2, *patches.image, generator=generator)
    weight = torch.randn(outputs, rows, across, channels, generator=generator)
    images, kernels = (t.permute(0, 3, 1, 2).requires_grad_() for t in (x, weight))
    with torch.enable_grad():
        convolved = torch.nn.functional.conv2d(images, kernels, stride=patches.stride)
        pooled, places = torch.nn.functional.max_pool2d(convolved, 2, 1, return_indices=True)
        delta = torch.randn(pooled.shape, generator=generator).relu_()
        grads = torch.autograd.grad((pooled * delta).sum(), (kernels, images))
    windows, winners = (_channels_last(t).flatten(1, 2).contiguous() for t in (delta, places))
    bias = torch.randn(outputs, generator=generator)
    largest, positions = convolve_and_pool(
        x, weight.flatten(2), bias, patches, Windows((2, 2), (1, 1), (0, 0)), compiled
    )
    # By rounding another position of a window may win, but only one with nearly the same number.
    position_values = (
        convolved.detach().flatten(2).gather(2, positions.flatten(1, 2).transpose(1, 2))
    )
    pairs = (
        (largest - bias, _channels_last(pooled.detach())),
        (position_values.view(pooled.shape), pooled.detach()),
        (
            weight_gradient(x, windows, winners, patches, compiled),
            _channels_last(grads[0]).flatten(2),
        ),
        (
            input_gradient(weight.flatten(2), windows, winners, patches, compiled),
            _channels_last(grads[1]),
        ),
    )
    return all(bool((ours - torchs).norm() <= TOLERANCE * torchs.norm()) for ours, torchs in pairs)


def _channels_last(images: Tensor) -> Tensor:
    """``[n, C, H, W]`` with channels last."""
    return images.permute(0, 2, 3, 1)
