"""A user's own files: arrays (``.npz``, ``.npy``), tables (CSV), or data sets of Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fedsim import registry
from fedsim.datasets.array_checks import AxisOrder
from fedsim.datasets.arrays import DECLARED, STATISTICS, Arrays, read_folder, read_npz
from fedsim.datasets.dataset import Dataset
from fedsim.datasets.hugging_face import (
    PREFIX,
    has_parquet,
    hub_folder,
    is_saved,
    missing_on_hub,
    read_columns,
    read_parquet,
    read_saved,
)
from fedsim.datasets.tables import is_table, read_table, read_tables
from fedsim.datasets.texts import arrays_of_texts, text_roles
from fedsim.errors import FedsimError
from fedsim.registry import register
from fedsim.settings import Ge, NamesPath
from fedsim.synonyms import closest

_SUFFIXES = (".npz", ".csv")
_OWN_FILES = (
    "a path to an .npz or a .csv, or to a folder of .npy files, of train.csv and test.csv, of "
    "parquet files, or one that datasets has saved"
)


@register("data", "files")
@dataclass(frozen=True)
class Files:
    """A user's own files; ``data.name`` is their path, absolute, relative, or within ``data.dir``.

    They hold ``x_train, y_train, x_test, y_test`` (see `Dataset.from_arrays`; for a model of
    several inputs ``x_NAME_train`` and ``x_NAME_test`` for each) and optionally
    ``mask_train`` and ``mask_test``, columns such as ``owner_train`` and ``owner_test``, ``mean``
    and ``std`` for normalising, and the numbers ``classes`` and ``vocabulary``. Tables (a ``.csv``,
    or a folder of ``train.csv`` and ``test.csv``) are converted to such arrays; see `tables`.
    ``hf:owner/name`` is what the Hugging Face Hub has under this name, read from
    ``data.dir/owner/name``; see `hugging_face`.
    """

    path: str = "files"
    classes: Annotated[int, Ge(0)] = 0
    """The number of classes; 0 for what the file says, or the classes that occur."""
    vocabulary: Annotated[int, Ge(0)] = 0
    """The number of tokens in the vocabulary; 0 for what the file says, or the tokens that
    occur."""
    layout: AxisOrder = "auto"
    """The layout of arrays: 'auto' takes arrays that look like images with channels last for such;
    'as-is' takes them as they are."""
    columns: str = ""
    """Which columns of a table, or of a data set of Hugging Face, are inputs, targets and others:
    'y=income,owner=hospital,x=age+sex' or 'x=image,y=label'. Several targets of a table are
    'y=days+died'. Of Hugging Face,
    'x=input_ids+attention_mask' are several inputs by name."""
    types: str = ""
    """The types of a table's columns: a range, which is scaled to [0, 1], categories, or numbers
    that are not scaled: 'age=0:100,sex=female|male,height=number'. A comma or a bar
    within a category has a backslash before it. With `tokenizer`, the number of tokens in a
    sequence: 'body=tokens:128'."""
    tokenizer: Annotated[str, NamesPath()] = ""
    """A local folder of a tokenizer of transformers, by which a column of texts
    (data.columns = 'x=body,owner=author') becomes sequences of tokens; the target of each token is
    the next one."""

    def __call__(self, directory: Path, normalize: bool, protected: bool = False) -> Dataset:
        """Read the files, or memory-map them if they are ``.npy``; see `load` for parameters.

        Raises
        ------
        FedsimError
            If they are missing or not usable.
        """
        path = _data_path(self.path, directory)
        arrays = (self._texts if self.tokenizer else self._read)(path, normalize, protected)
        if normalize and arrays.mean is None:
            raise FedsimError(
                f"data.normalize is true, but {path} has no mean and std for each channel; "
                "leave it false, or put them into an .npz of your own."
            )
        declared = {key: getattr(self, key) for key in DECLARED if getattr(self, key)}
        if not normalize:  # overrides the file's own statistics with None
            declared |= dict.fromkeys(STATISTICS)
        return arrays.dataset(
            self.path, layout=self.layout, source=str(path), protected=protected, **declared
        )

    def _read(self, path: Path, normalize: bool, protected: bool) -> Arrays:
        if is_table(path):
            return read_table(path, self.columns, self.types, normalize, protected)
        if self.types:
            raise FedsimError(
                f"data.types is '{self.types}', but {path} is not a table; it must be left out."
            )
        if is_saved(path):
            return read_saved(path, self.columns)
        if has_parquet(path):
            return read_parquet(path, self.columns)
        if self.columns:
            raise FedsimError(
                f"data.columns is '{self.columns}', but {path} is no table and no data set of "
                "Hugging Face; arrays are known by their own names (x_train, y_train, owner_train)."
            )
        return read_folder(path) if path.is_dir() else read_npz(path)

    def _texts(self, path: Path, normalize: bool, protected: bool) -> Arrays:
        roles = text_roles(self.columns, str(path))
        if is_table(path):
            train, test = read_tables(path, protected)
        elif is_saved(path) or has_parquet(path):
            train, test = read_columns(path, [*roles.values()])
        else:
            raise FedsimError(
                f"data.tokenizer is '{self.tokenizer}', but {path} has no column of texts; it must "
                "be a table, or a data set of Hugging Face."
            )
        return arrays_of_texts(train, test, roles, self.types, self.tokenizer, protected, str(path))


def data_files(name: str, folder: Path) -> set[tuple[int, int]]:
    """Device and inode of each file of a user's own data; none if there are no such data.

    ``name`` and ``folder`` as in `Files`: of a folder it is all files in it. Links are followed, so
    that a file is the same under all its names; a copy is another file.
    """
    if (path := _existing(name, folder)) is None:
        return set()
    files = (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else (path,)
    return {(status.st_dev, status.st_ino) for status in (file.stat() for file in files)}


def _existing(name: str, folder: Path) -> Path | None:
    """Path of a user's own data, as written or else within ``folder``; None if there are none."""
    if name.startswith(PREFIX):
        path = hub_folder(name, folder)
        return path if path.is_dir() else None
    is_file_name = Path(name).suffix.lower() in _SUFFIXES
    for path in (Path(name), folder / name):
        if name and (path.is_dir() or (path.is_file() and is_file_name)):
            return path
    return None


def _data_path(name: str, folder: Path) -> Path:
    """Path of a user's own data: as written, or else within ``folder``."""
    if (path := _existing(name, folder)) is not None:
        return path
    if name.startswith(PREFIX):
        raise missing_on_hub(name, folder)
    if Path(name).suffix.lower() in (".xlsx", ".xls", ".ods"):
        raise FedsimError(
            f"data.name is '{name}', a spreadsheet; it must be {_OWN_FILES}: save it as .csv."
        )
    is_file_name = Path(name).suffix.lower() in _SUFFIXES
    if not is_file_name and "/" not in name:
        known = [known for known in registry.names("data") if known != "files"]
        hint = closest("data", name, known)
        raise FedsimError(
            f"data.name is '{name}';{hint} must be one of {', '.join(known)}, or {_OWN_FILES}."
        )
    raise FedsimError(
        f"data.name is '{name}', but there are no such data here or in '{folder}' (data.dir); it "
        f"must be {_OWN_FILES}."
    )
