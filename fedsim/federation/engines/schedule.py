"""How many workers share a round out among them, and which clients each is given, longest first."""

from __future__ import annotations

import os
import sys

import numpy as np
import numpy.typing as npt
import torch

from fedsim.rows.block import Ids

# A forked process may not use what macOS computes with.
CAN_FORK = sys.platform == "linux"

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


# About 40 ms of one core's work. What a worker costs a round (being asked four times, sending a
# sum, which is merged) is a few milliseconds: below this the round is no shorter for it.
OPERATIONS = 2.0**29


def helpful_workers(operations: float, clients: float, device: torch.device) -> int:
    """Number of processes among which a round is worth sharing out.

    Parameters
    ----------
    operations : float
        Multiplications that a client's local work takes.
    clients : float
        That are expected in a round.
    device : torch.device

    Examples
    --------
    >>> helpful_workers(1e6, 100, torch.device("cpu"))
    1
    """
    if device.type != "cpu" or not CAN_FORK:
        return 1
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(clients), int(operations * clients / OPERATIONS)))
