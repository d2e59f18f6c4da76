"""Load a data set by name, from a user's own files, or from objects in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim import registry
from fedsim.arguments import check_arguments
from fedsim.datasets.arrays import (
    DECLARED,
    KEYS,
    SPLITS,
    STATISTICS,
    Arrays,
    cause,
    is_single,
    missing_keys,
)
from fedsim.datasets.dataset import Dataset
from fedsim.datasets.hugging_face import PREFIX
from fedsim.datasets.tables import arrays_of_tables, inputs_of_table, read_csv
from fedsim.errors import FedsimError
from fedsim.keywords import accepted, arguments_of, complete_arguments
from fedsim.lazy import torch


def kind_of(name: str) -> str:
    """Registered kind of a data set's name; any name that is not registered is of files."""
    own = ":" in name and not name.startswith(PREFIX)
    return name if own or name in registry.names("data") else "files"


@check_arguments
def load(
    name: str,
    *,
    directory: str | Path = "",
    download: bool = False,
    normalize: bool = False,
    train: str = "",
    test: str = "",
    protected: bool = False,
    **settings: Any,
) -> Dataset:
    """Load a data set into memory, or memory-map it if it is a folder of ``.npy`` files.

    Parameters
    ----------
    name : str
        One of ``fedsim config list data``, a path to a user's own files or ``hf:owner/name``
        (`Files`), or
        ``module:name``: a callable that takes ``settings`` and any of ``directory``, ``download``,
        ``normalize`` and ``protected``, and returns a `Dataset` (or a callable that takes the
        latter and returns one).
    directory : path
        Folder of data sets; ``data`` when empty. A named data set is read from ``<name>.npz``
        there (``fashion_mnist.npz`` is accepted too), or else from torchvision's own files. A
        path of a user's own that does not exist is looked up there too.
    download : bool
        Whether torchvision may download missing files.
    normalize : bool
        Whether batches are normalised per channel or feature: with the usual published statistics
        for a named data set, with the file's own ones for a user's files. For arrays none are
        computed here, since statistics of the training data would be a release of their own.
    train, test : str
        Range of examples to use, as ``start:stop`` in the file's order; either end may be
        left out. ``"10000:"`` is all but the first 10,000, say because those are public.
    protected : bool
        Whether a run protects the examples' persons. Then one bad example does not make the whole
        data set refused, and no message contains a value: a number that is not finite makes its
        client's update not finite, so that only this client fails, and so does a client with a
        label or token out of range. At example level the gradient of such an example counts as
        zero. Such a test example is left out of metrics, or its client fails in an evaluation.
        Properties that the test examples show are not taken from training examples.
    settings
        Settings of the data set itself; see `Files`.

    Raises
    ------
    FedsimError
        If there is no such data set, its files are missing or not usable, or a range is not within
        it. Exceptions of the user's own code are passed on unchanged.

    Examples
    --------
    >>> load("digits").train.x.shape
    torch.Size([1437, 64])
    """
    offered = {
        "directory": Path(directory or "data"),
        "download": download,
        "normalize": normalize,
        "protected": protected,
    }
    kind = kind_of(name)
    construction = {**offered, "path": name} if kind == "files" else offered
    with registry.current_directory_importable():
        factory: Any = registry.find("data", kind, "data.name")
        has_settings = dataclasses.is_dataclass(factory) and ":" not in kind
        table = "data" if has_settings else "data.options"
        arguments = arguments_of(factory, name, settings, table, tuple(construction))
        dataset = factory(**arguments, **accepted(factory, construction))
        if not isinstance(dataset, Dataset) and callable(dataset):
            dataset = dataset(**complete_arguments(dataset, name, offered))
    if not isinstance(dataset, Dataset):
        raise FedsimError(
            f"data.name is '{name}', which gives {type(dataset).__name__}; it must give a "
            "fedsim.datasets.Dataset."
        )
    dataset = dataset.ranged(train, test)
    if train or test or ":" in kind or name in registry.plugins("data"):
        dataset = dataset.checked(protected=protected)
    return dataset


_WANTED = (
    "a fedsim.datasets.Dataset, a dict of arrays (x_train, y_train, x_test, y_test), a pair of "
    "(x, y) or of torch data sets for training and testing, or what fedsim.datasets.from_table "
    "makes of data frames"
)


@check_arguments
def dataset_of(data: object, *, protected: bool = False) -> Dataset:
    """Data set of an object that a user passes as ``data=``.

    Parameters
    ----------
    data : Dataset, mapping or pair
        A mapping holds arrays or tensors under the names used in files (``x_train``,
        ``owner_test``, ``classes``, ...), or the keys ``train`` and ``test``, each a mapping
        (``x``, ``y``, ...) or one of the following. A pair is (train, test), each ``(x, y)`` or a
        torch data set with a length whose items are ``(x, y)``, all of one shape. ``x`` may be a
        mapping everywhere, for a model with several inputs by name. Items of torch
        data sets keep their dimensions (channels first), but for PIL's images, whose channels are
        last and are moved; arrays are laid out as in files.
    protected : bool
        Whether a run protects the examples' persons; see `load`.

    Raises
    ------
    FedsimError
        If it is none of these, or its arrays are not a valid data set.
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, Mapping) and {"train", "test"} != data.keys():
        data = _by_flat_name(data)
        if missing := missing_keys(data):
            raise FedsimError(
                f"data= lacks {', '.join(missing)}; a dict of arrays must have {', '.join(KEYS)} "
                "(columns of a table go through fedsim.datasets.from_table)."
            )
        for name in map(str, data):
            if not name.endswith(("_train", "_test")) and not is_single(name):
                raise FedsimError(
                    f"data= has '{name}'; a name must end in _train or _test, or be one of "
                    f"{', '.join((*STATISTICS, *DECLARED))}."
                )
        by_name = {str(name): array_of(f"{name} of data=", one) for name, one in data.items()}
        try:
            arrays = Arrays.from_named_arrays(by_name)
        except (TypeError, ValueError, OverflowError) as error:
            raise FedsimError(
                f"data= could not be read ({cause(error)}); {' and '.join(DECLARED)} must be one "
                f"number each, and {' and '.join(STATISTICS)} numbers."
            ) from None
        return arrays.dataset("data", protected=protected)
    if isinstance(data, Mapping):
        data = (data["train"], data["test"])
    if not (isinstance(data, Sequence) and len(data) == 2) or isinstance(data, str):
        raise FedsimError(f"data= is of type {type(data).__name__}; it must be {_WANTED}.")
    as_tensors = any(isinstance(split, torch.utils.data.Dataset) for split in data)
    train, test = (_split(split) for split in data)
    return Dataset.from_arrays(
        "data", train, test, layout="as-is" if as_tensors else "auto", protected=protected
    )


@check_arguments
def from_table(
    train: Any,
    test: Any = None,
    *,
    columns: str,
    types: str = "",
    normalize: bool = False,
    protected: bool = False,
    name: str = "table",
) -> Dataset:
    """Data set of one or two tables: pandas data frames, or mappings of names to columns.

    Parameters
    ----------
    train, test : mapping of name to column
        Without ``test``, every fifth row of ``train`` is a test example.
    columns, types : str
        As in ``data.columns`` and ``data.types``: ``"y=income,owner=hospital"`` and
        ``"age=0:100,sex=female|male"``. A private run requires that each column's type is declared.
    normalize : bool
        Whether numbers without a declared range are normalised by mean and standard deviation of
        the training rows; a private run refuses that.
    protected : bool
        Whether the data set is for a private run: as there, a value that is not of its column's
        type makes only its own example unusable; see `load`.
    name : str
        Name of the data set, also in error messages.

    Raises
    ------
    FedsimError
        If a column is missing or, unless ``protected``, has a value that is not of its type.

    Examples
    --------
    >>> people = {"age": [20, 30, 40, 50, 60], "sex": list("fmfmf"), "ill": [0, 0, 1, 1, 1]}
    >>> from_table(people, columns="y=ill", types="age=0:100,sex=f|m,ill=0|1").train.x.shape
    torch.Size([4, 3])
    """
    tests = None if test is None else _table(test)
    arrays = arrays_of_tables(_table(train), tests, columns, types, normalize, protected, name)
    return arrays.dataset(name, protected=protected)


def _table(frame: Any) -> dict[str, Sequence[Any]]:
    try:
        keys = frame.keys()  # an array has none, and iterating over it gives rows
        names, table = [*map(str, keys)], {str(key): _column(frame[key]) for key in keys}
    except (AttributeError, TypeError, KeyError, IndexError, ValueError, RuntimeError):
        raise FedsimError(
            f"a table is of type {type(frame).__name__}; it must be a data frame, or a mapping of "
            "names to columns."
        ) from None
    if len(table) < len(names):
        raise FedsimError(
            f"a table has the columns {', '.join(names)}; each needs a different name."
        )
    lengths = {name: len(c) if isinstance(c, list) else None for name, c in table.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise FedsimError(f"a table has columns of the lengths {lengths}; they must be equal.")
    return table


def _column(values: Any) -> Any:
    # Of a list with texts numpy would turn a NaN into "nan", which is not missing, and make every
    # entry as wide as the longest.
    texts = isinstance(values, list | tuple) and any(isinstance(value, str) for value in values)
    array = np.asarray(values, dtype=object if texts else None)
    if array.dtype.kind in "mM":  # tolist() turns nanosecond times into integers
        array = array.astype(str)
    return array.tolist()


def _split(split: Any) -> dict[str, npt.NDArray[Any]]:
    """Arrays of one split, by name: ``x``, ``y``, and others of a mapping."""
    if isinstance(split, torch.utils.data.Dataset):
        return _of_torch(split)
    if isinstance(split, tuple | list) and len(split) == 2:
        split = {"x": split[0], "y": split[1]}
    if isinstance(split, Mapping):
        flat = _by_flat_name(split)
        return {str(name): array_of(f"{name} of data=", value) for name, value in flat.items()}
    raise FedsimError(f"a part of data= is of type {type(split).__name__}; it must be {_WANTED}.")


def _of_torch(dataset: Any) -> dict[str, npt.NDArray[Any]]:
    """All items of a torch data set, stacked into ``x`` and ``y``."""
    try:
        items = [dataset[position] for position in range(len(dataset))]
    except TypeError:
        raise FedsimError(
            f"{type(dataset).__name__} has no length or no items by position; data= takes torch "
            "data sets that have both."
        ) from None
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise FedsimError(
            f"{type(dataset).__name__} has items that are not pairs; each must be (x, y)."
        )
    flat = [_by_flat_name({"x": x, "y": y}) for x, y in items]
    names = {name: f"{name} of data=" for one in flat for name in one}
    if any(names.keys() != one.keys() for one in flat):
        raise FedsimError(
            f"{type(dataset).__name__} has items with inputs of different names; all must have "
            "the same."
        )
    return {
        key: array_of(name, [array_of(name, one[key]) for one in flat])
        for key, name in names.items()
    }


def _by_flat_name(arrays: Mapping[Any, Any]) -> dict[Any, Any]:
    """Arrays by their names in files, of which ``x`` may be a mapping: ``x_NAME_train``."""
    flat: dict[Any, Any] = {}
    for name, value in arrays.items():
        end = next((f"_{split}" for split in SPLITS if name == f"x_{split}"), "")
        if isinstance(value, Mapping) and (end or name == "x"):
            flat |= {f"x_{own}{end}": one for own, one in value.items()}
        else:
            flat[name] = value
    return flat


def inputs_of(name: str, value: Any, features: Sequence[str]) -> npt.NDArray[Any]:
    """Array of a model's inputs, from an array or, if its data set has ``features``, a table.

    Parameters
    ----------
    name : str
        Name of the inputs in error messages.
    value : array, tensor, nested lists, data frame, mapping of name to column, or path
        The path is that of a CSV file. Columns that are not inputs are ignored.
    features : sequence of str
        Names of the inputs, in order; empty if they have none.

    Raises
    ------
    FedsimError
        If it cannot be converted, or is a table while ``features`` is empty.
    """
    is_path = isinstance(value, str | PathLike)
    if not (is_path or isinstance(value, Mapping) or hasattr(value, "columns")):
        return array_of(name, value)
    if not features:
        raise FedsimError(
            f"{name} are of type {type(value).__name__}, and the model was trained on arrays, not "
            "on a table; they must be an array, such as frame.to_numpy()."
        )
    table = read_csv(Path(value)) if is_path else _table(value)
    return inputs_of_table(table, features, str(value) if is_path else "the table")


def array_of(name: str, value: Any) -> npt.NDArray[Any]:
    """Convert an array, a tensor or nested lists to a NumPy array.

    Raises
    ------
    FedsimError
        If NumPy cannot convert it, for example lists of different lengths, or if values are masked.
    """
    if np.ma.is_masked(value):
        raise FedsimError(
            f"{name} is a masked array, of which values are masked; fill them in, or leave those "
            "examples out."
        )
    try:
        if isinstance(value, torch.Tensor):
            return value.detach().cpu().numpy()
        array = np.asarray(value)
        is_texts = array.dtype.kind == "U" and isinstance(value, list | tuple)
        if is_texts and any(isinstance(item, float) and math.isnan(item) for item in value):
            raise ValueError("it has a NaN among texts")
        return array
    except (TypeError, ValueError, RuntimeError) as error:  # torch's, of a tensor without data
        raise FedsimError(
            f"{name} cannot be made an array ({str(error).splitlines()[0]}); give an array, or "
            "lists of equal lengths."
        ) from None
