"""What a data set is, and what makes plain arrays one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Dataset"]

Array = npt.NDArray[Any]

_MOST_CHANNELS = 4

MOST_CLASSES = 1_000_000
"""A larger label is a mistake: models have an output for each class."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples with their labels.

    Attributes
    ----------
    name : str
        What the user called it.
    x_train, x_test : Tensor
        uint8 images ``[N, C, H, W]``, which become floating point (divided by 255) only when a
        batch is gathered; or floating features ``[N, d]`` or images ``[N, C, H, W]``, used as
        they are.
    y_train, y_test : int64 Tensor ``[N]``
        Labels, 0 .. ``num_classes`` - 1.
    num_classes : int
    mean, std : tuple of float, or None
        One number a channel, of the images after division by 255: a batch is normalised to
        ``(x - mean) / std``. None: it is not.
    source : str
        Where the numbers were read from.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    num_classes: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    source: str = ""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example: ``(C, H, W)`` or ``(d,)``."""
        return tuple(self.x_train.shape[1:])

    def to(self, device: torch.device | str) -> Dataset:
        """Move every tensor to ``device``; dtypes stay."""
        return replace(
            self,
            x_train=self.x_train.to(device),
            y_train=self.y_train.to(device),
            x_test=self.x_test.to(device),
            y_test=self.y_test.to(device),
        )

    @classmethod
    def of(
        cls,
        name: str,
        x_train: Array,
        y_train: Array,
        x_test: Array,
        y_test: Array,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        source: str = "",
    ) -> Dataset:
        """Data set of plain arrays, after checking them.

        Parameters
        ----------
        x_train, x_test : array
            uint8 images ``[N, H, W]`` or ``[N, H, W, C]`` (channels last), or floating features
            ``[N, d]``, or floating images laid out like the uint8 ones.
        y_train, y_test : integer array ``[N]``
        mean, std : sequence of float
            One number a channel (see `Dataset`).

        Raises
        ------
        FedsimError
            If an array has another dtype or shape, a number that is not finite or a negative
            label, or if the arrays do not belong together.
        """
        where = source or name
        features = {
            key: _features(key, array, where)
            for key, array in (("x_train", x_train), ("x_test", x_test))
        }
        labels = {
            key: _labels(key, array, where)
            for key, array in (("y_train", y_train), ("y_test", y_test))
        }
        for split in ("train", "test"):
            n_features, n_labels = len(features[f"x_{split}"]), len(labels[f"y_{split}"])
            if n_features != n_labels:
                raise FedsimError(
                    f"{where} has {n_features} examples in x_{split} but {n_labels} labels in "
                    f"y_{split}; there must be one label for each example."
                )
        train, test = features["x_train"], features["x_test"]
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            raise FedsimError(
                f"{where} has examples of shape {train.shape[1:]} ({train.dtype}) in x_train but "
                f"{test.shape[1:]} ({test.dtype}) in x_test; they must be alike."
            )
        num_classes = int(max(labels["y_train"].max(), labels["y_test"].max())) + 1
        statistics = _statistics(mean, std, train, where)
        return cls(
            name,
            torch.from_numpy(train),
            torch.from_numpy(labels["y_train"]),
            torch.from_numpy(test),
            torch.from_numpy(labels["y_test"]),
            num_classes,
            *statistics,
            source=source,
        )


def _features(key: str, array: Array, where: str) -> Array:
    """Checked features: uint8 or floating, channels first, contiguous."""
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise FedsimError(
            f"{where} has {key} of dtype {array.dtype}; images must be uint8 (0 to 255), "
            "features float32 or float64."
        )
    if array.ndim not in (2, 3, 4) or 0 in array.shape:
        raise FedsimError(
            f"{where} has {key} of shape {array.shape}; images must be [N, H, W] or "
            "[N, H, W, C], features [N, d], with none of these zero."
        )
    if array.ndim == 2 and array.dtype == np.uint8:
        raise FedsimError(
            f"{where} has {key} of shape {array.shape} and dtype uint8; flat features [N, d] "
            "must be float32 or float64, and images [N, H, W] or [N, H, W, C]."
        )
    if array.ndim == 4 and array.shape[3] > _MOST_CHANNELS >= array.shape[1]:
        raise FedsimError(
            f"{where} has {key} of shape {array.shape}, which looks channels first; images must "
            "be [N, H, W] or [N, H, W, C], channels last."
        )
    if array.dtype != np.uint8:
        array = array.astype(np.float64 if array.dtype.itemsize >= 8 else np.float32)
        if not np.isfinite(array).all():
            raise FedsimError(
                f"{where} has NaN or infinite numbers in {key}; every feature must be finite."
            )
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4:
        array = array.transpose(0, 3, 1, 2)
    # A copy where need be: torch wants native byte order and memory that it may write to.
    return np.require(array, dtype=array.dtype.newbyteorder("="), requirements=["C", "W"])


def _labels(key: str, array: Array, where: str) -> npt.NDArray[np.int64]:
    """Checked labels as int64 ``[N]``."""
    if array.ndim != 1:
        raise FedsimError(f"{where} has {key} of shape {array.shape}; labels must be [N].")
    if not np.issubdtype(array.dtype, np.integer):
        raise FedsimError(
            f"{where} has {key} of dtype {array.dtype}; labels must be integers from 0 up."
        )
    if array.size and int(array.min()) < 0:
        raise FedsimError(
            f"{where} has the label {int(array.min())} in {key}; labels must be integers from 0 up."
        )
    if array.size and int(array.max()) >= MOST_CLASSES:
        raise FedsimError(
            f"{where} has the label {int(array.max())} in {key}; labels must be below "
            f"{MOST_CLASSES:,}."
        )
    return array.astype(np.int64)


def _statistics(
    mean: Sequence[float] | None, std: Sequence[float] | None, features: Array, where: str
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Checked mean and standard deviation, one number a channel."""
    if mean is None and std is None:
        return None, None
    channels = features.shape[1]
    statistics = [np.asarray(() if one is None else one, dtype=np.float64) for one in (mean, std)]
    usable = all(one.shape == (channels,) and np.isfinite(one).all() for one in statistics)
    if features.ndim != 4 or not usable or not (statistics[1] > 0).all():
        raise FedsimError(
            f"{where} has mean {mean} and std {std}; normalising needs images, and of both "
            f"one finite number for each of the {channels} channels, std above 0."
        )
    return tuple(statistics[0].tolist()), tuple(statistics[1].tolist())
