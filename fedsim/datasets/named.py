"""Data sets by name: digits, which is part of this package, and torchvision's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsim import regular_files
from fedsim.datasets.arrays import read_npz
from fedsim.datasets.dataset import Dataset
from fedsim.datasets.published_files import SPLITS, TFF, SplitArrays, in_folder, labels, tff_command
from fedsim.errors import FedsimError
from fedsim.registry import register

_FILE = Path(__file__).with_name("digits.npz")
_SOURCE = "Alpaydin and Kaynak, UCI, 1998"
_GREY_LEVELS = 16
_EVERY = 5


@register("data", "digits")
@dataclass(frozen=True)
class Digits:
    """Handwritten digits, part of this package: 1,797 images of 8x8 grey pixels."""

    def __call__(self, normalize: bool) -> Dataset:
        """Read them as float32 features ``[N, 64]`` in [0, 1].

        The split is fixed, 1,437 for training and 360 for testing: with the images sorted by
        class, and within a class in the file's order, every fifth is a test image. So the classes
        have the same shares in both, and no seed moves an image from one to the other. (Both parts
        have the same writers: the file does not say who wrote what.)

        Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998
        (CC BY 4.0), its test part, which scikit-learn ships too.
        """
        if normalize:
            raise FedsimError(
                "data.normalize is true, but digits has no mean and std for each channel; leave it "
                "false: its pixels are in [0, 1] as they are."
            )
        with np.load(_FILE, allow_pickle=False) as digits:
            x = (digits["x"] / _GREY_LEVELS).astype(np.float32)
            y = digits["y"].astype(np.int64)
        is_test = np.zeros(len(y), dtype=bool)
        is_test[np.argsort(y, kind="stable")[::_EVERY]] = True
        train, test = ({"x": x[own], "y": y[own]} for own in (~is_test, is_test))
        return Dataset.from_arrays("digits", train, test, classes=10, source=_SOURCE)


class Published:
    """A well-known data set, read from ``<name>.npz`` or torchvision's own files.

    Attributes
    ----------
    name, torchvision : str
        Its names in fedsim and in torchvision.
    classes : int
        Number of classes.
    tff : TFF or None
        TensorFlow Federated's HDF5 of it, with owners, in the folder of its name.
    mean, std : tuple of float
        Mean and standard deviation of each channel, for pixels in [0, 1], as commonly used.
    """

    name: ClassVar[str]
    torchvision: ClassVar[str]
    tff: ClassVar[TFF | None] = None
    classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def __call__(
        self, directory: Path, download: bool, normalize: bool, protected: bool = False
    ) -> Dataset:
        """Read it from a folder; see `load` for parameters.

        Raises
        ------
        FedsimError
            If the files are missing or damaged, or cannot be downloaded.
        """
        mean, std = (self.mean, self.std) if normalize else (None, None)
        names = (f"{self.name}.npz", f"{self.name.replace('-', '_')}.npz")
        path = next((directory / name for name in names if (directory / name).is_file()), None)
        train: Mapping[str, npt.NDArray[Any]]
        test: Mapping[str, npt.NDArray[Any]]
        if path is not None:
            arrays = read_npz(path)
            train, test, source = arrays.train, arrays.test, str(path)
        elif self.tff and (place := self.tff.place(directory / self.name)):
            train, test = (self.tff.read(place, split, protected) for split in SPLITS)
            # Its test clients are others, who have the same ids as some of the training clients.
            test = {key: array for key, array in test.items() if key != "owner"}
            source = str(place)
        else:
            train, test = (self._read(directory, download, part) for part in (True, False))
            source = f"torchvision, {directory}"
        return Dataset.from_arrays(
            self.name,
            train,
            test,
            mean=mean,
            std=std,
            classes=self.classes,
            source=source,
            protected=protected,
        )

    def _read(self, directory: Path, download: bool, train: bool) -> SplitArrays:
        from torchvision import datasets  # seconds to import, and most runs need none of it

        kind = getattr(datasets, self.torchvision)
        try:
            regular_files.require_all(
                directory / getattr(kind, "base_folder", f"{self.torchvision}/raw")
            )
        except OSError as error:
            raise FedsimError(
                f"data.name is '{self.name}', but {error.filename} cannot be read "
                f"({error.strerror})."
            ) from None
        try:
            data_set = kind(root=str(directory), train=train, download=download)
        except (RuntimeError, OSError, EOFError) as error:
            raise FedsimError(
                _sentence(self.name, directory, download, error) + self._with_owners(directory)
            ) from error
        return {"x": np.asarray(data_set.data), "y": np.asarray(data_set.targets)}

    def _with_owners(self, directory: Path) -> str:
        """End of a sentence on missing files: how those with owners are fetched, if there are."""
        if not self.tff:
            return "."
        command = in_folder(tff_command(self.tff.stem), directory / self.name)
        return f"; for {self.tff.files}, which have owners: {command}"


def _sentence(name: str, folder: Path, download: bool, error: Exception) -> str:
    if download:
        cause = str(error).strip().replace("\n", " ").rstrip(".")
        return (
            f"data.name is '{name}' and downloading it into '{folder}' failed ({cause}); set "
            f"data.dir to a folder that has torchvision's files for it or {name}.npz"
        )
    return (
        f"data.name is '{name}', but '{folder}' holds neither {name}.npz (with x_train, y_train, "
        "x_test, y_test) nor torchvision's files for it; set data.dir to a folder that does, "
        "or data.download = true to fetch them"
    )


@register("data", "mnist")
@dataclass(frozen=True)
class MNIST(Published):
    """MNIST: 70,000 handwritten digits, 28x28 grey (LeCun et al. 1998)."""

    name, torchvision = "mnist", "MNIST"
    mean, std = (0.1307,), (0.3081,)


@register("data", "fashion-mnist")
@dataclass(frozen=True)
class FashionMNIST(Published):
    """Fashion-MNIST: 70,000 articles of clothing, 28x28 grey (Xiao et al. 2017)."""

    name, torchvision = "fashion-mnist", "FashionMNIST"
    mean, std = (0.2860,), (0.3530,)


@register("data", "cifar10")
@dataclass(frozen=True)
class CIFAR10(Published):
    """CIFAR-10: 60,000 photographs of ten things, 32x32 (Krizhevsky 2009)."""

    name, torchvision = "cifar10", "CIFAR10"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def _photographs(images: Any, classes: Any) -> SplitArrays:
    return {"x": np.asarray(images, dtype=np.uint8), "y": labels(classes)}


@register("data", "cifar100")
@dataclass(frozen=True)
class CIFAR100(Published):
    """CIFAR-100: 60,000 photographs of a hundred things, 32x32 (Krizhevsky 2009).

    TensorFlow Federated's HDF5 in ``data.dir/cifar100``, if it is there, has the same with 500
    owners of 100 training images each (Reddi et al. 2021: Pachinko allocation).
    """

    name, torchvision = "cifar100", "CIFAR100"
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    classes = 100
    tff = TFF("fed_cifar100", ("image", "label"), _photographs, classes=100)
