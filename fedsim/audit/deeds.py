"""Everything that one client may try: what it sends, reports, or leaves undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsim.audit.observe import Parameters, columns
from fedsim.audit.worlds import ALONE, OPPOSED, Canaries, World

__all__ = ["Deed", "deeds"]

Change = Callable[[Canaries], Canaries]


@dataclass(frozen=True)
class Deed:
    """What the canary does in a world.

    Attributes
    ----------
    name : str
        Goes on "a canary that".
    world : World
    change : callable
        From the world's federation to one in which the canary does it.
    harmless : bool
        Whether its row can be used as it is: then its share of noise is there too.
    adds : "something", "zeros" or "nothing"
        To the sum: zeros count as a client that replied, and nothing is what one that fails adds.
    """

    name: str
    world: World
    change: Change
    harmless: bool = True
    adds: Literal["something", "zeros", "nothing"] = "something"


def deeds(start: Parameters, scale: float) -> list[Deed]:
    """All of them, for a model of these parameters.

    Parameters
    ----------
    scale : float
        Length of a coordinate that every bound shortens.
    """
    d = sum(tensor.numel() for tensor in start.values())

    def full(value: float) -> Tensor:
        return torch.full((d,), value, dtype=torch.float64)

    last = torch.zeros(d, dtype=torch.float64)
    last[-1] = 1
    nearly = scale * last + 1e-3 * scale * (1 - last)
    layers = []
    for name, layer_columns in zip(start, columns(start), strict=True):
        # A little elsewhere: where a norm leaves this layer out, the rest must not be nothing.
        row = torch.full((d,), 1e-3 * scale, dtype=torch.float64)
        row[layer_columns] = scale
        layers.append(Deed(f"moves {name} most", ALONE, _sends(row)))
    return [
        Deed("pulls as hard as it can", ALONE, _stays),
        Deed("pulls against all others", OPPOSED, _stays),
        Deed("moves one coordinate", OPPOSED, _sends(scale * last)),
        Deed("moves one coordinate most", OPPOSED, _sends(nearly)),
        *layers,
        Deed("sends 1e200", OPPOSED, _sends(full(1e200))),
        Deed("sends 1e-200", OPPOSED, _sends(full(1e-200))),
        Deed("sends zeros", OPPOSED, _sends(full(0.0)), adds="zeros"),
        Deed("sends NaN", OPPOSED, _sends(full(torch.nan)), harmless=False, adds="nothing"),
        Deed(
            "sends one infinity", OPPOSED, _sends(torch.where(last > 0, torch.inf, last)),
            harmless=False, adds="nothing",
        ),
        Deed("raises an exception", OPPOSED, _raises, harmless=False, adds="nothing"),
        *(
            Deed(f"reports {value:g}", OPPOSED, _reports(value), harmless=False)
            for value in (0.0, -1e9, 1e300, float("nan"))
        ),
    ]  # fmt: skip


def _stays(canaries: Canaries) -> Canaries:
    return canaries


def _sends(row: Tensor) -> Change:
    def change(canaries: Canaries) -> Canaries:
        rows = canaries.rows.clone()
        rows[-1] = row
        return canaries.but(rows=rows)

    return change


def _raises(canaries: Canaries) -> Canaries:
    return canaries.but(raises=True)


def _reports(value: float) -> Change:
    def change(canaries: Canaries) -> Canaries:
        metrics = {name: values.copy() for name, values in canaries.metrics.items()}
        for values in metrics.values():
            values[-1] = value
        return canaries.but(metrics=metrics)

    return change
