"""Cross-entropy of classes, from outputs to gradients in one pass: ``classes.c``, or numpy.

Both compute the same float32 sums and products in the same order, so that a run without a compiler
has the same bytes. Torch's own softmax adds the classes in an order that depends on the width of
registers, and is slow for few of them.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import numpy.typing as npt

from fedsim.array_types import Ints
from fedsim.errors import FedsimError
from fedsim.kernels.arguments import address, new_address, sizes, whole
from fedsim.kernels.building import declare, library
from fedsim.lazy import Tensor, torch

Float32s = npt.NDArray[np.float32]

LEAST = -87.0
"""Below this, e^x is no longer a normal number, and is set to 0."""
# ln 2 in two parts (Cody-Waite): as the first has few bits, n times it is exact, so that the
# reduced argument of the series keeps its low bits.
LOG2_E, LN_2_HIGH, LN_2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
LN_2 = 0.6931471805599453
SERIES = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)

_POINTER, _NUMBER, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_ssize_t
_ARGUMENTS = {"gradients": (_POINTER, _SIZE, _NUMBER, _NUMBER, _POINTER, _SIZE, _POINTER)}


class _Batches(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("targets", "weights", "sums", "below")),
        ("rows", _NUMBER),
    ]


class ClassBatches:
    """Targets of batches, and each example's loss once its batch has had its pass.

    Parameters
    ----------
    targets : int64 Tensor ``[S, B]``
        Class numbers.
    weights : float32 Tensor ``[S, B]``
        Weight of each example's loss.
    counts : bool Tensor ``[S, B]``
        Whether an example counts; if not, its weight is 0, and so is its loss.

    Raises
    ------
    FedsimError
        If they are other arrays.
    """

    def __init__(self, targets: Tensor, weights: Tensor, counts: Tensor) -> None:
        shape = sizes("targets", targets, 2)
        sizes("weights", weights, 2)
        self._targets, self._weights = targets.contiguous(), weights.contiguous()
        self._counts = counts
        # For batches without a pass, numbers that give a loss of 0: log(1) - 0.
        self._sums, self._below = torch.ones_like(self._weights), torch.zeros_like(self._weights)
        self._buffers = self._targets, self._weights, self._sums, self._below
        dtypes = (torch.int64, *[torch.float32] * 3)
        names = ("targets", "weights", "the sums of exponentials", "the targets' outputs")
        places = map(address, names, self._buffers, [shape] * 4, dtypes)
        self._batches = _Batches(*places, whole("the size of a batch", shape[1], 0))
        self._least, self._largest = 0, -1
        if targets.numel():
            self._least, self._largest = (int(bound) for bound in targets.aminmax())
        self._address, self._compiled = ctypes.addressof(self._batches), _compiled()

    def deltas(self, outputs: Tensor, first: int) -> Tensor:
        """Gradients of the weighted loss with respect to the outputs.

        Parameters
        ----------
        outputs : float32 Tensor ``[n, B, K]`` or ``[B, K]``
            Outputs of the batches from number ``first`` on, or of that one; each is contiguous.

        Raises
        ------
        FedsimError
            If a target is not a class of the outputs, or they are other arrays.
        """
        (batches, rows), is_block = self._targets.shape, len(outputs.shape) != 2
        shape = sizes("outputs", outputs, 3 if is_block else 2)
        count = shape[0] if is_block else 1
        place = address(
            "outputs", outputs, (*shape[:-2], rows, shape[-1]), torch.float32, gaps=is_block
        )
        whole("the number of classes", shape[-1], 1)
        whole("the number of the first batch", first, 0, batches - count)
        if self._least < 0 or self._largest >= shape[-1]:
            bad_class = self._least if self._least < 0 else self._largest
            raise FedsimError(
                f"a target is class {bad_class}; the model has outputs for 0 to {shape[-1] - 1}."
            )
        if self._compiled is None:
            return self._by_arrays(outputs.reshape(count, *shape[-2:]), first).view(shape)
        gradients = torch.empty(shape, dtype=torch.float32)
        self._compiled.gradients(
            self._address,
            first,
            count,
            shape[-1],
            place,
            outputs.stride(0),
            new_address(gradients),
        )
        return gradients

    def _by_arrays(self, outputs: Tensor, first: int) -> Tensor:
        batches = slice(first, first + len(outputs))
        targets, weights, sums, below = (buffer[batches].numpy() for buffer in self._buffers)
        gradients, sums[:], below[:] = by_arrays(outputs.numpy(), targets, weights)
        return torch.from_numpy(gradients)

    def values(self) -> Tensor:
        """Loss of each example, float32 ``[S, B]``; 0 for batches without a pass."""
        logarithms = _logarithms(self._sums.double().numpy())
        losses: Tensor = torch.from_numpy(logarithms).sub_(self._below).to(torch.float32)
        return losses.masked_fill_(~self._counts, 0.0)


def by_arrays(
    outputs: Float32s, targets: Ints, weights: Float32s
) -> tuple[Float32s, Float32s, Float32s]:
    """One pass over ``outputs [..., K]``, for ``targets`` and ``weights [...]``, by numpy.

    Returns
    -------
    gradients : float32 ``[..., K]``
    sums : float32 ``[...]``
        Sum over the classes of ``exp(output - largest output)``.
    below : float32 ``[...]``
        The target's output minus the largest output.
    """
    x = outputs - outputs.max(axis=-1, keepdims=True)
    target_indices = targets[..., None]
    below = np.take_along_axis(x, target_indices, axis=-1)[..., 0]
    exponentials = _exponentials(x)
    # One class after another, as in C; `sum` adds in another order.
    sums = np.cumsum(exponentials, axis=-1)[..., -1]
    gradients = exponentials / sums[..., None]
    of_target = np.take_along_axis(gradients, target_indices, axis=-1) - np.float32(1)
    np.put_along_axis(gradients, target_indices, of_target, axis=-1)
    gradients *= weights[..., None]
    return gradients, sums, below


def _exponentials(x: Float32s) -> Float32s:
    """``e^x`` of numbers that are not positive, as ``2^n e^r`` with a series for ``e^r``."""
    bounded = np.where(x >= LEAST, x, np.float32(LEAST))
    n: Float32s = np.rint(bounded * np.float32(LOG2_E))
    r: Float32s = bounded - n * np.float32(LN_2_HIGH)
    r = r - n * np.float32(LN_2_LOW)
    series = np.full_like(r, SERIES[0])
    for coefficient in SERIES[1:]:
        series = series * r + np.float32(coefficient)
    # 2^n, made from its bits: the biased exponent and no fraction.
    power = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    small = np.where(x < LEAST, np.float32(0), x)
    return np.where(x >= LEAST, series * power, small)


def _logarithms(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Natural logarithms, to float32's precision: ``2 artanh((m - 1) / (m + 1)) + e ln 2``.

    Numpy's own differ between processors in the last bit; these do not: ``m``, within a factor
    sqrt(2) of 1, and the exponent e are exact, and the rest is sums and products in one order.
    """
    m, e = np.frexp(x)
    low = m < np.sqrt(0.5)
    m, e = np.where(low, 2 * m, m), e - low
    s = (m - 1) / (m + 1)
    square = s * s
    series = np.zeros_like(square)
    for odd in range(15, 0, -2):
        series = series * square + 1 / odd
    logarithms: npt.NDArray[np.float64] = 2 * s * series + e * LN_2
    return logarithms


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    return library("classes.c", _self_test)


def _self_test(compiled: ctypes.CDLL) -> bool:
    """Declare the function's arguments, and compare its results with numpy's."""
    declare(compiled, _ARGUMENTS)
    random = np.random.default_rng(0)
    # Some outputs far below the largest one, and a gap between the batches.
    block = (10 * random.standard_cauchy((3, 7, 11))).astype(np.float32)
    outputs, targets = np.ascontiguousarray(block[1:, :6]), random.integers(0, 11, (3, 6))
    weights = random.random((3, 6), dtype=np.float32)
    expected = by_arrays(outputs, targets[1:], weights[1:])
    gradients, sums, below = np.empty_like(outputs), *np.empty((2, 3, 6), dtype=np.float32)
    places = (array.ctypes.data for array in (targets, weights, sums, below))
    batches = _Batches(*places, 6)
    first = block[1:].ctypes.data
    compiled.gradients(ctypes.addressof(batches), 1, 2, 11, first, 77, gradients.ctypes.data)
    return all(map(np.array_equal, (gradients, sums[1:], below[1:]), expected))
