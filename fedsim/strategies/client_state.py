"""The state that clients have in common: the mean of what the last round's ended with."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.rows.block import Block
from fedsim.rows.exchange import CLIENT_STATE
from fedsim.strategies.contributions import Placement
from fedsim.strategies.summaries import LARGEST

__all__ = ["ClientState"]

PREFIX = f"{CLIENT_STATE}."


class ClientState:
    """Averages what clients end with (ADADP's rate), and sends it to all of the next round.

    Parameters
    ----------
    private : bool
        Whether the run claims client-level privacy.
    placement : "server" or "client"
        Where noise is drawn.

    Attributes
    ----------
    values : dict of str to float
        The means, empty before the first round has ended. With the parameters they are what
        a resumed run starts from.

    Raises
    ------
    FedsimError
        If clients may not say what they ended with.
    """

    def __init__(self, private: bool, placement: Placement) -> None:
        if private:
            raise FedsimError(
                "client.state is 'server' (average_client_state=True); it must be 'reset' or "
                "'client' in a run with client-level privacy: what clients report of their state "
                "would be a release of its own."
            )
        if placement == "client":
            raise FedsimError(
                "client.state is 'server' (average_client_state=True); it must be 'reset' or "
                "'client' while noise.placement = 'client': clients send their shares and nothing "
                "else."
            )
        self.values: dict[str, float] = {}
        self._ended: dict[str, list[float]] = {}

    def entries(self) -> dict[str, bool | float]:
        """Config entries of a round's instructions."""
        self._ended = {}
        return {CLIENT_STATE: True, **{PREFIX + name: v for name, v in self.values.items()}}

    def take(self, block: Block, usable: Tensor) -> None:
        """Note what the ``usable [n]`` clients ended with."""
        counted = usable.cpu().numpy()
        for key, values in block.metrics.items():
            if key.startswith(PREFIX):
                # A client without data has ended with nothing.
                ended = values[counted & (np.abs(values) <= LARGEST)].tolist()
                self._ended.setdefault(key.removeprefix(PREFIX), []).extend(ended)

    def average(self) -> None:
        """Make what was noted the state of the next round; what nobody reported stays."""
        # The exact sum does not depend on the order in which clients came.
        self.values |= {k: math.fsum(v) / len(v) for k, v in self._ended.items() if v}
        self._ended = {}
