"""Data sets of the `datasets` package (and so of Flower Datasets), from local files.

Needs the extra ``flwr-datasets``, which is imported when it is used: that takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim import regular_files
from fedsim.datasets.arrays import Arrays
from fedsim.errors import FedsimError

__all__ = ["arrays_of", "is_saved", "read_saved"]

SPLITS = ("train", "test")


def is_saved(path: Path) -> bool:
    """Whether `datasets.DatasetDict.save_to_disk` has written this folder."""
    return (path / "dataset_dict.json").is_file()


def read_saved(path: Path, columns: str) -> Arrays:
    """Arrays of a folder that `save_to_disk` has written, with the splits train and test.

    Raises
    ------
    FedsimError
        If the package is not installed, the folder is damaged, or a column is none of arrays.
    """
    try:
        import datasets
    except ImportError:
        raise FedsimError(
            f"{path} was saved by datasets, which is not installed; "
            "pip install 'fedsim[flwr-datasets]' has it."
        ) from None
    try:
        saved = datasets.load_from_disk(str(regular_files.require_all(path)))
    except Exception as error:
        cause = str(error).strip().replace("\n", " ").rstrip(".")[:200]
        raise FedsimError(
            f"{path} could not be read ({cause}); it must be a folder that datasets has saved."
        ) from error
    return arrays_of(saved, columns, str(path))


def arrays_of(splits: Mapping[str, Any], columns: str, where: str = "the data set") -> Arrays:
    """Arrays of a `datasets.DatasetDict` with the splits train and test.

    Parameters
    ----------
    splits : mapping of name to `datasets.Dataset`
    columns : str
        ``"x=image,y=label,owner=writer"``: what each array is called there.

    Raises
    ------
    FedsimError
        If a split or a column lacks, or is no array of numbers.
    """
    names = _names(columns)
    missing = [split for split in SPLITS if split not in splits]
    if missing:
        raise FedsimError(
            f"{where} has the splits {', '.join(splits)}; it must have {' and '.join(SPLITS)}."
        )
    arrays = [
        {ours: _array(splits[split], split, theirs, where) for ours, theirs in names.items()}
        for split in SPLITS
    ]
    return Arrays(arrays[0], arrays[1])


def _names(columns: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in columns.split(",")]
    names = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
    if not {"x", "y"} <= names.keys() or not all(names) or not all(names.values()):
        raise FedsimError(
            f"data.columns is '{columns}'; it must say which columns are inputs and targets, such "
            "as 'x=image,y=label,owner=writer'."
        )
    return names


def _array(split: Any, which: str, column: str, where: str) -> npt.NDArray[Any]:
    if column not in split.column_names:
        raise FedsimError(
            f"{where} has no column '{column}' in its split {which}, but "
            f"{', '.join(split.column_names)}; name another in data.columns."
        )
    try:
        array = np.asarray(split.with_format("numpy")[column][:])
    except (ValueError, TypeError):
        array = np.asarray(None)
    if array.dtype.hasobject and all(isinstance(value, str) for value in array.ravel()):
        return array.astype(np.str_)
    if array.dtype.hasobject:
        raise FedsimError(
            f"{where} has a column '{column}' that makes no array; its values must be numbers, "
            "strings, or images or lists of one shape (pad sequences, and say what counts by a "
            "mask)."
        )
    return array
