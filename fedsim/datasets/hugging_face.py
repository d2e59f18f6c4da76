"""Data sets of Hugging Face: parquet files of the Hub, and folders that `datasets` has saved.

``data.columns`` says which of their columns are inputs, targets and others. The Hub has parquet
files of nearly every data set, if not as its own files, then in the branch refs/convert/parquet;
those of Flower Datasets are among them. A file belongs to the split that its path names. Without
test files every fifth example is one, as of tables.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim import optional_packages, regular_files
from fedsim.datasets.array_checks import is_texts
from fedsim.datasets.arrays import SPLITS, Arrays, cause
from fedsim.datasets.tables import TEST_EVERY
from fedsim.errors import FedsimError

PREFIX = "hf:"
"""What stands before ``owner/name`` in `data.name`."""

_OTHER_SPLIT = re.compile(r"(^|[^a-z])(validation|valid|val|dev)([^a-z]|$)")


def hub_folder(name: str, directory: Path) -> Path:
    """Folder of ``hf:owner/name``: ``owner/name`` in the folder of data sets.

    Raises
    ------
    FedsimError
        If it is not such a name.
    """
    repository = name.removeprefix(PREFIX)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository, re.ASCII):
        raise FedsimError(
            f"data.name is '{name}'; it must be hf:owner/name, such as hf:flwrlabs/femnist, a data "
            "set of the Hugging Face Hub."
        )
    return directory / repository


def missing_on_hub(name: str, directory: Path) -> FedsimError:
    """The error for a data set of the Hub that is not there, with the command that fetches it."""
    folder, repository = hub_folder(name, directory), name.removeprefix(PREFIX)
    return FedsimError(
        f"data.name is '{name}', but there is no folder '{folder}'; fetch it: hf download "
        f"{repository} --repo-type dataset --revision refs/convert/parquet --local-dir "
        f"{shlex.quote(str(folder))}"
    )


def has_parquet(path: Path) -> bool:
    """Whether a folder has parquet files, at any depth."""
    return path.is_dir() and any(path.rglob("*.parquet"))


def read_parquet(path: Path, columns: str) -> Arrays:
    """Arrays of a folder of parquet files.

    Parameters
    ----------
    path : Path
    columns : str
        ``"x=image,y=label,owner=writer"``: the name of each array's column there.

    Raises
    ------
    FedsimError
        If pyarrow is not installed, a file is damaged, training files or a column are missing, or
        a column is no array of numbers, strings or images of one size.
    """
    optional_packages.require(f"{path}, a folder of parquet files,", "pyarrow")
    names, files = _names(columns), _files_of_splits(path)
    train, test = ({k: _column(files[s], s, v, path) for k, v in names.items()} for s in SPLITS)
    if files["test"]:
        return Arrays(train, test)
    is_test = np.arange(len(train["y"])) % TEST_EVERY == TEST_EVERY - 1
    return Arrays(
        {key: array[~is_test] for key, array in train.items()},
        {key: array[is_test] for key, array in train.items()},
    )


def _files_of_splits(path: Path) -> Mapping[str, list[Path]]:
    """Files of each split, by their paths; what names no split is for training.

    Raises
    ------
    FedsimError
        If they belong to several configurations of a data set, or there are none for training.
    """
    files: dict[str, list[Path]] = {"train": [], "test": []}
    configurations = set()
    for file in sorted(path.rglob("*.parquet")):
        name = file.relative_to(path).as_posix().lower().removesuffix(".parquet")
        if _OTHER_SPLIT.search(name):
            continue
        files["test" if re.search(r"(^|[^a-z])test([^a-z]|$)", name) else "train"].append(file)
        configurations.add(name.rpartition("/")[0].replace("train", "").replace("test", ""))
    if len(configurations) > 1 or not files["train"]:
        listed = sorted(str(file.relative_to(path)) for files in files.values() for file in files)
        raise FedsimError(
            f"{path} has {', '.join(listed[:4]) or 'no parquet files for training'}; it must have "
            "those of one configuration of a data set, with train in their paths, and test."
        )
    return files


def _column(files: list[Path], split: str, column: str, where: Path) -> npt.NDArray[Any]:
    """One column of a split's files."""
    import pyarrow as pa
    from pyarrow import parquet

    parts = []
    for file in files:
        try:
            with parquet.ParquetFile(regular_files.require(file)) as opened:
                known = opened.schema_arrow.names
                if column in known:
                    parts.append(opened.read([column])[column].combine_chunks())
        except MemoryError:
            raise
        except Exception as error:  # the file is untrusted: its parser may raise any type
            raise FedsimError(
                f"{file} could not be read ({cause(error)}); it must be a parquet file."
            ) from None
        if column not in known:
            raise _no_column(where, column, split, known)
    if not parts:
        return np.empty(0)
    try:
        return _array_of(pa.chunked_array(parts).combine_chunks())
    except (ValueError, TypeError, OSError, pa.ArrowException):
        raise _no_array(where, column) from None


def _array_of(values: Any) -> npt.NDArray[Any]:
    """NumPy's array of an Arrow array: numbers, texts, lists of one shape, or encoded images."""
    import pyarrow as pa

    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_struct(values.type):  # of the Hub's images: their bytes, and a path
        from PIL import Image

        images = (Image.open(io.BytesIO(each)) for each in values.field("bytes").to_pylist())
        return np.stack([np.asarray(image) for image in images])
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return np.array(values.fill_null("").to_pylist(), dtype=object)
    shape = [len(values)]
    while pa.types.is_nested(values.type):
        lengths = {*values.value_lengths().to_pylist()} if len(values) else {0}
        if len(lengths) > 1 or None in lengths:
            raise ValueError("lists of several lengths")
        shape.append(*lengths)
        values = values.flatten()
    return np.array(values.to_numpy(zero_copy_only=False)).reshape(shape)


def is_saved(path: Path) -> bool:
    """Whether `datasets.DatasetDict.save_to_disk` has written this path, a folder."""
    return (path / "dataset_dict.json").is_file()


def read_saved(path: Path, columns: str) -> Arrays:
    """Arrays of a folder that `save_to_disk` has written, with the splits train and test.

    Parameters
    ----------
    path : Path
    columns : str
        ``"x=image,y=label,owner=writer"``: the name of each array's column there.

    Raises
    ------
    FedsimError
        If the package is not installed, the folder is damaged, a split or a column is missing, or
        a column is no array of numbers or strings.
    """
    saved, names = _load_saved(path), _names(columns)
    train, test = (
        {ours: _array(saved[split], split, theirs, path) for ours, theirs in names.items()}
        for split in SPLITS
    )
    return Arrays(train, test)


def _load_saved(path: Path) -> Any:
    optional_packages.require(f"{path}, which the package datasets has saved,", "datasets")
    import datasets

    try:
        saved = datasets.load_from_disk(str(regular_files.require_all(path)))
    except Exception as error:
        raise FedsimError(
            f"{path} could not be read ({cause(error)}); it must be a folder that datasets has "
            "saved."
        ) from error
    if any(split not in saved for split in SPLITS):
        raise FedsimError(
            f"{path} has the splits {', '.join(saved)}; it must have {' and '.join(SPLITS)}."
        )
    return saved


def read_columns(path: Path, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Columns of the training and of the test examples, as they are; None without test files.

    Raises
    ------
    FedsimError
        As of `read_saved` and `read_parquet`.
    """
    if is_saved(path):
        saved = _load_saved(path)
        train, test = ({n: _array(saved[s], s, n, path) for n in names} for s in SPLITS)
        return train, test
    optional_packages.require(f"{path}, a folder of parquet files,", "pyarrow")
    files = _files_of_splits(path)
    train, test = ({n: _column(files[s], s, n, path) for n in names} for s in SPLITS)
    return train, test if files["test"] else None


def _names(columns: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in columns.split(",")]
    names = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
    complete = {"x", "y"} <= names.keys() and all((*names, *names.values()))
    if not complete or len(names) < len(pairs):
        raise FedsimError(
            f"data.columns is '{columns}'; it must say, each once, which columns are inputs and "
            "targets, such as 'x=image,y=label,owner=writer'."
        )
    if "+" in names["x"]:  # a model's several inputs, whose names are those of their columns
        names |= {f"x_{column.strip()}": column.strip() for column in names.pop("x").split("+")}
    return names


def _array(split: Any, which: str, column: str, where: Path) -> npt.NDArray[Any]:
    if column not in split.column_names:
        raise _no_column(where, column, which, split.column_names)
    try:
        array = np.asarray(split.with_format("numpy")[column][:])
    except (ValueError, TypeError):
        array = np.asarray(None)
    if array.dtype.hasobject and not is_texts(array):
        raise _no_array(where, column)
    return array


def _no_column(where: Path, column: str, split: str, known: Sequence[str]) -> FedsimError:
    return FedsimError(
        f"{where} has no column '{column}' in its split {split}, but {', '.join(known)}; name "
        "another in data.columns."
    )


def _no_array(where: Path, column: str) -> FedsimError:
    return FedsimError(
        f"{where} has a column '{column}' that cannot become an array; its values must be numbers, "
        "strings, or images or lists of one shape (pad sequences, and mark what counts by a mask)."
    )
