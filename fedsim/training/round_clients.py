"""Clients as they go into a round, and which of them have gone into it before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedsim.randomness import Randomness
from fedsim.training.batches import Batches, Ints
from fedsim.training.client_state import CarriedState
from fedsim.training.side_effects import Seeds


@dataclass(frozen=True)
class RoundClients:
    """``n`` clients that go into a round.

    Attributes
    ----------
    client_ids : int64 ``[n]``
    round : int
    randomness : sequence of n Randomness
        Where each client's draws come from.
    carried : CarriedState
        What they have from earlier rounds.
    drawn : sequence of Batches or None
        Their batches, where they have been drawn already.
    """

    client_ids: Ints
    round: int
    randomness: Sequence[Randomness]
    carried: CarriedState
    drawn: Sequence[Batches] | None = None

    def __len__(self) -> int:
        return len(self.client_ids)

    def at(self, positions: Ints) -> RoundClients:
        """The clients at these positions."""
        return RoundClients(
            self.client_ids[positions],
            self.round,
            [self.randomness[i] for i in positions],
            self.carried.at(positions),
        )

    @property
    def seeds(self) -> Seeds:
        """Of what their models draw in the round."""
        return Seeds(self.randomness, self.client_ids, self.round)

    def starts(
        self, theta: Tensor, numbers: Mapping[str, npt.NDArray[np.float64]]
    ) -> Iterator[RoundStart]:
        """What each of these clients goes into the round with, from ``theta [n, D]``."""
        for position, client in enumerate(self.client_ids.tolist()):
            received = {"start": theta[position]}
            # In the rows of a client without state lies whatever another one left there.
            rows = self.carried.rows if self.carried.present[position] else {}
            received |= {f"kept.{name}": values[position] for name, values in rows.items()}
            values = {name: float(column[position]) for name, column in numbers.items()}
            yield RoundStart(client, self.randomness[position], received, values)


@dataclass(frozen=True)
class RoundStart:
    """What a client goes into a round with.

    Attributes
    ----------
    client : int
    randomness : Randomness
    received : mapping of name to Tensor
        Parameters that came in, and state from earlier rounds.
    numbers : mapping of name to float
        The algorithm's numbers, which may be the client's own.
    """

    client: int
    randomness: Randomness
    received: Mapping[str, Tensor]
    numbers: Mapping[str, float]


class StartedRounds:
    """Rounds that clients have started and not ended: their block raised, and is trained again.

    They have released nothing. The second time they draw the same and are charged nothing more.
    """

    def __init__(self) -> None:
        self._round_of: dict[int, int] = {}

    def has(self, client: int, round: int) -> bool:
        """Whether a client has started this round."""
        return self._round_of.get(client) == round

    def start(self, client_ids: Ints, round: int) -> None:
        """Clients start a round."""
        self._round_of.update(dict.fromkeys(client_ids.tolist(), round))

    def end(self, client_ids: Ints) -> None:
        """Clients end whatever round they have started."""
        for client in client_ids.tolist():
            self._round_of.pop(client, None)

    def sources(
        self, client_ids: Ints, round: int, randomness: Sequence[Randomness]
    ) -> list[Randomness]:
        """Where clients' draws come from: those that draw a second time ask for the same draws."""
        return [
            source.repeated() if self.has(client, round) else source
            for client, source in zip(client_ids.tolist(), randomness, strict=True)
        ]
