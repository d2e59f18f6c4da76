"""Behaviours of a canary, and runs with each of them against runs of the same seed without it.

As noise and cohorts are equal, the difference of two releases is exactly what the canary added to
the sum. In units of the released noise its length may be what the ledger says, one over the noise
multiplier, and no more, whatever the canary sends; and nothing else may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from whitebox.bound_checks import MeasuredNoise, allowed_length, length_finding, scalars_moved
from whitebox.clients import ALONE, OPPOSED, Canaries, World, clipped_scale, longest_row
from whitebox.plan_checks import SEEDS, difference
from whitebox.target import Observation, StrategyTarget, Target

from fedsim.audit.findings import Finding, invariant
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import array_record, tensors
from fedsim.privacy.placement import SecureAggregation
from fedsim.rows import Layout
from fedsim.rows.layout import PREFIX

PAUSE, DEADLINE = 0.5, 0.25
DENSE_LENGTHS = (-5.0, 1e-3, 0.5, 0.9, 1.1, 1.4, 1.6, 1.8, 2.0, 3.0, 5.0)
"""Lengths of rows in units of their bound; a negative one reverses the row."""


@dataclass(frozen=True)
class Behaviour:
    """A behaviour of a canary in a world.

    Attributes
    ----------
    name : str
        Words that follow "a canary that".
    world : World
    change : callable
        Function from the world's federation to one in which the canary behaves like this.
    harmless : bool
        Whether its row is usable, so that its share of the noise is used too.
    by_row : bool
        Whether the behaviour is in its row alone, so that an example can have it too.
    adds : "something", "zeros" or "nothing"
        What it adds to the sum: "zeros" for a usable row of zeros, "nothing" for a failure.
    """

    name: str
    world: World
    change: Callable[[Canaries], Canaries]
    harmless: bool = True
    by_row: bool = True
    adds: Literal["something", "zeros", "nothing"] = "something"


def behaviours(layers: Mapping[str, slice], scale: float, bounded: Tensor) -> list[Behaviour]:
    """All behaviours, for a model with these layers.

    Parameters
    ----------
    layers : mapping of name to slice
        Columns of each layer.
    scale : float
        Size of a coordinate that every bound shortens.
    bounded : float64 ``[d]``
        A row whose length is exactly its bound, or each of its bounds.
    """

    def full(value: float) -> Tensor:
        return torch.full_like(bounded, value)

    def sends(name: str, row: Tensor, world: World = OPPOSED) -> Behaviour:
        return Behaviour(name, world, lambda canaries: canaries.last_sends(row))

    def fails(name: str, change: Callable[[Canaries], Canaries]) -> Behaviour:
        return Behaviour(name, OPPOSED, change, harmless=False, adds="nothing")

    def reports(value: float) -> Behaviour:
        change: Callable[[Canaries], Canaries] = lambda canaries: canaries.last_reports(value)  # noqa: E731
        return Behaviour(f"reports {value:g}", OPPOSED, change, harmless=False, by_row=False)

    last = full(0)
    last[-1] = 1
    one_layer = {name: full(1e-3 * scale) for name in layers}
    for name, columns in layers.items():
        one_layer[name][columns] = scale
    return [
        Behaviour("sends its longest row", ALONE, Canaries.changed),
        Behaviour("sends the opposite of all others", OPPOSED, Canaries.changed),
        *(sends(f"moves {name} most", row, ALONE) for name, row in one_layer.items()),
        sends("alternates signs", scale * (2.0 * (torch.arange(len(bounded)) % 2) - 1)),
        sends("moves one coordinate", scale * last),
        # A little elsewhere: a norm that omits the last layer then sees a short, non-zero row.
        sends("moves one coordinate most", scale * last + 1e-3 * scale * (1 - last)),
        *(sends(f"sends {length:g} C", length * bounded) for length in DENSE_LENGTHS),
        sends("sends 1e200", full(1e200)),
        sends("sends 1e-200", full(1e-200)),
        replace(sends("sends zeros", full(0)), adds="zeros"),
        fails("sends NaN", lambda canaries: canaries.last_sends(full(torch.nan))),
        fails(
            "sends one infinity",
            lambda canaries: canaries.last_sends(torch.where(last > 0, torch.inf, last)),
        ),
        replace(
            fails("raises an exception", lambda canaries: canaries.changed(raises=True)),
            by_row=False,
        ),
        *map(reports, (0.0, -1e9, 1e300, float("nan"))),
    ]


Reply = Callable[[], RecordDict]


def _report() -> MetricRecord:
    return MetricRecord({"num-examples": 1.0})


def _arrays(*sizes: int) -> RecordDict:
    arrays = ArrayRecord({f"entry{k}": Array(np.zeros(size)) for k, size in enumerate(sizes)})
    return RecordDict({"arrays": arrays, "metrics": _report()})


REPLIES: Mapping[str, Reply] = {
    "replies nothing at all": lambda: RecordDict(),
    "replies no parameters": lambda: RecordDict({"metrics": _report()}),
    "replies other parameters": lambda: _arrays(3, 1),
    "replies empty parameters": lambda: _arrays(),
    "replies a setting": lambda: RecordDict({"config": ConfigRecord({"num-examples": "many"})}),
}
"""Replies that a client may send instead of its parameters."""


class _TwiceGrid(LocalGrid):
    """Delivers every reply twice."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return all replies, and all of them again."""
        replies = list(super().send_and_receive(messages, timeout=timeout))
        return [*replies, *replies]


def message_grid(
    population: int,
    rows: Tensor | None = None,
    *,
    last: Reply | Literal["rows", "fails"] = "rows",
    twice: bool = False,
) -> LocalGrid:
    """A federation of ordinary Flower clients, whose updates are sent as messages.

    Parameters
    ----------
    rows : Tensor ``[population, d]``, optional
        The clients' updates; zeros if omitted.
    last : callable, "rows" or "fails"
        Behaviour of the last client: makes this reply, behaves like the others, or fails.
    twice : bool
        Whether every reply is delivered twice.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        if client == population - 1 and last != "rows":
            if last == "fails":
                raise RuntimeError("the canary has no answer")
            return Message(last(), reply_to=message)
        arrays = next(iter(message.content.array_records.values()))
        # In a private run clients do not return the vectors that come with the parameters.
        arrays = ArrayRecord({k: v for k, v in arrays.items() if not k.startswith(PREFIX)})
        if rows is not None:
            server = tensors(arrays)
            layout = Layout.of(server)
            arrays = array_record(layout.unflatten(layout.flatten(server) + rows[client]))
        return Message(RecordDict({"arrays": arrays, "metrics": _report()}), reply_to=message)

    grid = _TwiceGrid if twice else LocalGrid
    return grid(app, num_nodes=population)


@dataclass(frozen=True)
class _Length:
    """How far a behaviour moved parameters and released scalars, in std of their noise.

    ``without_noise`` is the name of a scalar without noise that moved, if any.
    """

    behaviour: str
    moves: float
    scalars: float
    without_noise: str | None


class Neighbours:
    """Compares runs of one seed with and without a canary; keeps the first fault of each kind.

    Attributes
    ----------
    faults : dict of kind to sentence
    examined : str
    """

    def __init__(self, target: Target, seed: int) -> None:
        self._target, self._seed = target, seed
        self._lengths: list[_Length] = []
        self._noise: MeasuredNoise | None = None
        self.faults: dict[str, str] = {}
        self.examined = ""

    def try_behaviours(self, noise: MeasuredNoise, stds_of_scalars: Mapping[str, float]) -> None:
        """Run every behaviour, and compare it with a federation without the canary.

        Parameters
        ----------
        noise : MeasuredNoise
            Size of the noise in releases of the same target.
        stds_of_scalars : mapping of name to float
            Standard deviations of the numbers that the mechanism shows after the last round.
        """
        target, without = self._target, dict[str, Observation]()
        bounded = longest_row(target.mechanism, target.layout)
        tried = behaviours(target.layers, clipped_scale(target.mechanism, target.layout), bounded)
        tried = [one for one in tried if one.by_row or target.row == "client"]
        for behaviour in tried:
            world, culprit = behaviour.world, f"a canary that {behaviour.name}"
            if world.name not in without:
                without[world.name] = target.observe(self._without_canary(world), self._seed)
            absent = without[world.name]
            present = target.observe(behaviour.change(target.world(world)), self._seed)
            self.note_faults(culprit, absent, present)
            if self._leaves_no_trace(behaviour) and _moved(absent, present):
                self.note_fault("traces", f"the release changed with {culprit}")
            # A client's share includes noise: without the share, the noise differs too.
            if behaviour.harmless or not target.shares:
                std = noise.of_round(absent, target.rounds - 1, target)
                moves = np.linalg.norm((present.moves - absent.moves) / std, axis=1)
                # What is not finite counts as infinitely long.
                moved = float(np.nan_to_num(moves, nan=np.inf, posinf=np.inf).max())
                scalars = scalars_moved(absent, present, stds_of_scalars)
                self._lengths.append(_Length(behaviour.name, moved, *scalars))
        self._noise = noise
        self.examined = (
            f"{len(tried)} canary behaviours in round {target.rounds}, each against no canary"
        )

    def _without_canary(self, world: World) -> Canaries:
        if not self._target.shares:
            return self._target.world(world, present=False)
        # A client with a row of zeros still sends its share of the noise.
        return self._target.world(world).last_sends(torch.zeros(self._target.layout.d))

    def _leaves_no_trace(self, behaviour: Behaviour) -> bool:
        """Whether the release with this behaviour must equal the one without a canary."""
        target = self._target
        if target.shares or target.adjacency == "replace-one":
            return False
        # Adaptive bounds may center rows, or count them, so that zeros make a difference.
        plain = not target.adapts and not target.sides
        return behaviour.adds == "nothing" or (behaviour.adds == "zeros" and plain)

    @property
    def moved(self) -> Finding:
        """Finding on the longest move of parameters."""
        longest = max(self._lengths, key=lambda length: length.moves)
        return self._found(longest, longest.moves)

    @property
    def moved_together(self) -> Finding | None:
        """Finding on the longest joint move of parameters and released scalars; None without."""
        bare = next((length for length in self._lengths if length.without_noise), None)
        if bare is not None:
            moves = f"'{bare.without_noise}' has no noise, and moves with one that {bare.behaviour}"
            return invariant(self.examined, moves, "scalars with noise")
        longest = max(self._lengths, key=lambda length: math.hypot(length.moves, length.scalars))
        together = math.hypot(longest.moves, longest.scalars)
        if together == longest.moves:
            return None
        return self._found(longest, together, (longest.moves**2, longest.scalars**2))

    def _found(
        self, longest: _Length, length: float, shares: tuple[float, float] = (1.0, 0.0)
    ) -> Finding:
        assert self._noise is not None
        whose, allowed = f"by one that {longest.behaviour}", allowed_length(self._target.event)
        return length_finding(self.examined, length, whose, allowed, self._noise, shares, SEEDS - 2)

    def note_fault(self, kind: str, sentence: str) -> None:
        """Keep a fault, if it is the first of its kind."""
        self.faults.setdefault(kind, sentence)

    def note_faults(self, culprit: str, without: Observation, present: Observation) -> None:
        """Compare a run with a canary to one without, and note all faults."""
        rounds, canary = len(present.moves), self._target.population - 1
        if present.ended or present.released != rounds or len(present.statistics) != rounds:
            reason = f" ({present.ended})" if present.ended else ""
            self.note_fault("releases", f"{present.released} of {rounds} with {culprit}{reason}")
        elif without.released != rounds:
            self.note_fault("releases", f"{without.released} of {rounds} without the canary")
        for before, after in zip(without.sampled, present.sampled, strict=True):
            if not np.array_equal(np.setdiff1d(before, [canary]), np.setdiff1d(after, [canary])):
                self.note_fault("other clients", f"other clients were sampled with {culprit}")
        lines = [[(line.round, line.event) for line in run.entries] for run in (without, present)]
        if lines[0] != lines[1]:
            self.note_fault("charges", f"the ledgers differ with {culprit}")
        if left := difference(without.outputs, present.outputs):
            self.note_fault("what else leaves a round", f"{left} with {culprit}")
        if not np.array_equal(without.moves[:-1], present.moves[:-1]):
            self.note_fault(
                "earlier rounds", f"they differ with {culprit}, which was not sampled yet"
            )


class ClientNeighbours(Neighbours):
    """Adds what only a strategy's clients can do: fail together, be slow, send messages."""

    def __init__(self, target: StrategyTarget, seed: int) -> None:
        super().__init__(target, seed)
        self._small = target.with_model({name: t[:2] for name, t in target.start.items()})

    def fail_with_others(self) -> None:
        """Check that a round in which all other clients fail is released too.

        With secure aggregation it is not checked, since there is no sum of a few clients: its
        statement assumes that dropouts do not depend on data.
        """
        if isinstance(self._small.template.plan.placement, SecureAggregation):
            return
        clients = self._small.world(OPPOSED, neighbour="zero-out", scale=1.0)
        nobody = np.zeros(self._target.population, dtype=np.bool_)
        canary = nobody.copy()
        canary[-1] = True
        without, present = (
            self._small.observe(clients.changed(ok=ok), self._seed) for ok in (nobody, canary)
        )
        self.note_faults("a canary where all others fail", without, present)

    def be_slow(self) -> None:
        """Check that a client that misses the deadline does not exclude other clients."""
        single, seed = self._small.with_rounds(1), self._seed
        scale = clipped_scale(self._target.mechanism, self._target.layout)
        clients = single.world(OPPOSED, neighbour="zero-out", scale=scale)
        nobody = single.observe(single.silent_clients(), seed)
        slowest = clients.changed(pause=PAUSE, pauses=int(min(nobody.sampled[0], default=0)))
        quick = single.observe(clients.changed(), seed, timeout=DEADLINE + PAUSE)
        slow = single.observe(slowest, seed, timeout=DEADLINE)
        # Only the slow client's own row may be lost.
        lost = len(quick.sampled[0]) - len(slow.sampled[0])
        if lost > 1 or slow.released != quick.released or slow.ended:
            self.note_fault("slowness", f"{lost} clients were left out with one that is slow")

    def send_messages(self) -> None:
        """Check that an unreadable reply in a message counts as a failure of its client only."""
        target = self._small
        if target.shares or target.sides:
            return

        def run(last: Reply | Literal["fails"]) -> Observation:
            grid = message_grid(target.population, last=last)
            return target.observe(target.silent_clients(), self._seed, grid=grid)

        failing = run("fails")
        for name, reply in REPLIES.items():
            present = run(reply)
            self.note_faults(f"a canary that {name}", failing, present)
            if _moved(failing, present):
                self.note_fault("releases", f"the release changed with a canary that {name}")
        self._send_rows(target.with_rounds(1))

    def _send_rows(self, single: StrategyTarget) -> None:
        """Check that updates in messages, delivered once or twice, add the same as in blocks."""
        population, d = single.population, single.layout.d
        signs = np.random.default_rng(1).choice([-1.0, 1.0], (population, d))
        lengths = 0.75 * np.sqrt(2.0) ** (torch.arange(population) % 6)[:, None]
        rows = torch.from_numpy(signs) * lengths * longest_row(single.mechanism, single.layout)
        metrics = {"num-examples": np.ones(population)}
        clients = Canaries(rows, np.ones(population, dtype=np.bool_), metrics)
        blocks = single.observe(clients, self._seed)
        for twice in (False, True):
            grid = message_grid(population, rows, twice=twice)
            present = single.observe(clients, self._seed, grid=grid)
            # A tolerance: a client's update is a difference of parameters in float64.
            size = np.abs(blocks.moves).max()
            if not np.allclose(blocks.moves, present.moves, rtol=0, atol=1e-6 * size):
                again = " that come twice" if twice else ""
                self.note_fault("messages", f"replies{again} add other values than blocks of rows")


def _moved(before: Observation, after: Observation) -> bool:
    return not np.array_equal(before.moves, after.moves)
