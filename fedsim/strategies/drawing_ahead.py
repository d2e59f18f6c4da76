"""A round's noise, drawn while others train: the driver of the round has nothing else to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedsim.compiled.normals import prepare
from fedsim.mechanisms import NoiseSource

__all__ = ["drawn_ahead"]

Array = npt.NDArray[np.float64]


def drawn_ahead(source: NoiseSource, sizes: Sequence[int]) -> NoiseSource:
    """The same source, whose next draws are made in a thread of their own from now on.

    numpy draws without Python's lock. Nothing else may draw from the generator then.

    Parameters
    ----------
    source : NoiseSource
    sizes : sequence of int
        What `NoiseSource.normal` will be asked for, in this order.
    """
    # Not in the thread: workers that are forked meanwhile would wait for what that holds locked,
    # which nobody in their process lets go.
    prepare()
    thread = ThreadPoolExecutor(1, "noise")
    drawn = deque([thread.submit(source.normal, size) for size in sizes])
    thread.shutdown(wait=False)  # it ends with the last of them
    return _DrawnAhead(source.generator, source.hardened, drawn=drawn)


@dataclass(frozen=True)
class _DrawnAhead(NoiseSource):
    """See `drawn_ahead`."""

    drawn: deque[Future[Array]] = field(kw_only=True, repr=False)

    def normal(self, size: int) -> Array:
        """The next of the draws; waits until they are made."""
        draws = self.drawn.popleft().result()
        assert len(draws) == size, "draws are asked for in other sizes than they were made in"
        return draws
