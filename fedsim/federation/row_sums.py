"""Sums of a round's rows, wherever they are added up: on the server, or on workers that train.

A worker bounds and sums the rows of the clients that it trains, so that one sum a worker and round
travels and not one row a client. Sums are exact: merged in any order they have the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fedsim.errors import FedsimError
from fedsim.federation.replies import MOST_EXAMPLES
from fedsim.mechanisms import Mechanism, Releaser, State
from fedsim.privacy.plan import ReleasePlan
from fedsim.rows import DenseRows, Layout
from fedsim.rows.block import Block, Ids, Reason
from fedsim.rows.exact import FREE_TOTAL

Floats = npt.NDArray[np.float64]

LIKELY_EXAMPLES = 2.0**20
"""With no more, a client whose row is too large to be summed sends too large a row."""


@dataclass(frozen=True)
class Summing:
    """How a round's rows are bounded, weighted and added up: a value that travels to workers.

    Attributes
    ----------
    plan : ReleasePlan
    layout : Layout
        Of a row.
    state : State
        The mechanism's, as of this round.
    weight_key : str or None
        Metric that weighs rows; None where all weigh the same.
    declared : pair of int64 and float64 ``[a]``, optional
        Sorted client ids, and how many examples each is declared to have; these weigh in place of
        what clients report.
    asked : int
        Clients asked in this round.
    """

    plan: ReleasePlan[Mechanism]
    layout: Layout
    state: State
    weight_key: str | None
    declared: tuple[Ids, Floats] | None
    asked: int

    @property
    def reported(self) -> tuple[str, ...]:
        """Numbers that a client must report for its row to be added."""
        weighs = self.weight_key is not None and self.declared is None
        return (*self.plan.bound.side_names, *([self.weight_key or ""] if weighs else []))

    def sides(self, block: Block) -> dict[str, Floats]:
        """The scalars that are summed beside the rows, by name, ``[n]``."""
        return {name: _reported(block, name) for name in self.plan.bound.side_names}

    def weights(self, block: Block) -> Floats | None:
        """Weight of each row, ``[n]``; None where all weigh the same."""
        if self.weight_key is None:
            return None
        if self.declared is None:
            return _reported(block, self.weight_key)
        client_ids, counts = self.declared
        return counts[np.searchsorted(client_ids, block.client_ids)]

    def checked(self, block: Block) -> Block:
        """The block, with clients failed whose weights or scalars may not enter the sum."""
        reasons: dict[int, Reason] = {}

        def require(sound: npt.NDArray[np.bool_], reason: Reason) -> None:
            for client in block.client_ids[~sound & block.ok].tolist():
                reasons.setdefault(client, reason)

        if not block.ok.any():
            return block
        assert block.rows is not None
        for values in self.sides(block).values():
            require(np.isfinite(values), "non-finite")
        weights = self.weights(block)
        if weights is not None:
            require((weights >= 0) & (weights <= MOST_EXAMPLES), "malformed")
            norms = torch.linalg.vector_norm(block.rows, dim=1, dtype=torch.float64).cpu().numpy()
            with np.errstate(all="ignore"):
                reach = np.where(np.isfinite(norms), weights * norms, 0.0)
            # Even if all clients reached it, the weighted sum would be exact. A row beyond it has
            # diverged, and counts like one that is infinite, if its weight is plausible.
            fits = reach <= FREE_TOTAL / self.asked
            require(fits | (weights > LIKELY_EXAMPLES), "non-finite")
            require(fits, "malformed")
        if not reasons:
            return block
        ok = block.ok & ~np.isin(block.client_ids, list(reasons))
        rows = block.rows.masked_fill(torch.from_numpy(~ok).to(block.rows.device)[:, None], 0.0)
        return replace(block, rows=rows, ok=ok, reasons={**block.reasons, **reasons})


def _reported(block: Block, name: str) -> Floats:
    if name not in block.metrics:
        raise FedsimError(f"clients report no '{name}', which the mechanism or its weights need.")
    return block.metrics[name]


class RowSum:
    """The rows of blocks, bounded and added up: the server's sum of a round, or a worker's part.

    Parameters
    ----------
    summing : Summing
    releaser : Releaser
        Of this plan and layout, for rows that come on its device.

    Attributes
    ----------
    total : PartialSum
        What was added.
    """

    def __init__(self, summing: Summing, releaser: Releaser) -> None:
        self.summing, self.releaser = summing, releaser
        self.total = releaser.start(summing.state)

    def add(self, block: Block) -> Block:
        """Add a block's rows; the block with ``usable`` in their place.

        A client whose numbers may not enter the sum has failed.
        """
        block = self.summing.checked(block)
        usable = torch.zeros(len(block.ok), dtype=torch.bool, device=self.total.terms.device)
        if block.ok.any():
            sound = block if block.ok.all() else block.select(block.ok)
            assert sound.rows is not None
            weights, sides = self.summing.weights(sound), self.summing.sides(sound)
            added = self.total.add(DenseRows(sound.rows), weights=weights, sides=sides)
            usable = (
                added
                if sound is block
                else usable.masked_scatter(torch.from_numpy(block.ok).to(usable.device), added)
            )
        return replace(block, rows=None, usable=usable)
