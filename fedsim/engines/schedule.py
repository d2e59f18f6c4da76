"""Cutting a round's clients into chunks for workers, longest first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedsim.rows.exchange import Ids

__all__ = ["chunks"]


def chunks(
    client_ids: Ids, costs: npt.NDArray[np.float64], *, workers: int, largest: int
) -> list[Ids]:
    """Chunks of clients in decreasing order of cost, at most ``largest`` clients each.

    Handed out one after another to whichever worker is free, they keep workers about
    equally busy (longest processing time first), and clients with as many steps stand
    together, as a block wants them. Which worker trains a client changes no byte of it.

    Parameters
    ----------
    client_ids, costs : ``[n]``
    workers : int
        Each gets about four chunks: enough to even out, few enough to cost nothing.
    """
    order = np.argsort(-costs, kind="stable")
    target = costs.sum() / (4 * workers)
    cut: list[Ids] = []
    start = 0
    while start < len(order):
        running = np.cumsum(costs[order[start : start + largest]])
        # The client that reaches the target still belongs to the chunk.
        stop = start + min(int(np.searchsorted(running, target)) + 1, len(running))
        cut.append(client_ids[order[start:stop]])
        start = stop
    return cut
