"""A readable part of a schedule, for a picture: some devices, and what they do in a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedsim.array_types import Bools, Ints
from fedsim.federation.buffered.schedule import ReleaseSchedule

Replying = Callable[[int, Ints], Bools]
"""Function of ``(round, client ids [n])`` that returns who does not drop out, bool ``[n]``."""

DEVICES = 14
"""Most devices that are shown."""
TASKS, BARS = 6.0, 12
"""How long the shown part is, in tasks of the median device; most bars of one device."""
LINES = 30
"""Most releases that are shown, each with its time."""


def timeline(schedule: ReleaseSchedule, replying: Replying | None) -> dict[str, Any]:
    """Who trains which version when, as JSON values: devices from the fastest to the slowest.

    Parameters
    ----------
    schedule : ReleaseSchedule
    replying : callable, optional
        As ``replying`` of `Availability`.

    Returns
    -------
    dict
        ``devices`` and ``until``: how many there are, and the end of the shown seconds;
        ``releases``: some of them, as ``[seconds, number]``; ``rows``: for each device its
        ``client`` and ``bars``, ``[start, end, version, release, released, failed]``, where the
        release and its time are 0 if none has the update.
    """
    took = schedule.ends - schedule.starts
    until = min(float(schedule.times[-1]), TASKS * float(np.median(took)))
    shown = np.flatnonzero(schedule.starts < until)
    clients, first = np.unique(schedule.client_ids[shown], return_index=True)
    order = np.argsort(took[shown[first]], kind="stable")
    chosen = np.linspace(0, len(order) - 1, min(len(order), DEVICES)).round().astype(np.int64)
    made = np.flatnonzero(schedule.times <= until)
    made = made[:: -(-len(made) // LINES) or 1]
    return {
        "devices": len(np.unique(schedule.client_ids)),
        "until": until,
        "releases": [[float(schedule.times[k]), int(k) + 1] for k in made],
        "rows": [
            {
                "client": int(client),
                "bars": _bars(schedule, replying, shown[schedule.client_ids[shown] == client]),
            }
            for client in clients[order[chosen]]
        ],
    }


def _bars(
    schedule: ReleaseSchedule, replying: Replying | None, positions: Ints
) -> list[list[float]]:
    """What one device does, from its starts at these positions of the schedule."""
    bars = []
    for k in positions[:BARS]:
        version, release = int(schedule.versions[k]), int(schedule.releases[k])
        asked = schedule.client_ids[k : k + 1]
        failed = replying is not None and not replying(version + 1, asked)[0]
        released = float(schedule.times[release - 1]) if release else 0.0
        span = [float(schedule.starts[k]), float(schedule.ends[k])]
        bars.append([*span, version, release, released, int(failed)])
    return bars
