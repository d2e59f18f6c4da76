"""A part of the training examples that nobody trains on, to choose settings by."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.partitions.base import HOLD_OUT, Indices
from fedsim.randomness import Purpose, Randomness

__all__ = ["hold_out"]


def hold_out(
    amount: float, examples: int, owners: npt.NDArray[Any] | None = None, *, seed: int
) -> tuple[Indices, Indices]:
    """Draw validation examples uniformly from the training examples.

    An owner of examples always keeps one to train on, so that holding out changes nobody's being a
    client: it is the last of its examples in the order drawn.

    Parameters
    ----------
    amount : float
        Below 1 a share of the examples, rounded down; else their number.
    examples : int
        How many there are.
    owners : array ``[N]``, optional
        Whose they are.
    seed : int

    Returns
    -------
    int64 ``[N - k]`` and int64 ``[k]``
        Sorted positions of those that stay, and of those that are held out.

    Raises
    ------
    FedsimError
        If there are not so many to hold out, or none at all.
    """
    generator = Randomness(seed).generator(Purpose.PARTITION, level="run", part=HOLD_OUT)
    order = generator.permutation(examples)
    count = int(amount * examples + 1e-9) if amount < 1 else int(amount)
    if owners is None:
        free = order[:-1]
    else:
        # `unique` finds the first of each owner, in an order that begins with the last drawn.
        kept = np.unique(owners[order[::-1]], return_index=True)[1]
        free = np.delete(order[::-1], kept)[::-1]
    if not 1 <= count <= len(free):
        raise FedsimError(
            f"data.validation is {amount:g}, which holds out {count} of {examples} training "
            f"examples; it must hold out at least 1 and at most {len(free)}, "
            f"{'all but one' if owners is None else 'all but one of each owner'}."
        )
    held = np.sort(free[:count])
    return np.setdiff1d(np.arange(examples), held, assume_unique=True), held
