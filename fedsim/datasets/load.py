"""A data set by its name, or from a file of the user's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedsim.datasets.arrays import read_npz
from fedsim.datasets.dataset import Dataset
from fedsim.datasets.digits import read_digits
from fedsim.datasets.vision import STATISTICS, read_torchvision
from fedsim.errors import FedsimError

__all__ = ["NAMES", "load"]

NAMES = ("digits", *STATISTICS)
"""Data sets that have a name; anything else is a path to an ``.npz``."""


def load(
    name: str,
    *,
    directory: str | Path = "",
    download: bool = False,
    normalize: bool = False,
    train: str = "",
) -> Dataset:
    """Load a data set into memory.

    Parameters
    ----------
    name : str
        ``digits`` (comes with fedsim), ``mnist``, ``fashion-mnist``, ``cifar10``,
        ``cifar100``, or a path to an ``.npz`` that holds ``x_train, y_train, x_test, y_test``
        (see `Dataset.of`), and for normalising ``mean`` and ``std``.
    directory : path
        Where data sets are kept; ``data`` when empty. A named one is read from
        ``<name>.npz`` there (``fashion_mnist.npz`` counts too), or else from torchvision's own
        files. A path that does not exist as it stands is looked for there too.
    download : bool
        Whether torchvision may fetch what is missing.
    normalize : bool
        Whether batches are normalised per channel. The numbers are the usual published ones
        for a named data set, and the file's own for an ``.npz``: none are computed here, since
        statistics of the training data would be a release of their own.
    train : str
        Which training examples there are, as ``start:stop`` of the file's order; either may be
        left out. ``"10000:"`` is all but the first 10,000, say because those are public.

    Raises
    ------
    FedsimError
        If there is no such data set, its files are missing or not usable, or it has no such
        training examples.

    Examples
    --------
    >>> load("digits").x_train.shape
    torch.Size([1437, 64])
    """
    dataset = _load(name, Path(directory or "data"), download, normalize)
    return _kept(dataset, train) if train else dataset


def _load(name: str, folder: Path, download: bool, normalize: bool) -> Dataset:
    """The whole data set."""
    if name.endswith(".npz"):
        return _own(name, folder, normalize)
    if name == "digits":
        _require_statistics(normalize, name, available=False)
        return read_digits()
    if name not in NAMES:
        raise FedsimError(
            f"data.name is '{name}'; it must be one of {', '.join(NAMES)}, or a path to an .npz."
        )
    mean, std = STATISTICS[name] if normalize else (None, None)
    for path in (folder / f"{name}.npz", folder / f"{name.replace('-', '_')}.npz"):
        if path.is_file():
            arrays = read_npz(path)
            return Dataset.of(name, **arrays.examples, mean=mean, std=std, source=str(path))
    examples = read_torchvision(name, folder, download)
    return Dataset.of(name, **examples, mean=mean, std=std, source=f"torchvision, {folder}")


def _kept(dataset: Dataset, train: str) -> Dataset:
    """The data set with a range of its training examples."""
    count = len(dataset.y_train)
    start, _, stop = train.partition(":")
    first, end = int(start or 0), int(stop or count)
    if not first < end <= count:
        raise FedsimError(
            f"data.train = '{train}'; it must be start:stop with start below stop, within 0:{count}"
            f", the training examples of {dataset.name}."
        )
    x, y = dataset.x_train[first:end], dataset.y_train[first:end]
    return replace(dataset, x_train=x, y_train=y)


def _own(name: str, folder: Path, normalize: bool) -> Dataset:
    """Data set from an ``.npz`` of the user's own."""
    path = next((p for p in (Path(name), folder / name) if p.is_file()), None)
    if path is None:
        raise FedsimError(
            f"data.name is '{name}', but there is no such file here or in '{folder}' (data.dir)."
        )
    arrays = read_npz(path)
    _require_statistics(normalize, str(path), available=arrays.mean is not None)
    mean, std = (arrays.mean, arrays.std) if normalize else (None, None)
    return Dataset.of(name, **arrays.examples, mean=mean, std=std, source=str(path))


def _require_statistics(normalize: bool, where: str, *, available: bool) -> None:
    if normalize and not available:
        raise FedsimError(
            f"data.normalize is true, but {where} has no mean and std for each channel; "
            "leave it false, or put them into an .npz of your own."
        )
