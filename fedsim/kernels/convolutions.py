"""Max-pooling, and gradients of what is pooled from its windows' winners: ``convolutions.c``.

Pooling gives torch's numbers and places, also of few channels, which torch takes one by one. Of a
convolution's outputs only those that win a window have a gradient: one in five, say. So gradients
are sums over winners, not products over all places, of float32: a weight's gradient goes through
the windows, image by image; an image's adds up, place by place, the sums over the channels that won
there. Each number is one sum in that order, on every processor.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from functools import cached_property

from fedsim.kernels.building import FUSED, library
from fedsim.lazy import Tensor, torch

NARROWEST, WIDEST = 4, 16  # float32 numbers of a register
WORD = 64  # bits
TOLERANCE = 1e-5
"""Of a gradient's norm: how far from torch's a library may be that is used."""

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "max_pool": (_POINTER, *[_NUMBER] * 4, *[_POINTER] * 3, *[_NUMBER] * 2, *[_POINTER] * 2),
    "weight_gradient": (
        _POINTER, *[_NUMBER] * 2, *[_POINTER] * 2, *[_NUMBER] * 2,
        _POINTER, *[_NUMBER] * 3, *[_POINTER] * 6,
    ),
    "input_gradient": (
        *[_POINTER] * 3, *[_NUMBER] * 4, _POINTER, *[_NUMBER] * 4, *[_POINTER] * 7,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Patches:
    """What a convolution reads of images ``[n, H, W, C]`` that are padded already.

    Attributes
    ----------
    image : (int, int, int)
        H, W, C.
    kernel, stride : (int, int)
    """

    image: tuple[int, int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]

    @property
    def length(self) -> int:
        """Numbers of a patch that lie side by side: a row of it."""
        return self.kernel[1] * self.image[2]

    @property
    def step(self) -> int:
        """From one row of a patch to the next one."""
        return self.image[1] * self.image[2]

    @property
    def places(self) -> tuple[int, int]:
        """How many patches there are, downwards and across."""
        down, across = (
            (side - kernel) // stride + 1
            for side, kernel, stride in zip(self.image[:2], self.kernel, self.stride, strict=True)
        )
        return down, across

    @cached_property
    def pixels(self) -> Tensor:
        """The first pixel of each patch of an image, int64."""
        down, across = (torch.arange(count) for count in self.places)
        first = down[:, None] * (self.stride[0] * self.image[1]) + across * self.stride[1]
        return first.flatten()

    @cached_property
    def offsets(self) -> Tensor:
        """The same in numbers of an image."""
        return self.pixels * self.image[2]


def is_compiled(dtype: torch.dtype) -> bool:
    """Whether the functions below can be called, with numbers of that kind."""
    return dtype == torch.float32 and _compiled() is not None


def max_pool(
    x: Tensor, window: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Largest values of windows, and their places ``row * W + column``; see torch's `MaxPool2d`.

    Parameters
    ----------
    x : float32 Tensor ``[n, C, H, W]``
        Of fewer than 2**31 places.

    Returns
    -------
    float32 and int64 Tensor ``[n, C, H', W']``, channels last
    """
    compiled = _compiled()
    assert compiled is not None
    return _max_pool(compiled, x, window, stride, padding)


def weight_gradient(x: Tensor, delta: Tensor, places: Tensor, patches: Patches) -> Tensor:
    """Gradient of the weights, ``[O, kernel height, kernel width * C]``.

    Parameters
    ----------
    x : float32 Tensor ``[n, H, W, C]``
        The images, without gaps.
    delta : float32 Tensor ``[n, Q, O]``
        Gradient of what each window gives, without gaps.
    places : int64 Tensor ``[n, Q, O]``
        The place that won it.
    patches : Patches
    """
    compiled = _compiled()
    assert compiled is not None
    return _weight_gradient(compiled, x, delta, places, patches)


def input_gradient(weight: Tensor, delta: Tensor, places: Tensor, patches: Patches) -> Tensor:
    """Gradient of the images, ``[n, H, W, C]``, from the weights as `weight_gradient` has them."""
    compiled = _compiled()
    assert compiled is not None
    return _input_gradient(compiled, weight, delta, places, patches)


def _max_pool(
    compiled: ctypes.CDLL,
    x: Tensor,
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    x = x.permute(0, 2, 3, 1).contiguous()
    n, height, width, channels = x.shape
    down, across = (
        (side + 2 * pad - size) // step + 1
        for side, pad, size, step in zip((height, width), padding, window, stride, strict=True)
    )
    largest = torch.empty(n, down, across, channels)
    winners = torch.empty(n, down, across, channels, dtype=torch.int64)
    compiled.max_pool(
        x.data_ptr(), n, height, width, channels,
        *((_NUMBER * 2)(*pair) for pair in (window, stride, padding)), down, across,
        largest.data_ptr(), winners.data_ptr(),
    )  # fmt: skip
    return largest.permute(0, 3, 1, 2), winners.permute(0, 3, 1, 2)


def _weight_gradient(
    compiled: ctypes.CDLL, x: Tensor, delta: Tensor, places: Tensor, patches: Patches
) -> Tensor:
    n, windows, outputs = delta.shape
    scratch = (
        *_registers(patches),
        torch.empty(outputs, n * windows, dtype=torch.int64),
        torch.empty(outputs, n * windows),
        torch.empty(outputs, dtype=torch.int64),
    )
    gradient = torch.empty(outputs, patches.kernel[0], patches.length)
    compiled.weight_gradient(
        x.data_ptr(), n, x[0].numel(), delta.data_ptr(), places.data_ptr(), windows, outputs,
        patches.offsets.data_ptr(), patches.kernel[0], patches.length, patches.step,
        *(tensor.data_ptr() for tensor in scratch), gradient.data_ptr(),
    )  # fmt: skip
    return gradient


def _input_gradient(
    compiled: ctypes.CDLL, weight: Tensor, delta: Tensor, places: Tensor, patches: Patches
) -> Tensor:
    n, windows, outputs = delta.shape
    positions = len(patches.pixels)
    scratch = (
        *_registers(patches),
        torch.empty(positions, outputs),
        torch.empty(positions, -(-outputs // WORD), dtype=torch.int64),
        torch.empty(outputs, dtype=torch.int64),
        torch.empty(outputs),
    )
    images = torch.zeros(n, *patches.image)
    compiled.input_gradient(
        weight.data_ptr(), delta.data_ptr(), places.data_ptr(), n, images[0].numel(), windows,
        outputs, patches.offsets.data_ptr(), positions, patches.kernel[0], patches.length,
        patches.step, *(tensor.data_ptr() for tensor in scratch), images.data_ptr(),
    )  # fmt: skip
    return images


def _registers(patches: Patches) -> tuple[Tensor, Tensor]:
    """Room for where a patch's registers are, and for what is in them; torch's is on a line."""
    narrow = -(-patches.length // NARROWEST)
    places = torch.empty(patches.kernel[0] * narrow, dtype=torch.int64)
    return places, torch.empty(patches.kernel[0], -(-patches.length // WIDEST), WIDEST)


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    return library("convolutions.c", self_test, flags=FUSED)


def self_test(compiled: ctypes.CDLL) -> bool:
    """Say what its functions take, and compare what they give with what autograd gives."""
    for name, arguments in _ARGUMENTS.items():
        function = getattr(compiled, name)
        function.argtypes, function.restype = arguments, None
    generator = torch.Generator().manual_seed(0)
    return all(
        _agrees(compiled, patches, outputs, generator)
        for patches, outputs in (
            # Registers one by one, and in all the numbers that are taken together.
            (Patches((9, 8, 3), (2, 3), (1, 1)), 5),
            # In neither do the numbers of a row fill its registers, of whatever width.
            (Patches((11, 13, 41), (3, 5), (2, 1)), 67),
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
        largest, winners = _max_pool(compiled, convolved.detach(), (2, 2), (1, 1), (0, 0))
        if not (torch.equal(largest, pooled) and torch.equal(winners, places)):
            return False
        delta = torch.randn(pooled.shape, generator=generator).relu_()
        wanted = torch.autograd.grad((pooled * delta).sum(), (kernels, images))
    windows, winners = (t.permute(0, 2, 3, 1).flatten(1, 2).contiguous() for t in (delta, places))
    made = (
        _weight_gradient(compiled, x, windows, winners, patches).view(weight.shape),
        _input_gradient(compiled, weight.flatten(2), windows, winners, patches),
    )
    return all(
        bool((ours - torchs.permute(0, 2, 3, 1)).norm() <= TOLERANCE * torchs.norm())
        for ours, torchs in zip(made, wanted, strict=True)
    )
