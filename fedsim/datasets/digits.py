"""Handwritten digits that come with the package: real handwriting that needs no download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim.datasets.dataset import Dataset
from fedsim.errors import FedsimError
from fedsim.registry import register

__all__ = ["Digits", "read_digits"]

_FILE = Path(__file__).with_name("digits.npz")
_SOURCE = "Alpaydin and Kaynak, UCI, 1998"
_GREY_LEVELS = 16
_EVERY = 5


@register("data", "digits")
@dataclass(frozen=True)
class Digits:
    """Handwritten digits that come along: 1,797 images of 8x8 grey pixels."""

    def __call__(self, normalize: bool) -> Dataset:
        """Read them; see `read_digits`."""
        if normalize:
            raise FedsimError(
                "data.normalize is true, but digits has no mean and std for each channel; leave it "
                "false: its pixels are in [0, 1] as they are."
            )
        return read_digits()


def read_digits() -> Dataset:
    """Read 1,797 images of 8x8 grey pixels, as float32 features ``[N, 64]`` in [0, 1].

    1,437 of them are for training and 360 for testing, always the same ones: with the images
    in order of their class, and within a class in the file's order, every fifth is a test
    image. So the classes have the same shares in both, and no run's seed moves an image from
    one to the other. (The same people wrote in both parts: the file does not say who wrote
    what.)

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998
    (CC BY 4.0), its test part, which scikit-learn ships too.
    """
    with np.load(_FILE, allow_pickle=False) as digits:
        x = (digits["x"] / _GREY_LEVELS).astype(np.float32)
        y = digits["y"].astype(np.int64)
    is_test = np.zeros(len(y), dtype=bool)
    is_test[np.argsort(y, kind="stable")[::_EVERY]] = True
    train, test = ({"x": x[own], "y": y[own]} for own in (~is_test, is_test))
    return Dataset.of("digits", train, test, classes=10, source=_SOURCE)
