"""Sums of a round's rows, on the server or on the workers that train the clients.

A worker bounds and sums the rows of the clients that it trains, so that it sends one sum a round
instead of one row a client. Sums are exact: merged in any order they have the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.array_types import Floats, Ints
from fedsim.errors import FedsimError
from fedsim.mechanisms import Mechanism, PartialSum, Releaser, State
from fedsim.privacy.plan import ReleasePlan
from fedsim.rows import DenseRows, Layout
from fedsim.rows.block import Block, Reason
from fedsim.rows.exact import MAX_NORM_TOTAL

MAX_EXAMPLES = 2.0**32
"""Largest number of examples that a client may report: larger weights would overflow exact sums."""
LIKELY_EXAMPLES = 2.0**20
"""Largest plausible number of examples. Where weight times norm is too large for the exact sum, a
client with at most so many has a diverged row ("non-finite"); with more, its weight is wrong."""


@dataclass(frozen=True)
class Summing:
    """How a round's rows are bounded, weighted and added up; sent to the workers.

    Attributes
    ----------
    plan : ReleasePlan
    layout : Layout
        Layout of a row.
    state : State
        State of the mechanism in this round.
    weight_key : str or None
        Metric that weights rows; None where all rows have the same weight.
    declared_weights : pair of int64 and float64 ``[a]``, optional
        Sorted client ids, and the declared weight of each, in place of what clients report: the
        plan's, or a number of examples.
    asked : int
        Number of clients asked in this round.
    """

    plan: ReleasePlan[Mechanism]
    layout: Layout
    state: State
    weight_key: str | None
    declared_weights: tuple[Ints, Floats] | None
    asked: int

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of the numbers that a client must report for its row to be added."""
        weighs = self.weight_key is not None and self.declared_weights is None
        return (
            *self.plan.mechanism.side_scalar_names,
            *([self.weight_key or ""] if weighs else []),
        )

    def start(self, releaser: Releaser) -> PartialSum:
        """The empty sum of a round, or of a worker's part of it, of a releaser of this plan."""
        return releaser.start(self.state)

    def add(self, block: Block, total: PartialSum) -> Block:
        """Add a block's rows; return the block without them, and with ``usable`` set.

        A client with an invalid weight or scalar is marked as failed. ``total`` is the server's sum
        of a round or a worker's part of it, started by a releaser of the same plan and layout.
        """
        block = self.mark_invalid(block)
        usable = torch.zeros(len(block.ok), dtype=torch.bool, device=total.definition.device)
        if block.ok.any():
            sound = block if block.ok.all() else block.select(block.ok)
            assert sound.rows is not None
            added = self.add_rows(sound, sound.rows, total)
            # masked_scatter fills the sound clients' places in order, without reading from a GPU.
            usable = (
                added
                if sound is block
                else usable.masked_scatter(torch.from_numpy(block.ok).to(usable.device), added)
            )
        return replace(block, rows=None, usable=usable)

    def add_rows(self, block: Block, rows: Tensor, total: PartialSum) -> Tensor:
        """Add the rows ``[n, d]`` of a block without failures; which are in the sum, ``[n]``."""
        side_scalars = self.side_scalars(block)
        return total.add(DenseRows(rows), weights=self.weights(block), side_scalars=side_scalars)

    def mark_invalid(self, block: Block) -> Block:
        """The block, with the clients whose weights or scalars are invalid marked as failed."""
        reasons: dict[int, Reason] = {}

        def require(sound: npt.NDArray[np.bool_], reason: Reason) -> None:
            for client in block.client_ids[~sound & block.ok].tolist():
                reasons.setdefault(client, reason)

        if not block.ok.any():
            return block
        assert block.rows is not None
        for values in self.side_scalars(block).values():
            require(np.isfinite(values), "non-finite")
        weights = self.weights(block)
        # Weights that a bound allows are declared, from 0 to 1, and any row fits its sum.
        if weights is not None and self.plan.mechanism.guarantee == "none":
            require((weights >= 0) & (weights <= MAX_EXAMPLES), "malformed")
            norms = torch.linalg.vector_norm(block.rows, dim=1, dtype=torch.float64).cpu().numpy()
            with np.errstate(all="ignore"):
                weighted_norm = np.where(np.isfinite(norms), weights * norms, 0.0)
            # A client's part of the exact sum's range, small enough that the sum stays exact if all
            # clients use it up. A longer row with a plausible weight has diverged: as non-finite.
            fits = weighted_norm <= MAX_NORM_TOTAL / self.asked
            require(fits | (weights > LIKELY_EXAMPLES), "non-finite")
            require(fits, "malformed")
        if not reasons:
            return block
        ok = block.ok & ~np.isin(block.client_ids, list(reasons))
        rows = block.rows.masked_fill(torch.from_numpy(~ok).to(block.rows.device)[:, None], 0.0)
        return replace(block, rows=rows, ok=ok, reasons={**block.reasons, **reasons})

    def side_scalars(self, block: Block) -> dict[str, Floats]:
        """The scalars that are summed in addition to the rows, by name, ``[n]``."""
        return {name: _reported(block, name) for name in self.plan.mechanism.side_scalar_names}

    def weights(self, block: Block) -> Floats | None:
        """Weight of each row, ``[n]``; None where all weigh the same."""
        if self.weight_key is None:
            return None
        if self.declared_weights is None:
            return _reported(block, self.weight_key)
        client_ids, weights = self.declared_weights
        return weights[np.searchsorted(client_ids, block.client_ids)]


def _reported(block: Block, name: str) -> Floats:
    if name not in block.metrics:
        raise FedsimError(f"clients report no '{name}', which the mechanism or its weights need.")
    return block.metrics[name]
