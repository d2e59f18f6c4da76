"""A data set by its name, or from files of the user's own."""

from __future__ import annotations

from pathlib import Path

from fedsim.datasets.arrays import Arrays, read_folder, read_npz
from fedsim.datasets.checks import Layout
from fedsim.datasets.dataset import Dataset
from fedsim.datasets.digits import read_digits
from fedsim.datasets.hugging_face import is_saved, read_saved
from fedsim.datasets.vision import STATISTICS, read_torchvision
from fedsim.errors import FedsimError

__all__ = ["NAMES", "load"]

NAMES = ("digits", *STATISTICS)
"""Data sets that have a name; anything else is a path to an ``.npz`` or to a folder."""

_OWN = "a path to an .npz, or to a folder of .npy files or one that datasets has saved"


def load(
    name: str,
    *,
    directory: str | Path = "",
    download: bool = False,
    normalize: bool = False,
    train: str = "",
    test: str = "",
    classes: int = 0,
    vocabulary: int = 0,
    layout: Layout = "auto",
    columns: str = "",
) -> Dataset:
    """Load a data set: into memory, or mapped where it is a folder of ``.npy`` files.

    Parameters
    ----------
    name : str
        ``digits`` (comes with fedsim), ``mnist``, ``fashion-mnist``, ``cifar10``,
        ``cifar100``; or a path to an ``.npz``, or to a folder of ``.npy`` files, that holds
        ``x_train, y_train, x_test, y_test`` (see `Dataset.of`), and where it has them
        ``mask_train`` and ``mask_test``, columns such as ``owner_train`` and ``owner_test``,
        ``mean`` and ``std`` for normalising, and the numbers ``classes`` and ``vocabulary``; or a
        path to a folder that `datasets.DatasetDict.save_to_disk` has written.
    directory : path
        Where data sets are kept; ``data`` when empty. A named one is read from
        ``<name>.npz`` there (``fashion_mnist.npz`` counts too), or else from torchvision's own
        files. A path that does not exist as it stands is looked for there too.
    download : bool
        Whether torchvision may fetch what is missing.
    normalize : bool
        Whether batches are normalised per channel or feature. The numbers are the usual published
        ones for a named data set, and the file's own for files of one's own: none are computed
        here, since statistics of the training data would be a release of their own.
    train, test : str
        Which examples there are, as ``start:stop`` of the file's order; either may be
        left out. ``"10000:"`` is all but the first 10,000, say because those are public.
    classes, vocabulary : int
        How many classes or tokens there are, in place of what the file declares; 0 for that, or for
        as many as occur.
    layout : "auto" or "as-is"
        See `Dataset.of`.
    columns : str
        Of a folder saved by `datasets`: which of its columns are inputs, targets and others, as in
        ``"x=image,y=label,owner=writer"``.

    Raises
    ------
    FedsimError
        If there is no such data set, its files are missing or not usable, or it has no such
        examples.

    Examples
    --------
    >>> load("digits").train.x.shape
    torch.Size([1437, 64])
    """
    folder = Path(directory or "data")
    if name in NAMES:
        dataset = _named(name, folder, download, normalize)
        if classes or vocabulary or layout != "auto":
            raise FedsimError(
                f"data.name is '{name}', whose classes and layout are known; data.classes, "
                "data.vocabulary and data.layout belong to data of one's own."
            )
    else:
        path = _found(name, folder)
        arrays = _read(path, columns)
        _require_statistics(normalize, str(path), available=arrays.mean is not None)
        dataset = Dataset.of(
            name,
            arrays.train,
            arrays.test,
            mean=arrays.mean if normalize else None,
            std=arrays.std if normalize else None,
            classes=classes or arrays.classes,
            vocabulary=vocabulary or arrays.vocabulary,
            layout=layout,
            source=str(path),
        )
    return dataset.ranged(train, test) if train or test else dataset


def _named(name: str, folder: Path, download: bool, normalize: bool) -> Dataset:
    """One of the data sets that everybody knows."""
    if name == "digits":
        _require_statistics(normalize, name, available=False)
        return read_digits()
    mean, std = STATISTICS[name] if normalize else (None, None)
    classes = 100 if name == "cifar100" else 10
    for path in (folder / f"{name}.npz", folder / f"{name.replace('-', '_')}.npz"):
        if path.is_file():
            arrays = read_npz(path)
            examples, source = (arrays.train, arrays.test), str(path)
            break
    else:
        examples = read_torchvision(name, folder, download)
        source = f"torchvision, {folder}"
    return Dataset.of(name, *examples, mean=mean, std=std, classes=classes, source=source)


def _found(name: str, folder: Path) -> Path:
    """Where data of one's own are."""
    for path in (Path(name), folder / name):
        if path.is_dir() or (path.is_file() and name.endswith(".npz")):
            return path
    if not name.endswith(".npz") and "/" not in name:
        known = ", ".join(NAMES)
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


def _require_statistics(normalize: bool, where: str, *, available: bool) -> None:
    if normalize and not available:
        raise FedsimError(
            f"data.normalize is true, but {where} has no mean and std for each channel; "
            "leave it false, or put them into an .npz of your own."
        )
