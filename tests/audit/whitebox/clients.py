"""Federations of synthetic clients, one or several of which, the canaries, misbehave.

Canaries send extreme rows, report extreme numbers, or fail, alone or several at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.array_types import Floats, Ints
from fedsim.audit.attacks import absence
from fedsim.mechanisms import Mechanism
from fedsim.rows import Layout
from fedsim.rows.block import Block, BlockTrainer, Reason

Bools = npt.NDArray[np.bool_]
LENGTH = 1e3
"""Length of a canary's row over its bounded row's: every coordinate and layer is clipped."""
EXAMPLES = 1000.0
"""A canary's reported number of examples: weighting by it would be noticed."""
BLOCK = 256
LENGTHS = np.arange(0.5, 5.01, 0.25)
"""Lengths of rows, in units of their bound."""
NUMBERS = (1, 2, 3, 4, 5, 7, 10, 15, 25, 1_000_000)
"""Numbers of canaries, or of failing clients, at once; the last stands for all clients."""


@dataclass(frozen=True)
class _SyntheticClients(BlockTrainer):
    """A block trainer without data, which records the clients that it trained.

    Attributes
    ----------
    answered : dict of int to list of int64 arrays
        Ints of the clients that answered or raised in each round, in order.
    """

    answered: dict[int, list[Ints]] = field(
        default_factory=dict, compare=False, repr=False, kw_only=True
    )

    def evaluate(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Report one example and no metrics for each client."""
        yield Block.sent(client_ids, None, {"num-examples": np.ones(len(client_ids))})


@dataclass(frozen=True)
class Canaries(_SyntheticClients):
    """Clients that send the same rows in every round.

    Attributes
    ----------
    rows : Tensor ``[k, d]``
    ok : bool ``[k]``
        False for a client that always fails.
    metrics : mapping of name to float64 ``[k]`` or longer
    silent : int
        Number of clients that send zeros: those with the lowest ids, before the ``k`` others.
    raises : bool
        Whether the last client raises an exception instead of answering.
    pause, pauses : float and int
        Seconds that one slow client takes to answer, and its id.
    """

    rows: Tensor
    ok: Bools
    metrics: Mapping[str, Floats]
    silent: int = 0
    raises: bool = False
    pause: float = 0.0
    pauses: int = 0

    @property
    def population(self) -> int:
        """Number of clients."""
        return self.silent + len(self.rows)

    def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Yield the clients' rows, which do not depend on the global parameters."""
        last = self.population - 1
        if self.raises and len(client_ids) > 1 and last in client_ids:
            raise RuntimeError("the canary is among these clients")
        # With a slow client each client answers alone, so that a timeout could exclude others.
        width = 1 if self.pause else BLOCK
        for start in range(0, len(client_ids), width):
            ids = client_ids[start : start + width]
            self.answered.setdefault(round, []).append(ids)
            if self.raises and last in ids:
                raise RuntimeError("the canary has no answer")
            if self.pause and self.pauses in ids:
                time.sleep(self.pause)
            yield self._block(ids)

    def _block(self, ids: Ints) -> Block:
        sends = ids >= self.silent
        index = ids[sends] - self.silent
        ok = np.ones(len(ids), dtype=np.bool_)
        ok[sends] = self.ok[index]
        rows = self.rows.new_zeros(len(ids), self.rows.shape[1])
        rows[torch.from_numpy(sends & ok)] = self.rows[index[ok[sends]]]
        metrics = _metrics(len(ids), self.metrics)
        for name, values in self.metrics.items():
            metrics[name][sends] = values[index]
        return _block(ids, rows, metrics, ok)

    def changed(self, **changes: object) -> Canaries:
        """The same federation with other attributes, and without recorded answers."""
        return replace(self, answered={}, **changes)  # type: ignore[arg-type]

    def last_sends(self, row: Tensor) -> Canaries:
        """The same federation, but the last client sends this row."""
        return self.changed(rows=torch.cat([self.rows[:-1], row[None]]))

    def last_reports(self, value: float) -> Canaries:
        """The same federation, but the last client reports this number."""
        of_others = {name: values[:-1] for name, values in self.metrics.items()}
        return self.changed(metrics={n: np.append(v, value) for n, v in of_others.items()})


@dataclass(frozen=True)
class ScriptedClients(_SyntheticClients):
    """Clients that behave in each round as a script says.

    Attributes
    ----------
    population : int
    script : callable
        Makes the clients' block from the ids ``[m]`` of a cohort and the round.
    """

    population: int
    script: Callable[[Ints, int], Block]

    def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Yield the script's block, which does not depend on the global parameters."""
        self.answered.setdefault(round, []).append(client_ids)
        yield self.script(client_ids, round)


SyntheticClients = Canaries | ScriptedClients


def _metrics(m: int, names: Iterable[str], examples: float = 1.0) -> dict[str, Floats]:
    return {**{name: np.zeros(m) for name in names}, "num-examples": np.full(m, examples)}


def _block(ids: Ints, rows: Tensor, metrics: Mapping[str, Floats], ok: Bools) -> Block:
    reasons: dict[int, Reason] = dict.fromkeys(ids[~ok].tolist(), "raised")
    return Block(ids, rows, metrics, ok, reasons)


def silent_clients(population: int, d: int, sides: tuple[str, ...]) -> Canaries:
    """A federation whose clients all send zeros."""
    rows = torch.zeros(0, d, dtype=torch.float64)
    return Canaries(rows, np.ones(0, np.bool_), _metrics(0, sides), silent=population)


def one_coordinate_each(population: int, d: int, scale: float, sides: tuple[str, ...]) -> Canaries:
    """A federation in which client i moves only coordinate i, by ``scale``; others are silent."""
    loud = min(population, d)
    rows = scale * torch.eye(loud, d, dtype=torch.float64)
    metrics = _metrics(loud, sides) | {"num-examples": np.linspace(1, EXAMPLES, loud)}
    return Canaries(rows, np.ones(loud, dtype=np.bool_), metrics, silent=population - loud)


def clipped_scale(mechanism: Mechanism, layout: Layout) -> float:
    """Scale of a row that every bound of the mechanism shortens."""
    return LENGTH * float(longest_row(mechanism, layout).abs().max())


def longest_row(mechanism: Mechanism, layout: Layout) -> Tensor:
    """A row ``[d]`` whose length is exactly its bound, or each of its bounds."""
    huge = torch.full((1, layout.d), 1e12, dtype=torch.float64)
    return mechanism.bound(huge, layout=layout)[0]


@dataclass(frozen=True)
class World:
    """A federation in which an attack tries to detect one client, the canary.

    Attributes
    ----------
    name : str
    sentence : str
        What clients do in it.
    others, canary, counterpart : callable
        Functions from ``d`` to a row ``[d]``, to be scaled: what every other client sends, what
        the canary sends, and what replaces its row under replace-one adjacency.
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
        """Make the federation's clients; the canary is the last.

        Parameters
        ----------
        scale : float
            Length of the longest coordinate of a row.
        present : bool
            Whether the canary takes part.
        neighbour : "add-remove", "zero-out" or "replace-one"
            What its absence means; see `absence`. Its counterpart may replace it.
        sides : tuple of str
            Names of scalars that clients also report; the canary's are huge.
        """
        is_last = np.arange(population) == population - 1
        replaced, ok, exist = absence(is_last & (not present), neighbour)
        rows = scale * self.others(d).expand(population, d).clone()
        rows[-1] = scale * (self.counterpart(d) if replaced[-1] else self.canary(d))
        is_canary = (is_last & ~replaced).astype(np.float64)
        metrics = {"num-examples": 1 + (EXAMPLES - 1) * is_canary}
        metrics |= dict.fromkeys(sides, 1e9 * is_canary)
        return Canaries(rows[torch.from_numpy(exist)], ok[exist], metrics)


def _ones(d: int, last: float = 1.0) -> Tensor:
    row = torch.ones(d, dtype=torch.float64)
    row[-1] = last
    return row


def _opposite(d: int) -> Tensor:
    return -_ones(d)


ALONE = World("alone", "all other clients send zeros", lambda d: 0 * _ones(d), _ones, _opposite)
OPPOSED = World(
    "opposed",
    "all other clients send the opposite of the canary's row",
    _opposite,
    _ones,
    _opposite,
)
RARE = World(
    "rare",
    "only the canary moves the last coordinate",
    others=lambda d: _ones(d, last=0),
    canary=lambda d: 1 - _ones(d, last=0),
    counterpart=lambda d: _ones(d, last=0),
)
WORLDS = (ALONE, OPPOSED, RARE)


def _some(m: int, turn: int) -> Ints:
    """Positions in a cohort of ``m``; which and how many they are changes with every round."""
    return np.roll(np.arange(m), turn)[: NUMBERS[turn % len(NUMBERS)]]


def several_canaries(
    population: int, radius: Floats, sides: tuple[str, ...], offset: int = 0
) -> ScriptedClients:
    """Several canaries at once, each on the coordinate of its id; the others send zeros.

    Their number changes from round to round (`NUMBERS`) and their lengths vary (`LENGTHS`); every
    second pass over the numbers is in float32.

    Parameters
    ----------
    radius : float64 ``[d]``
        Length of a row along each coordinate that equals its bound; only clients with ids
        below ``d`` are canaries.
    offset : int
        Added to the round, to start later in the script.
    """

    def script(ids: Ints, round: int) -> Block:
        turn = round + offset
        rows = torch.zeros(len(ids), len(radius), dtype=torch.float64)
        for position in _some(len(ids), turn):
            client = int(ids[position])
            if client < len(radius):
                length = LENGTHS[(7 * client + turn) % len(LENGTHS)]
                rows[position, client] = length * radius[client]
        if turn // len(NUMBERS) % 2:
            rows = rows.float()
        return Block.sent(ids, rows, _metrics(len(ids), sides))

    return ScriptedClients(population, script)


def failing_clients(
    population: int, d: int, sides: tuple[str, ...], row: float | None, offset: int = 0
) -> ScriptedClients:
    """Several failing clients at once, in changing numbers; the others send zeros.

    Parameters
    ----------
    row : float or None
        Value of all entries of their rows; None to raise an exception and send nothing.
    """

    def script(ids: Ints, round: int) -> Block:
        positions = _some(len(ids), round + offset)
        rows = torch.zeros(len(ids), d, dtype=torch.float64)
        ok = np.ones(len(ids), dtype=np.bool_)
        if row is None:
            ok[positions] = False
        else:
            rows[torch.from_numpy(positions)] = row
        return _block(ids, rows, _metrics(len(ids), sides), ok)

    return ScriptedClients(population, script)


def equal_sums(
    population: int, bounded: Tensor, sides: tuple[str, ...], *, longer: bool
) -> tuple[ScriptedClients, ScriptedClients]:
    """Two federations with different clients whose bounded rows have the same sum.

    In the second, a cohort's rows are in the opposite order, clients report other values of
    metrics that are not released, and with ``longer`` all rows are four times as long (rows exceed
    their bound in both).
    """
    signs = torch.from_numpy(np.random.default_rng(1).choice([-1.0, 1.0], (64, len(bounded))))

    def script(second: bool) -> Callable[[Ints, int], Block]:
        def send(ids: Ints, round: int) -> Block:
            # Rows depend on positions in the cohort, not on ids: reversed, they have the same sum.
            positions = np.arange(len(ids))[:: -1 if second else 1].copy()
            rows = 4.0 * bounded * signs[torch.from_numpy(positions % len(signs))]
            metrics = _metrics(len(ids), sides, 7.0 if second else 1.0)
            metrics.setdefault("loss", np.full(len(ids), 3.0 if second else 2.0))
            return Block.sent(ids, rows * (4.0 if second and longer else 1.0), metrics)

        return send

    return ScriptedClients(population, script(False)), ScriptedClients(population, script(True))
