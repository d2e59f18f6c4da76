"""scikit-learn's digits: real handwriting that needs no download."""

from __future__ import annotations

import numpy as np

from fedsim.datasets.dataset import Dataset

__all__ = ["read_digits"]

_GREY_LEVELS = 16
_EVERY = 5


def read_digits() -> Dataset:
    """Read 1,797 images of 8x8 grey pixels, as float32 features ``[N, 64]`` in [0, 1].

    1,437 of them are for training and 360 for testing, always the same ones: with the images
    in order of their class, and within a class in the file's order, every fifth is a test
    image. So the classes have the same shares in both, and no run's seed moves an image from
    one to the other. (The same people wrote in both parts: the file does not say who wrote
    what.)

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    # It takes a second to import, which processes that train other data need not spend.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = (bunch.data / _GREY_LEVELS).astype(np.float32)
    y = bunch.target.astype(np.int64)
    is_test = np.zeros(len(y), dtype=bool)
    is_test[np.argsort(y, kind="stable")[::_EVERY]] = True
    return Dataset.of(
        "digits", x[~is_test], y[~is_test], x[is_test], y[is_test], source="scikit-learn"
    )
