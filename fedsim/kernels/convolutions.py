"""Gradients of a max-pooled convolution from its windows' winners: torch's, or ``convolutions.c``.

Of a convolution's outputs only those that win a window have a gradient: one in five, say. So
gradients are sums over winners, not products over all places. Both ways add the same terms in one
order, and give the same bytes: a weight's gradient goes through the windows, image by image; an
image's adds up, place by place, the sums over the channels that won there.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedsim.kernels.building import library
from fedsim.lazy import Tensor, torch

LANES, WORD = 16, 64  # float32 numbers of a register, bits of a word

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
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

    @property
    def registers(self) -> int:
        """What a patch takes, row by row."""
        return self.kernel[0] * -(-self.length // LANES)


def weight_gradient(x: Tensor, delta: Tensor, places: Tensor, patches: Patches) -> Tensor:
    """Gradient of the weights, ``[O, kernel height, kernel width * C]``.

    Parameters
    ----------
    x : Tensor ``[n, H, W, C]``
        The images, without gaps.
    delta : Tensor ``[n, Q, O]``
        Gradient of what each window gives, without gaps.
    places : int64 Tensor ``[n, Q, O]``
        The place that won it.
    patches : Patches
    """
    compiled = _compiled() if x.dtype == torch.float32 else None
    if compiled is None:
        return _weight_gradient(x, delta, places, patches)
    return _compiled_weight_gradient(compiled, x, delta, places, patches)


def input_gradient(weight: Tensor, delta: Tensor, places: Tensor, patches: Patches) -> Tensor:
    """Gradient of the images, ``[n, H, W, C]``, from the weights as `weight_gradient` has them."""
    compiled = _compiled() if weight.dtype == torch.float32 else None
    if compiled is None:
        return _input_gradient(weight, delta, places, patches)
    return _compiled_input_gradient(compiled, weight, delta, places, patches)


def _weight_gradient(x: Tensor, delta: Tensor, places: Tensor, patches: Patches) -> Tensor:
    (height, width, channels), (rows, across) = patches.image, patches.kernel
    (n, windows, outputs), by_channel = delta.shape, (2, 0, 1)
    factors = delta.permute(by_channel).flatten()
    live = _nonzero(factors)
    chosen = patches.pixels.index_select(
        0, places.permute(by_channel).flatten().index_select(0, live)
    )
    chosen += torch.from_numpy(live.numpy() // windows % n * (height * width))
    factors = factors.index_select(0, live)
    firsts = torch.searchsorted(live, torch.arange(outputs).mul_(n * windows))
    gradient = x.new_empty(outputs, rows, patches.length)
    for row in range(rows):
        # A patch's row from each pixel on: they overlap.
        count, start = len(x) * height * width - row * width - across + 1, row * patches.step
        starts = x.storage_offset() + start
        table = x.as_strided((count, patches.length), (channels, 1), starts)
        gradient[:, row] = _bags(chosen, table, factors, firsts)
    return gradient


def _input_gradient(weight: Tensor, delta: Tensor, places: Tensor, patches: Patches) -> Tensor:
    n, _, outputs = delta.shape
    (rows, across), (down, right) = patches.kernel, patches.stride
    positions = n * len(patches.pixels)
    dense = delta.new_zeros(n, len(patches.pixels), outputs).scatter_add_(1, places, delta)
    live = _nonzero(dense.flatten())
    factors = dense.flatten().index_select(0, live)
    firsts = torch.searchsorted(live, torch.arange(positions).mul_(outputs))
    columns = _bags(live % outputs, weight.flatten(1), factors, firsts)
    columns = columns.view(n, *patches.places, rows, across, patches.image[2])
    images = delta.new_zeros(n, *patches.image)
    # A pixel's first place is the one that it is the last pixel of.
    for i in range(rows - 1, -1, -1):
        for j in range(across - 1, -1, -1):
            high, wide = patches.places
            images[
                :, i : i + down * (high - 1) + 1 : down, j : j + right * (wide - 1) + 1 : right
            ] += columns[:, :, :, i, j]
    return images


def _nonzero(values: Tensor) -> Tensor:
    """Where values are that are not zero; numpy finds them five times as fast."""
    return torch.from_numpy(np.flatnonzero((values != 0).numpy()))


def _bags(rows: Tensor, table: Tensor, factors: Tensor, firsts: Tensor) -> Tensor:
    """Sums of rows of a table times their factors, one after another."""
    sums: Tensor = torch.nn.functional.embedding_bag(
        rows, table, firsts, mode="sum", per_sample_weights=factors
    )
    return sums


def _compiled_weight_gradient(
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


def _compiled_input_gradient(
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
    return torch.empty(patches.registers, dtype=torch.int64), torch.empty(patches.registers, LANES)


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    return library("convolutions.c", _self_test)


def _self_test(compiled: ctypes.CDLL) -> bool:
    """Say what its functions take, and compare what they give with what torch gives."""
    for name, arguments in _ARGUMENTS.items():
        function = getattr(compiled, name)
        function.argtypes, function.restype = arguments, None
    generator = torch.Generator().manual_seed(0)
    return all(
        _agrees(compiled, patches, outputs, generator)
        for patches, outputs in (
            # Registers one by one, and in all the numbers that are taken together.
            (Patches((9, 8, 3), (2, 3), (1, 1)), 5),
            (Patches((7, 9, 40), (3, 5), (2, 1)), 67),
        )
    )


def _agrees(
    compiled: ctypes.CDLL, patches: Patches, outputs: int, generator: torch.Generator
) -> bool:
    x = torch.randn(2, *patches.image, generator=generator)
    delta = torch.randn(2, 6, outputs, generator=generator).relu_()
    places = torch.randint(len(patches.pixels), delta.shape, generator=generator)
    weight = torch.randn(outputs, patches.kernel[0], patches.length, generator=generator)
    return torch.equal(
        _compiled_weight_gradient(compiled, x, delta, places, patches),
        _weight_gradient(x, delta, places, patches),
    ) and torch.equal(
        _compiled_input_gradient(compiled, weight, delta, places, patches),
        _input_gradient(weight, delta, places, patches),
    )
