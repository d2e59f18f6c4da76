"""Clients as they go into a round, and which of them have gone into it before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.randomness import Randomness
from fedsim.training.batches import Batches, Ints
from fedsim.training.keeping import Kept

__all__ = ["Begun", "Entering"]


@dataclass(frozen=True)
class Entering:
    """``n`` clients that go into a round.

    Attributes
    ----------
    client_ids : int64 ``[n]``
    round : int
    randomness : sequence of n Randomness
        Where each client's draws come from.
    kept : Kept
        What they have from earlier rounds.
    drawn : sequence of Batches or None
        Their batches, where they have been drawn already.
    """

    client_ids: Ints
    round: int
    randomness: Sequence[Randomness]
    kept: Kept
    drawn: Sequence[Batches] | None = None

    def __len__(self) -> int:
        return len(self.client_ids)

    def of(self, members: Ints) -> Entering:
        """The clients at these positions."""
        return Entering(
            self.client_ids[members],
            self.round,
            [self.randomness[i] for i in members],
            self.kept.of(members),
        )


class Begun:
    """Clients that have begun a round and not ended it: their block raised, and is asked again.

    They have released nothing. What they drew and were charged then is what they draw and are
    charged for now.
    """

    def __init__(self) -> None:
        self._round_of: dict[int, int] = {}

    def has(self, client: int, round: int) -> bool:
        """Whether a client has begun this round."""
        return self._round_of.get(client) == round

    def begin(self, client_ids: Ints, round: int) -> None:
        """Clients begin a round."""
        self._round_of.update(dict.fromkeys(client_ids.tolist(), round))

    def end(self, client_ids: Ints) -> None:
        """Clients end whatever round they have begun."""
        for client in client_ids.tolist():
            self._round_of.pop(client, None)

    def sources(
        self, client_ids: Ints, round: int, randomness: Sequence[Randomness]
    ) -> list[Randomness]:
        """Where clients' draws come from: those that draw a second time say so."""
        return [
            source.repeated() if self.has(client, round) else source
            for client, source in zip(client_ids.tolist(), randomness, strict=True)
        ]
