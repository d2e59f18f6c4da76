"""Standard normal draws in bulk, from numpy's Philox generator."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.array_types import Floats
from fedsim.kernels.arguments import whole
from fedsim.kernels.building import declare, library

ARCHIVE = Path(np.random.__file__).parent / "lib" / "libnpyrandom.a"
"""Static library with which numpy draws."""
# Number of draws from which on reading and writing back a generator's state pays off.
MIN_DRAWS = 1024
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "learn": (),
    "normals": (_POINTER, _SIZE, _SIZE, _POINTER),
}


class _Stream(ctypes.Structure):
    """``state_t`` of normals.c."""

    _fields_ = (
        ("counter", ctypes.c_uint64 * 4),
        ("key", ctypes.c_uint64 * 2),
        ("buffer", ctypes.c_uint64 * 4),
        ("used", ctypes.c_uint64),
    )


def sums_of_normals(generator: np.random.Generator, count: int, terms: int) -> Floats:
    """Sums of ``terms`` standard normal draws each, float64 ``[count]``; advances the generator.

    All first terms are drawn, then all second ones, and so on. Compiled or not, the draws are
    numpy's.

    Raises
    ------
    FedsimError
        Unless ``count`` is at least 0, and ``terms`` at least 1.
    """
    whole("the number of draws", count, 0, 2**62)
    whole("the number of terms", terms, 1)
    philox = generator.bit_generator
    # A subclass of the generator may make other draws from the same bits.
    is_supported = type(generator) is np.random.Generator and count * terms >= MIN_DRAWS
    if is_supported and isinstance(philox, np.random.Philox):
        compiled = _compiled()
        if compiled is not None:
            # As numpy itself does: no other thread may draw until the state is written back.
            with philox.lock:
                return _compiled_sums(compiled, philox, count, terms)
    draws = generator.standard_normal(count)
    for _ in range(terms - 1):
        draws += generator.standard_normal(count)
    return draws


def _compiled_sums(
    compiled: ctypes.CDLL, philox: np.random.Philox, count: int, terms: int
) -> Floats:
    state: Any = philox.state
    stream = _Stream(
        tuple(state["state"]["counter"].tolist()),
        tuple(state["state"]["key"].tolist()),
        tuple(state["buffer"].tolist()),
        whole("the generator's place in its buffer", int(state["buffer_pos"]), 0, 4),
    )
    draws = np.empty(count)
    compiled.normals(ctypes.byref(stream), count, terms, ctypes.c_void_p(draws.ctypes.data))
    state["state"] = {"counter": tuple(stream.counter), "key": tuple(stream.key)}
    state["buffer"], state["buffer_pos"] = tuple(stream.buffer), stream.used
    philox.state = state
    return draws


def prepare() -> None:
    """Build and load the library now, if possible, and not at the first large draw."""
    _compiled()


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    return library("normals.c", _self_test, (ARCHIVE,))


def _self_test(compiled: ctypes.CDLL) -> bool:
    """Learn the layers of the ziggurat, and compare draws with numpy's."""
    declare(compiled, _ARGUMENTS)
    compiled.learn()
    philox = np.random.Philox(key=1)
    ours, numpys = np.random.Generator(philox), np.random.Generator(np.random.Philox(key=1))
    draws = _compiled_sums(compiled, philox, 2**14, 2)
    expected = numpys.standard_normal(2**14)
    expected += numpys.standard_normal(2**14)
    return draws.tobytes() == expected.tobytes() and ours.random() == numpys.random()
