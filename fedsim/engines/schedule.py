"""Cutting a round's clients into chunks for workers, longest first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedsim.rows.block import Ids

__all__ = ["LEAST_SHARE", "chunks"]

SHARE = 0.75
"""A chunk is this part of what would be a worker's share of the clients that are left."""
LEAST_SHARE = 12
"""No chunk is planned smaller than this part of what a worker has to do."""


def chunks(
    client_ids: Ids, costs: npt.NDArray[np.float64], *, workers: int, largest: int
) -> list[Ids]:
    """Chunks of clients in decreasing order of cost, at most ``largest`` clients each.

    Handed out one after another to whichever worker is free, they keep workers busy to the end,
    also where one is only three quarters as fast as the others: the first are few and large, the
    last ones small enough to even out. Clients with as many steps stand together, as a block wants
    them. Which worker trains a client changes no byte of it.

    Parameters
    ----------
    client_ids, costs : ``[n]``
    workers : int
    """
    order = np.argsort(-costs, kind="stable")
    done = np.concatenate([[0.0], np.cumsum(costs[order])])
    least = done[-1] / (LEAST_SHARE * workers)
    cut: list[Ids] = []
    start = 0
    while start < len(order):
        target = max(SHARE * (done[-1] - done[start]) / workers, least)
        # The client that reaches the target still belongs to the chunk.
        stop = int(np.searchsorted(done, done[start] + target))
        stop = min(max(stop, start + 1), start + largest, len(order))
        cut.append(client_ids[order[start:stop]])
        start = stop
    return cut
