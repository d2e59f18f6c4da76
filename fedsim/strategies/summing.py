"""Which of a block's clients enter a round's sum, how heavily, and the sum of those that do.

It is the same where the server sums what it is sent, and where whoever trains the clients sums
their rows there and then: `ClientSumming` goes there, and what comes back merges exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms import Mechanism, PartialSum, Releaser
from fedsim.privacy.plan import ReleasePlan
from fedsim.rows import DenseRows, Layout
from fedsim.rows.block import Block, Ids, Reason
from fedsim.rows.exact import FREE_TOTAL
from fedsim.rows.exchange import Sums
from fedsim.strategies.replies import MOST_EXAMPLES

__all__ = ["BlockSummer", "ClientSumming", "DeclaredExamples", "Weighing"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LIKELY_EXAMPLES = 2.0**20
"""With no more, a client whose row is too large to be summed sends too large a row."""


@dataclass(frozen=True)
class DeclaredExamples:
    """How many examples clients are declared to have.

    Attributes
    ----------
    client_ids : int64 ``[a]``
        Sorted.
    counts : float64 ``[a]``
    """

    client_ids: Ids
    counts: Floats

    def of(self, client_ids: Ids) -> Floats:
        """Those of clients that are among them, ``[n]``."""
        return self.counts[np.searchsorted(self.client_ids, client_ids)]


@dataclass(frozen=True)
class Weighing:
    """What of the numbers that clients report enters a sum.

    Attributes
    ----------
    side_names : tuple of str
        Scalars that the mechanism releases the means of.
    key : str or None
        Metric that weighs a client's row; None where all rows weigh the same.
    declared : DeclaredExamples or None
        They weigh in place of what clients report.
    asked : int
        Clients asked in this round.
    """

    side_names: tuple[str, ...]
    key: str | None
    declared: DeclaredExamples | None
    asked: int

    def sides(self, block: Block) -> dict[str, Floats]:
        """The scalars by name, ``[n]``."""
        return {name: _reported(block, name) for name in self.side_names}

    def weights(self, block: Block) -> Floats | None:
        """Weight of each row, ``[n]``; None where all weigh the same."""
        if self.key is None:
            return None
        return self.declared.of(block.client_ids) if self.declared else _reported(block, self.key)

    def unsound(self, block: Block) -> dict[int, Reason]:
        """Clients whose weights or scalars may not enter the sum, and why."""
        reasons: dict[int, Reason] = {}

        def require(sound: Bools, reason: Reason) -> None:
            for client in block.client_ids[~sound & block.ok].tolist():
                reasons.setdefault(client, reason)

        for values in self.sides(block).values() if block.ok.any() else ():
            require(np.isfinite(values), "non-finite")
        weights = self.weights(block) if block.ok.any() else None
        if weights is not None:
            require((weights >= 0) & (weights <= MOST_EXAMPLES), "malformed")
            assert block.rows is not None
            norms = torch.linalg.vector_norm(block.rows, dim=1, dtype=torch.float64).cpu().numpy()
            with np.errstate(all="ignore"):
                reach = np.where(np.isfinite(norms), weights * norms, 0.0)
            # However many do so, the weighted sum stays one that is exact. What is beyond that with
            # a weight that somebody may have has diverged, like what is infinite.
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


@dataclass(frozen=True)
class ClientSumming:
    """See `Summing`: the bound of a round and its state, as plain arrays.

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
    state: Mapping[str, npt.NDArray[np.float64]]
    weighing: Weighing

    def start(self, device: torch.device) -> BlockSummer:
        """See `Summing`."""
        releaser = Releaser(self.plan, self.layout, device=device)
        state = {name: torch.from_numpy(np.array(values)) for name, values in self.state.items()}
        return BlockSummer(releaser.start(state), self.weighing)


class BlockSummer:
    """See `BlockSum`."""

    def __init__(self, total: PartialSum, weighing: Weighing) -> None:
        self._total, self._weighing = total, weighing

    def add(self, block: Block) -> Block:
        """See `BlockSum`; a client that is not sound has failed."""
        reasons = {**block.reasons, **self._weighing.unsound(block)}
        ok = block.ok & ~np.isin(block.client_ids, list(reasons))
        usable = torch.zeros(len(ok), dtype=torch.bool)
        if ok.any():
            usable[torch.from_numpy(ok)] = self._weighing.add(
                self._total, block if ok.all() else block.select(ok)
            ).cpu()
        return Block(block.client_ids, None, block.metrics, ok, reasons, usable)

    def merge(self, sums: Sums) -> None:
        """See `BlockSum`."""
        self._total.merge(sums)

    def state(self) -> Sums:
        """See `BlockSum`."""
        return self._total.state()


def _reported(block: Block, name: str) -> Floats:
    if name not in block.metrics:
        raise FedsimError(f"clients report no '{name}', which the mechanism or its weights need.")
    return block.metrics[name]
