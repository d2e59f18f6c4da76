"""Data of one's own: an ``.npz``, a folder of ``.npy`` files, or what `datasets` has saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fedsim import registry
from fedsim.datasets.arrays import Arrays, read_folder, read_npz
from fedsim.datasets.checks import Layout
from fedsim.datasets.dataset import Dataset
from fedsim.datasets.hugging_face import is_saved, read_saved
from fedsim.errors import FedsimError
from fedsim.registry import register
from fedsim.settings import Doc, Ge

__all__ = ["Files"]

_OWN = "a path to an .npz, or to a folder of .npy files or one that datasets has saved"


@register("data", "files")
@dataclass(frozen=True)
class Files:
    """Files of one's own; ``data.name`` is their path, as it stands or in ``data.dir``.

    They hold ``x_train, y_train, x_test, y_test`` (see `Dataset.of`), and where they have them
    ``mask_train`` and ``mask_test``, columns such as ``owner_train`` and ``owner_test``, ``mean``
    and ``std`` for normalising, and the numbers ``classes`` and ``vocabulary``.
    """

    path: str = "files"
    classes: Annotated[
        int,
        Ge(0),
        Doc("How many classes there are; 0 for what the file says, or as occur."),
    ] = 0
    vocabulary: Annotated[
        int, Ge(0), Doc("How many tokens there are; 0 for what the file says, or as many as occur.")
    ] = 0
    layout: Annotated[
        Layout,
        Doc("'as-is' where arrays only look like images with channels last."),
    ] = "auto"
    columns: Annotated[
        str,
        Doc("Of what datasets has saved: inputs, targets and others, as in 'x=image,y=label'."),
    ] = ""

    def __call__(self, directory: Path, normalize: bool, protected: bool = False) -> Dataset:
        """Read them, or map them where they are ``.npy`` files; parameters as of `load`.

        Raises
        ------
        FedsimError
            If they are missing or not usable.
        """
        path = _found(self.path, directory)
        arrays = _read(path, self.columns)
        if normalize and arrays.mean is None:
            raise FedsimError(
                f"data.normalize is true, but {path} has no mean and std for each channel; "
                "leave it false, or put them into an .npz of your own."
            )
        return Dataset.of(
            self.path,
            arrays.train,
            arrays.test,
            mean=arrays.mean if normalize else None,
            std=arrays.std if normalize else None,
            classes=self.classes or arrays.classes,
            vocabulary=self.vocabulary or arrays.vocabulary,
            layout=self.layout,
            source=str(path),
            protected=protected,
        )


def _found(name: str, folder: Path) -> Path:
    """Where data of one's own are."""
    for path in (Path(name), folder / name):
        if path.is_dir() or (path.is_file() and name.endswith(".npz")):
            return path
    if not name.endswith(".npz") and "/" not in name:
        known = ", ".join(known for known in registry.names("data") if known != "files")
        raise FedsimError(f"data.name is '{name}'; it must be one of {known}, or {_OWN}.")
    raise FedsimError(
        f"data.name is '{name}', but there is no such file here or in '{folder}' (data.dir); it "
        f"must be {_OWN}."
    )


def _read(path: Path, columns: str) -> Arrays:
    if path.is_dir() and is_saved(path):
        return read_saved(path, columns)
    if columns:
        raise FedsimError(
            f"data.columns is '{columns}', but {path} is not what datasets saves; arrays are known "
            "by their own names (x_train, y_train, owner_train)."
        )
    return read_folder(path) if path.is_dir() else read_npz(path)
