"""Reading an ``.npz``: nothing in it is ever unpickled, nor allocated because it says so.

An archive's directory and the arrays' headers are read first. They must agree with each other and
with the file's own size: deflate, the one compression that NumPy writes, packs a thousandfold at
most.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.machine import refuse_larger_than_memory

__all__ = ["Arrays", "read_npz"]

KEYS = ("x_train", "y_train", "x_test", "y_test")
STATISTICS = ("mean", "std")

# 1032 : 1 is deflate's limit (zlib's technical notes); the rest is room for what is stored beside.
DENSEST, LARGEST_HEADER = 1040, 2**16
LONGEST_STATISTICS = 1000


@dataclass(frozen=True, eq=False)
class Arrays:
    """What a file holds: its examples by key, and where it has them ``mean`` and ``std``."""

    examples: Mapping[str, npt.NDArray[Any]]
    mean: list[float] | None
    std: list[float] | None


def read_npz(path: Path) -> Arrays:
    """Arrays of an ``.npz``.

    Raises
    ------
    FedsimError
        If the file cannot be read, is no ``.npz``, lacks a key, holds Python objects, claims
        more than it can hold, or is larger than memory.
    """
    try:
        with path.open("rb") as file:
            start = file.read(6)
        if start == b"\x93NUMPY":
            raise FedsimError(f"{path} holds one array; it must be an .npz with {_wanted()}.")
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            missing = [key for key in KEYS if key not in names]
            if missing:
                raise FedsimError(
                    f"{path} lacks {', '.join(missing)} and holds {_shortened(names)}; it must "
                    f"hold {_wanted()}."
                )
            wanted = [key for key in (*KEYS, *STATISTICS) if key in names]
            claimed = sum(_claimed(archive, key) for key in wanted)
        refuse_larger_than_memory(claimed, f"{path}")
        with np.load(path, allow_pickle=False) as arrays:
            return Arrays(
                {key: arrays[key] for key in KEYS},
                *(_numbers(arrays[key]) if key in wanted else None for key in STATISTICS),
            )
    except FedsimError:
        raise
    except Exception as error:
        # Whatever a parser of somebody else's bytes may raise.
        raise FedsimError(
            f"{path} could not be read ({str(error).rstrip('.')[:200]}); it must be an .npz of "
            f"plain arrays with {_wanted()}."
        ) from error


def _claimed(archive: zipfile.ZipFile, key: str) -> int:
    """Bytes of an array by its header, after holding that against the archive."""
    entry = archive.getinfo(f"{key}.npy")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{key} is packed by another method than deflate")
    if entry.file_size > DENSEST * entry.compress_size + LARGEST_HEADER:
        raise ValueError(f"{key} claims more bytes than its {entry.compress_size} can hold")
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            raise ValueError(f"{key} is in version {version} of NumPy's format")
        shape, _, dtype = read(file)
        header = file.tell()
    if dtype.hasobject:
        raise ValueError(f"{key} holds Python objects")
    if any(length < 0 for length in shape):
        raise ValueError(f"{key} has the shape {shape}")
    if header + math.prod(shape) * dtype.itemsize != entry.file_size:
        raise ValueError(f"{key} has a header that does not fit its {entry.file_size} bytes")
    if key in STATISTICS and math.prod(shape) > LONGEST_STATISTICS:
        raise ValueError(f"{key} has the shape {shape}, and not one number a channel")
    return entry.file_size


def _numbers(array: npt.NDArray[Any]) -> list[float]:
    return [float(value) for value in array.ravel()]


def _wanted() -> str:
    return f"{', '.join(KEYS[:-1])} and {KEYS[-1]}"


def _shortened(names: list[str]) -> str:
    shown = ", ".join(names[:10])
    return f"{shown[:300]}, ..." if len(names) > 10 or len(shown) > 300 else shown or "none"
