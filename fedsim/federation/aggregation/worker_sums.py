"""Sums of a round's rows, wherever they are added up: on the server, or on workers that train.

A worker bounds and sums the rows of the clients that it trains, so that one sum a worker and round
travels and not one row a client. Sums are exact: merged in any order they have the same bytes.
Meanwhile the server draws the round's noise (`prefetched`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.federation.replies import MOST_EXAMPLES
from fedsim.kernels.normals import prepare
from fedsim.mechanisms import Mechanism, NoiseSource, PartialSum, Releaser
from fedsim.privacy.plan import ReleasePlan
from fedsim.rows import DenseRows, Layout
from fedsim.rows.block import Block, Ids, Reason
from fedsim.rows.exact import FREE_TOTAL
from fedsim.rows.exchange import Sums

Floats = npt.NDArray[np.float64]

LIKELY_EXAMPLES = 2.0**20
"""With no more, a client whose row is too large to be summed sends too large a row."""


@dataclass(frozen=True)
class Weighing:
    """The weights and scalars with which clients' rows enter a round's sum.

    Attributes
    ----------
    side_names : tuple of str
        Scalars that are summed beside the rows.
    key : str or None
        Metric that weighs rows; None where all weigh the same.
    declared : pair of int64 and float64 ``[a]``, optional
        Sorted client ids, and how many examples each is declared to have; these weigh in place of
        what clients report.
    asked : int
        Clients asked in this round.
    """

    side_names: tuple[str, ...]
    key: str | None
    declared: tuple[Ids, Floats] | None
    asked: int

    def sides(self, block: Block) -> dict[str, Floats]:
        """The scalars by name, ``[n]``."""
        return {name: _reported(block, name) for name in self.side_names}

    def weights(self, block: Block) -> Floats | None:
        """Weight of each row, ``[n]``; None where all weigh the same."""
        if self.key is None:
            return None
        if self.declared is None:
            return _reported(block, self.key)
        client_ids, counts = self.declared
        return counts[np.searchsorted(client_ids, block.client_ids)]

    def unsound(self, block: Block) -> dict[int, Reason]:
        """Clients whose weights or scalars may not enter the sum, and why."""
        reasons: dict[int, Reason] = {}

        def require(sound: npt.NDArray[np.bool_], reason: Reason) -> None:
            for client in block.client_ids[~sound & block.ok].tolist():
                reasons.setdefault(client, reason)

        if not block.ok.any():
            return reasons
        for values in self.sides(block).values():
            require(np.isfinite(values), "non-finite")
        weights = self.weights(block)
        if weights is not None:
            require((weights >= 0) & (weights <= MOST_EXAMPLES), "malformed")
            assert block.rows is not None
            norms = torch.linalg.vector_norm(block.rows, dim=1, dtype=torch.float64).cpu().numpy()
            with np.errstate(all="ignore"):
                reach = np.where(np.isfinite(norms), weights * norms, 0.0)
            # Even if all clients reached it, the weighted sum would be exact. A row beyond it has
            # diverged, and counts like one that is infinite, if its weight is plausible.
            fits = reach <= FREE_TOTAL / self.asked
            require(fits | (weights > LIKELY_EXAMPLES), "non-finite")
            require(fits, "malformed")
        return reasons

    def add(self, total: PartialSum, block: Block) -> Tensor:
        """Add the rows of a block of sound clients; which the sum contains, bool ``[n]``."""
        assert block.rows is not None
        return total.add(
            DenseRows(block.rows), weights=self.weights(block), sides=self.sides(block)
        )


def _reported(block: Block, name: str) -> Floats:
    if name not in block.metrics:
        raise FedsimError(f"clients report no '{name}', which the mechanism or its weights need.")
    return block.metrics[name]


@dataclass(frozen=True)
class WorkerSumming:
    """The bound of a round and its state, as plain arrays: what workers sum by (`Summing`).

    Attributes
    ----------
    plan, layout
        As for `Releaser`.
    state : mapping of name to ndarray
        The mechanism's.
    weighing : Weighing
    """

    plan: ReleasePlan[Mechanism]
    layout: Layout
    state: Mapping[str, Floats]
    weighing: Weighing

    def start(self, device: torch.device) -> WorkerSum:
        """An empty sum, for rows that come on ``device``."""
        releaser = Releaser(self.plan, self.layout, device=device)
        state = {name: torch.from_numpy(np.array(values)) for name, values in self.state.items()}
        return WorkerSum(releaser.start(state), self.weighing)


class WorkerSum:
    """A worker's part of a round's sum (`BlockSum`)."""

    def __init__(self, total: PartialSum, weighing: Weighing) -> None:
        self._total, self._weighing = total, weighing

    def add(self, block: Block) -> Block:
        """Add a block's rows; a client whose numbers may not enter the sum has failed."""
        reasons = {**block.reasons, **self._weighing.unsound(block)}
        ok = block.ok & ~np.isin(block.client_ids, list(reasons))
        usable = torch.zeros(len(ok), dtype=torch.bool)
        if ok.any():
            usable[torch.from_numpy(ok)] = self._weighing.add(
                self._total, block if ok.all() else block.select(ok)
            ).cpu()
        return Block(block.client_ids, None, block.metrics, ok, reasons, usable)

    def state(self) -> Sums:
        """The sum, as the server merges it."""
        return self._total.state()


def prefetched(source: NoiseSource, sizes: Sequence[int]) -> NoiseSource:
    """The same source, whose next draws are made in a thread of their own from now on.

    numpy draws without Python's lock. Nothing else may draw from the generator then.

    Parameters
    ----------
    source : NoiseSource
    sizes : sequence of int
        What `NoiseSource.normal` will be asked for, in this order.
    """
    # Not in the thread: a worker that is forked while the thread holds a lock would wait for ever,
    # since its process has no thread to release it.
    prepare()
    thread = ThreadPoolExecutor(1, "noise")
    drawn = deque([thread.submit(source.normal, size) for size in sizes])
    thread.shutdown(wait=False)  # it ends with the last of them
    return _Prefetched(source.generator, source.hardened, drawn=drawn)


@dataclass(frozen=True)
class _Prefetched(NoiseSource):
    """Its first draws were made, or are being made, in a thread."""

    drawn: deque[Future[Floats]] = field(kw_only=True, repr=False)

    def normal(self, size: int) -> Floats:
        """The next of the draws; waits until they are made."""
        draws = self.drawn.popleft().result()
        assert len(draws) == size, "draws are asked for in other sizes than they were made in"
        return draws
