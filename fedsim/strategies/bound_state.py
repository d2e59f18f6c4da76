"""A mechanism's state over the rounds of a run, and the layout of the rows that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedsim.errors import FedsimError
from fedsim.mechanisms import Mechanism, State
from fedsim.mechanisms.base import state_on
from fedsim.rows import Layout

__all__ = ["BoundState"]


class BoundState:
    """Begins with the first parameters that are seen, or goes on from an earlier run's.

    Parameters
    ----------
    mechanism : Mechanism

    Attributes
    ----------
    layout : Layout or None
        Of a row; None before any parameters were seen.
    values : State
        The mechanism's, after the round aggregated last.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self.layout: Layout | None = None
        self.values: State = {}
        self._mechanism = mechanism
        self._restored: Mapping[str, Any] | None = None

    def begin(self, layout: Layout, device: torch.device) -> None:
        """Rows will have this layout from now on, and come on this device.

        Raises
        ------
        FedsimError
            If the restored state is of other parameters.
        """
        values = self._mechanism.init(layout)
        if self._restored is not None:
            if self._restored["parameters"] != _described(layout):
                raise FedsimError("state= is of a model with other parameters than these.")
            values = self._restored["mechanism"]
        self.layout, self.values = layout, state_on(values, device)

    def state(self) -> dict[str, Any]:
        """What outlives the process: ``parameters`` that it is about, and ``mechanism``."""
        if self.layout is None and self._restored is not None:
            return dict(self._restored)
        return {
            "parameters": None if self.layout is None else _described(self.layout),
            "mechanism": {name: value.clone() for name, value in self.values.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; which model it is about is seen in the next round."""
        self.layout, self.values = None, {}
        self._restored = None
        if state["parameters"] is not None:
            self._restored = {name: state[name] for name in ("parameters", "mechanism")}


def _described(layout: Layout) -> list[list[object]]:
    """What a row is made of, as JSON says it."""
    return [[entry.name, list(entry.shape), str(entry.dtype)] for entry in layout.entries]
