"""Worlds: federations of made-up clients, in one of which a canary does its worst."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.audit.checks import Floats
from fedsim.mechanisms import Mechanism
from fedsim.rows import Layout
from fedsim.rows.block import Block, Ids, Reason, TrainerDefaults

Mask = npt.NDArray[np.bool_]

# A canary is this many times as long as what a mechanism lets through, so that every
# coordinate and every layer of it reaches its bound.
LENGTH = 1e3
# A weight by number of examples would be felt.
EXAMPLES = 1000.0
BLOCK = 256


@dataclass(frozen=True)
class World:
    """A federation in which one client, the canary, is to be noticed.

    Attributes
    ----------
    name : str
    sentence : str
        What goes on in it.
    others, canary, counterpart : callable
        From ``d`` to a row ``[d]``, to be scaled: what every other client sends, what the
        canary sends, and what it sends instead where neighbours replace one client.
    """

    name: str
    sentence: str
    others: Callable[[int], Tensor]
    canary: Callable[[int], Tensor]
    counterpart: Callable[[int], Tensor]

    def trainer(
        self,
        population: int,
        d: int,
        scale: float,
        *,
        present: bool,
        neighbour: str,
        sides: tuple[str, ...],
    ) -> Canaries:
        """The federation's clients; the canary is the last.

        Parameters
        ----------
        scale : float
            Length of the longest coordinate of a row.
        present : bool
            Whether the canary is there.
        neighbour : "add-remove", "zero-out" or "replace-one"
            What it means that it is not: there is no such client; it is asked and fails; it
            sends its counterpart.
        sides : tuple of str
            Scalars that clients report beside; the canary's are as large as can be.
        """
        rows = scale * self.others(d).expand(population, d).clone()
        replaced = not present and neighbour == "replace-one"
        rows[-1] = scale * (self.counterpart(d) if replaced else self.canary(d))
        ok = np.ones(population, dtype=np.bool_)
        ok[-1] = present or replaced
        is_canary = np.zeros(population)
        is_canary[-1] = not replaced
        senders = population - (not present and neighbour == "add-remove")
        metrics = {"num-examples": 1 + (EXAMPLES - 1) * is_canary}
        metrics |= dict.fromkeys(sides, 1e9 * is_canary)
        return Canaries(rows[:senders], ok[:senders], metrics)


ALONE = World(
    "alone",
    "all others stand still",
    others=lambda d: torch.zeros(d, dtype=torch.float64),
    canary=lambda d: torch.ones(d, dtype=torch.float64),
    counterpart=lambda d: -torch.ones(d, dtype=torch.float64),
)
OPPOSED = World(
    "opposed",
    "all others pull the other way",
    others=lambda d: -torch.ones(d, dtype=torch.float64),
    canary=lambda d: torch.ones(d, dtype=torch.float64),
    counterpart=lambda d: -torch.ones(d, dtype=torch.float64),
)
RARE = World(
    "rare",
    "the canary alone moves the last coordinate",
    others=lambda d: _all_but_last(d),
    canary=lambda d: 1 - _all_but_last(d),
    counterpart=lambda d: _all_but_last(d),
)
WORLDS = (ALONE, OPPOSED, RARE)


def _all_but_last(d: int) -> Tensor:
    row = torch.ones(d, dtype=torch.float64)
    row[-1] = 0
    return row


@dataclass(frozen=True)
class Canaries(TrainerDefaults):
    """A block trainer whose clients send the same rows in every round.

    Attributes
    ----------
    rows : Tensor ``[k, d]``
    ok : bool ``[k]``
        False for a client that always fails.
    metrics : mapping of name to float64 ``[k]`` or longer
    silent : int
        So many clients, with the lowest ids, send zero; the others follow them.
    raises : bool
        Whether the last client raises an exception instead of answering.
    pause, pauses : float and int
        Seconds that one client takes to answer, and its id.
    answered : dict of int to list of int64 arrays
        Who answered or raised in each round, in the order in which they did.
    """

    rows: Tensor
    ok: Mask
    metrics: Mapping[str, Floats]
    silent: int = 0
    raises: bool = False
    pause: float = 0.0
    pauses: int = 0
    answered: dict[int, list[Ids]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def population(self) -> int:
        """Clients that are there."""
        return self.silent + len(self.rows)

    def train(self, vector: Tensor, client_ids: Ids, round: int) -> Iterator[Block]:
        """Their rows, whatever the global parameters are."""
        last = self.population - 1
        if self.raises and len(client_ids) > 1 and last in client_ids:
            raise RuntimeError("the canary is among them")
        # One that pauses answers alone, so that others can be left out after it.
        width = 1 if self.pause else BLOCK
        for start in range(0, len(client_ids), width):
            ids = client_ids[start : start + width]
            self.answered.setdefault(round, []).append(ids)
            if self.raises and last in ids:
                raise RuntimeError("the canary has no answer")
            if self.pause and self.pauses in ids:
                time.sleep(self.pause)
            yield self._block(ids)

    def _block(self, ids: Ids) -> Block:
        index = ids - self.silent
        loud = index >= 0
        if loud.all():
            rows, ok = self.rows[index], self.ok[index]
        else:
            rows = self.rows.new_zeros(len(ids), self.rows.shape[1])
            rows[torch.from_numpy(loud)] = self.rows[index[loud]]
            ok = np.ones(len(ids), dtype=np.bool_)
            ok[loud] = self.ok[index[loud]]
        metrics = {
            name: np.where(
                loud, values[np.maximum(index, 0)], 1.0 if name == "num-examples" else 0.0
            )
            for name, values in self.metrics.items()
        }
        if not ok.all():
            rows = rows.masked_fill(torch.from_numpy(~ok)[:, None], 0.0)
        reasons: dict[int, Reason] = dict.fromkeys(ids[~ok].tolist(), "raised")
        return Block(ids, rows, metrics, ok, reasons)

    def evaluate(self, vector: Tensor, client_ids: Ids, round: int) -> Iterator[Block]:
        """Canaries have no data."""
        yield Block.sent(client_ids, None, {"num-examples": np.ones(len(client_ids))})

    def changed(self, **changes: object) -> Canaries:
        """The same federation with something else about it, and its own memory of answers."""
        return replace(self, answered={}, **changes)  # type: ignore[arg-type]


def silent_clients(population: int, d: int, sides: tuple[str, ...]) -> Canaries:
    """A federation whose clients all send zero."""
    metrics = dict.fromkeys(("num-examples", *sides), np.zeros(1))
    return Canaries(
        torch.zeros(0, d, dtype=torch.float64), np.ones(0, np.bool_), metrics, silent=population
    )


def one_coordinate_each(population: int, d: int, scale: float, sides: tuple[str, ...]) -> Canaries:
    """A federation in which client i moves coordinate i alone, as far as it can.

    Raises
    ------
    ValueError
        If there are more clients than coordinates.
    """
    if population > d:
        raise ValueError(f"{population} clients cannot each have one of {d} coordinates.")
    rows = torch.zeros(population, d, dtype=torch.float64)
    rows.fill_diagonal_(scale)
    metrics = {"num-examples": np.linspace(1, EXAMPLES, population)}
    metrics |= dict.fromkeys(sides, np.zeros(population))
    return Canaries(rows, np.ones(population, dtype=np.bool_), metrics)


def reach(mechanism: Mechanism, layout: Layout) -> float:
    """Scale of a row that every bound of the mechanism shortens."""
    huge = torch.full((1, layout.d), 1e12, dtype=torch.float64)
    bounded = mechanism.bound(huge, layout=layout)
    return LENGTH * float(bounded.abs().max())
