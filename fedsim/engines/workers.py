"""How many processes help to train on this machine: a fixed rule of model, cohort and cores."""

from __future__ import annotations

import os

import torch

from fedsim.engines.forked import CAN_FORK

__all__ = ["helpful_workers"]

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
