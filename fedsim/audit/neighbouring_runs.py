"""Canaries: what they try, and runs of one seed with one, compared with runs without.

With noise and cohorts equal, the difference of two releases is exact: it is what the canary
added to the sum. In units of the released noise it may be as long as the ledger says, one over
the noise multiplier, and not longer, whatever the canary sends; and nothing else may change.
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

from fedsim.audit.bound_checks import MeasuredNoise, allowed_length, length_moved, scalars_moved
from fedsim.audit.checks import Finding, invariant
from fedsim.audit.clients import ALONE, OPPOSED, Canaries, World, longest_row, reach
from fedsim.audit.plan_checks import SEEDS, difference
from fedsim.audit.target import Observation, StrategyTarget, Target
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import array_record, tensors
from fedsim.rows import Layout
from fedsim.rows.layout import PREFIX

PAUSE, DEADLINE = 0.5, 0.25
DENSE_LENGTHS = (0.5, 0.9, 1.1, 1.4, 1.6, 1.8, 2.0, 3.0, 5.0)
"""Of rows, in units of their bound."""


@dataclass(frozen=True)
class Behaviour:
    """What a canary does in a world.

    Attributes
    ----------
    name : str
        Follows "a canary that".
    world : World
    change : callable
        From the world's federation to one in which the canary does it.
    harmless : bool
        Whether its row can be used as it is: then its share of noise is used too.
    by_row : bool
        Whether all that it does is in its row: so may an example.
    adds : "something", "zeros" or "nothing"
        To the sum: zeros count as a client that replied, and nothing is what one that fails adds.
    """

    name: str
    world: World
    change: Callable[[Canaries], Canaries]
    harmless: bool = True
    by_row: bool = True
    adds: Literal["something", "zeros", "nothing"] = "something"


def behaviours(layers: Mapping[str, slice], scale: float, bounded: Tensor) -> list[Behaviour]:
    """All of them, for a model of these layers.

    Parameters
    ----------
    layers : mapping of name to slice
        Columns of each layer.
    scale : float
        Length of a coordinate that every bound shortens.
    bounded : float64 ``[d]``
        A row that is just as long as its bound, or as each of its bounds.
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
        sends("moves one coordinate", scale * last),
        # A little elsewhere: where a norm leaves a layer out, the rest must not be nothing.
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
"""What a client may send instead of its parameters."""


class _TwiceGrid(LocalGrid):
    """Brings every reply twice."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Each reply, and all of them once more."""
        replies = list(super().send_and_receive(messages, timeout=timeout))
        return [*replies, *replies]


def message_grid(
    population: int,
    rows: Tensor | None = None,
    *,
    last: Reply | Literal["rows", "fails"] = "rows",
    twice: bool = False,
) -> LocalGrid:
    """A federation of ordinary Flower clients, whose updates come as messages.

    Parameters
    ----------
    rows : Tensor ``[population, d]``, optional
        Their updates; zeros if left out.
    last : callable, "rows" or "fails"
        What the last client does: replies this, what the others do, or fails.
    twice : bool
        Whether every reply comes twice.
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
        # Clients of a private run do not send back the vectors that they receive with parameters.
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
    """How far one behaviour moved parameters and released scalars, in std of their noise.

    ``without_noise`` names a scalar that moved and has none.
    """

    behaviour: str
    moves: float
    scalars: float
    without_noise: str | None


class Neighbours:
    """Runs of one seed with a canary, against runs without; keeps the first fault of each kind.

    Attributes
    ----------
    faults : dict of kind to sentence
    looked_at : str
    """

    def __init__(self, target: Target, seed: int) -> None:
        self._target, self._seed = target, seed
        self._lengths: list[_Length] = []
        self._noise: MeasuredNoise | None = None
        self.faults: dict[str, str] = {}
        self.looked_at = ""

    def try_behaviours(self, noise: MeasuredNoise, stds_of_scalars: Mapping[str, float]) -> None:
        """Try every behaviour, and compare with a federation without the canary.

        Parameters
        ----------
        noise : MeasuredNoise
            Of releases of the same target.
        stds_of_scalars : mapping of name to float
            Of the noise of what the mechanism shows after the last round.
        """
        target, without = self._target, dict[str, Observation]()
        bounded = longest_row(target.mechanism, target.layout)
        tried = behaviours(target.layers, reach(target.mechanism, target.layout), bounded)
        tried = [one for one in tried if one.by_row or target.row == "client"]
        for behaviour in tried:
            world, culprit = behaviour.world, f"a canary that {behaviour.name}"
            if world.name not in without:
                without[world.name] = target.observe(self._without_canary(world), self._seed)
            absent = without[world.name]
            present = target.observe(behaviour.change(target.world(world)), self._seed)
            self.compare(culprit, absent, present)
            if self._leaves_no_trace(behaviour) and _moved(absent, present):
                self.note("traces", f"the release changed with {culprit}")
            # A share includes noise: where it is missing, the noise is another.
            if behaviour.harmless or not target.shares:
                std = noise.of_round(absent, target.rounds - 1, target)
                moves = np.linalg.norm((present.moves - absent.moves) / std, axis=1)
                moved = float(np.nan_to_num(moves, nan=np.inf, posinf=np.inf).max())
                scalars = scalars_moved(absent, present, stds_of_scalars)
                self._lengths.append(_Length(behaviour.name, moved, *scalars))
        self._noise = noise
        self.looked_at = (
            f"{len(tried)} canary behaviours in round {target.rounds}, each against no canary"
        )

    def _without_canary(self, world: World) -> Canaries:
        if not self._target.shares:
            return self._target.world(world, present=False)
        # A client that has nothing to add still sends its share of the noise.
        return self._target.world(world).last_sends(torch.zeros(self._target.layout.d))

    def _leaves_no_trace(self, behaviour: Behaviour) -> bool:
        """Whether the release with such a canary must be the same as without one."""
        target = self._target
        if target.shares or target.adjacency == "replace-one":
            return False
        # Bounds that learn may center rows, or count them.
        plain = not target.adapts and not target.sides
        return behaviour.adds == "nothing" or (behaviour.adds == "zeros" and plain)

    @property
    def moved(self) -> Finding:
        """The longest move of parameters."""
        longest = max(self._lengths, key=lambda length: length.moves)
        return self._found(longest, longest.moves)

    @property
    def moved_together(self) -> Finding | None:
        """The longest move of parameters and released scalars, where one moved."""
        bare = next((length for length in self._lengths if length.without_noise), None)
        if bare is not None:
            moves = f"'{bare.without_noise}' has no noise, and moves with one that {bare.behaviour}"
            return invariant(self.looked_at, moves, "scalars with noise")
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
        return length_moved(self.looked_at, length, whose, allowed, self._noise, shares, SEEDS - 2)

    def note(self, kind: str, sentence: str) -> None:
        """Keep what is wrong, if it is the first of its kind."""
        self.faults.setdefault(kind, sentence)

    def compare(self, culprit: str, without: Observation, present: Observation) -> None:
        """Compare a run with a canary to one without."""
        rounds, canary = len(present.moves), self._target.population - 1
        if present.ended or present.released != rounds or len(present.statistics) != rounds:
            reason = f" ({present.ended})" if present.ended else ""
            self.note("releases", f"{present.released} of {rounds} with {culprit}{reason}")
        elif without.released != rounds:
            self.note("releases", f"{without.released} of {rounds} without the canary")
        for before, after in zip(without.sampled, present.sampled, strict=True):
            if not np.array_equal(np.setdiff1d(before, [canary]), np.setdiff1d(after, [canary])):
                self.note("other clients", f"other clients were sampled with {culprit}")
        lines = [[(line.round, line.event) for line in run.entries] for run in (without, present)]
        if lines[0] != lines[1]:
            self.note("charges", f"the ledgers differ with {culprit}")
        if left := difference(without.outputs, present.outputs):
            self.note("what else leaves a round", f"{left} with {culprit}")
        if not np.array_equal(without.moves[:-1], present.moves[:-1]):
            self.note("earlier rounds", f"they differ with {culprit}, which was not sampled yet")


class ClientNeighbours(Neighbours):
    """Runs of a strategy, with clients that fail with all others, are slow, or send messages."""

    def __init__(self, target: StrategyTarget, seed: int) -> None:
        super().__init__(target, seed)
        self._small = target.with_model({name: t[:2] for name, t in target.start.items()})

    def fail_with_others(self) -> None:
        """A round in which all other clients fail must be released too.

        Not so with secure aggregation, which has no sum of a few clients: its statement assumes
        that dropping out does not depend on data.
        """
        if self._small.template.secure is not None:
            return
        clients = self._small.world(OPPOSED, neighbour="zero-out", scale=1.0)
        nobody = np.zeros(self._target.population, dtype=np.bool_)
        canary = nobody.copy()
        canary[-1] = True
        without, present = (
            self._small.observe(clients.changed(ok=ok), self._seed) for ok in (nobody, canary)
        )
        self.compare("a canary where all others fail", without, present)

    def be_slow(self) -> None:
        """A client that takes longer than the strategy waits must not exclude other clients."""
        single, seed = self._small.with_rounds(1), self._seed
        scale = reach(self._target.mechanism, self._target.layout)
        clients = single.world(OPPOSED, neighbour="zero-out", scale=scale)
        nobody = single.observe(single.silent_clients(), seed)
        slowest = clients.changed(pause=PAUSE, pauses=int(min(nobody.sampled[0], default=0)))
        quick = single.observe(clients.changed(), seed, timeout=DEADLINE + PAUSE)
        slow = single.observe(slowest, seed, timeout=DEADLINE)
        # Its own row may be lost; with it the sum changes by one client's, not by all clients'.
        lost = len(quick.sampled[0]) - len(slow.sampled[0])
        if lost > 1 or slow.released != quick.released or slow.ended:
            self.note("slowness", f"{lost} clients were left out with one that is slow")

    def send_messages(self) -> None:
        """Over messages: a reply that cannot be read must be a failure and nothing more."""
        target = self._small
        if target.shares or target.sides:
            return

        def run(last: Reply | Literal["fails"]) -> Observation:
            grid = message_grid(target.population, last=last)
            return target.observe(target.silent_clients(), self._seed, grid=grid)

        failing = run("fails")
        for name, reply in REPLIES.items():
            present = run(reply)
            self.compare(f"a canary that {name}", failing, present)
            if _moved(failing, present):
                self.note("releases", f"the release changed with a canary that {name}")
        self._send_rows(target.with_rounds(1))

    def _send_rows(self, single: StrategyTarget) -> None:
        """Updates that come as messages, once or twice, add what those of blocks add."""
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
            # A client's update is a difference of parameters in float64.
            size = np.abs(blocks.moves).max()
            if not np.allclose(blocks.moves, present.moves, rtol=0, atol=1e-6 * size):
                again = " that come twice" if twice else ""
                self.note("messages", f"replies{again} add something else than blocks of rows")


def _moved(before: Observation, after: Observation) -> bool:
    return not np.array_equal(before.moves, after.moves)
