"""Reading an ``.npz``: nothing in it is ever unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError

__all__ = ["Arrays", "read_npz"]

KEYS = ("x_train", "y_train", "x_test", "y_test")


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
        If the file cannot be read, is no ``.npz``, lacks a key or holds Python objects.
    """
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise FedsimError(f"{path} holds one array; it must be an .npz with {_wanted()}.")
        with file:
            missing = [key for key in KEYS if key not in file.files]
            if missing:
                raise FedsimError(
                    f"{path} lacks {', '.join(missing)} and holds {', '.join(file.files) or 'none'}"
                    f"; it must hold {_wanted()}."
                )
            return Arrays(
                {key: file[key] for key in KEYS},
                *(_numbers(file[key]) if key in file.files else None for key in ("mean", "std")),
            )
    except FedsimError:
        raise
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise FedsimError(
            f"{path} could not be read ({str(error).rstrip('.')}); it must be an .npz of plain "
            f"arrays with {_wanted()}."
        ) from error


def _numbers(array: npt.NDArray[Any]) -> list[float]:
    return [float(value) for value in array.ravel()]


def _wanted() -> str:
    return f"{', '.join(KEYS[:-1])} and {KEYS[-1]}"
