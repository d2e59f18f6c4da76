"""A round's noise, drawn in a thread while workers train the round's clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedsim.kernels.normals import prepare
from fedsim.mechanisms import NoiseSource

Array = npt.NDArray[np.float64]


def prefetched(source: NoiseSource, sizes: Sequence[int]) -> NoiseSource:
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
    return _Prefetched(source.generator, source.hardened, drawn=drawn)


@dataclass(frozen=True)
class _Prefetched(NoiseSource):
    """Its first draws were made, or are being made, in a thread."""

    drawn: deque[Future[Array]] = field(kw_only=True, repr=False)

    def normal(self, size: int) -> Array:
        """The next of the draws; waits until they are made."""
        draws = self.drawn.popleft().result()
        assert len(draws) == size, "draws are asked for in other sizes than they were made in"
        return draws
