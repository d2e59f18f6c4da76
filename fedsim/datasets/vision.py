"""The usual vision data sets, in the files that torchvision keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError

__all__ = ["STATISTICS", "read_torchvision"]

STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
"""Mean and standard deviation of each channel, in [0, 1], as everybody uses them."""

_TORCHVISION = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}

Split = dict[str, npt.NDArray[Any]]


def read_torchvision(name: str, folder: Path, download: bool) -> tuple[Split, Split]:
    """Read ``x`` and ``y`` for training and for testing from torchvision's cache below ``folder``.

    Raises
    ------
    FedsimError
        If the files are missing or damaged, or cannot be downloaded.
    """
    from torchvision import datasets  # seconds to import, and most runs need none of it

    def read(train: bool) -> Split:
        try:
            kept = getattr(datasets, _TORCHVISION[name])(
                root=str(folder), train=train, download=download
            )
        except (RuntimeError, OSError, EOFError) as error:
            raise FedsimError(_sentence(name, folder, download, error)) from error
        return {"x": np.asarray(kept.data), "y": np.asarray(kept.targets)}

    return read(True), read(False)


def _sentence(name: str, folder: Path, download: bool, error: Exception) -> str:
    if download:
        cause = str(error).strip().replace("\n", " ").rstrip(".")
        return (
            f"data.name is '{name}' and downloading it into '{folder}' failed ({cause}); set "
            f"data.dir to a folder that has torchvision's files for it or {name}.npz."
        )
    return (
        f"data.name is '{name}', but '{folder}' holds neither {name}.npz (with x_train, y_train, "
        "x_test, y_test) nor torchvision's files for it; set data.dir to a folder that does, "
        "or data.download = true to fetch them."
    )
