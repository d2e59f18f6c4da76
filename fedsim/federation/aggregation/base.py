"""What an aggregation is: what the clients of a round are asked, and what becomes of their replies.

A strategy makes one for each round, and goes through it in this order::

    messages = aggregation.request(instructions)
    while (stage := aggregation.next_stage(replies)) is not None:  # most have one stage
        replies = grid.send_and_receive(stage)
    for reply in aggregation.replies(replies):
        aggregation.add(reply)
    ledger.record(..., aggregation.content())
    release = aggregation.release()

Nothing is drawn or released before the ledger has its line, and no engine, wrapper or loop knows
more of an aggregation than this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Message
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.federation.replies import ExpectedReply, Reply, read
from fedsim.federation.round_report import Tally
from fedsim.mechanisms import Mechanism, NoiseSource, PartialSum, Release, Releaser, State
from fedsim.mechanisms.base import state_on
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import Layout
from fedsim.rows.block import Ids
from fedsim.rows.exchange import DECLARED_EXAMPLES, Instructions, Replies

Floats = npt.NDArray[np.float64]
Placement = Literal["server", "client"]
"""Where noise is drawn: once on the sum, or in the shares of the clients asked."""


@dataclass(frozen=True)
class PendingRound:
    """A round that has been configured and not yet aggregated.

    Attributes
    ----------
    round : int
    client_ids : int64 ``[a]``
        Those of the cohort who were available and were asked, sorted.
    absent : int
        How many others were drawn.
    client_of : mapping of node id to client id
        Those who were asked.
    server : mapping of name to Tensor
        The global parameters, entries that are not trained included.
    vector : Tensor ``[d]``
        What rows are differences from.
    layout : Layout
        Of a row.
    state : State
        The mechanism's, as of this round.
    """

    round: int
    client_ids: Ids
    absent: int
    client_of: dict[int, int]
    server: dict[str, Tensor]
    vector: Tensor
    layout: Layout
    state: State


@dataclass(frozen=True)
class AggregationSettings:
    """What the aggregations of all rounds have in common.

    Attributes
    ----------
    plan : ReleasePlan
    randomness : Randomness
        Where a round's noise comes from.
    weighted_by_key, arrayrecord_key : str
        Of clients' replies.
    example_counts : float64 ``[population]``, optional
        Declared by client id; they weigh in place of what clients report.
    """

    plan: ReleasePlan[Mechanism]
    randomness: Randomness
    weighted_by_key: str
    arrayrecord_key: str
    example_counts: Floats | None = None
    _releasers: dict[tuple[Layout, str], Releaser] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def releaser(self, layout: Layout, device: torch.device | str = "cpu") -> Releaser:
        """Of a round's sum on this device; it has no state, so that one does for all rounds.

        Raises
        ------
        FedsimError
            If the noise and the mechanism do not go together.
        """
        key = layout, str(device)
        if key not in self._releasers:
            self._releasers[key] = Releaser(self.plan, layout, device=device)
        return self._releasers[key]

    def noise_source(self, purpose: Purpose, server_round: int, client: int = 0) -> NoiseSource:
        """The noise of a round: the server's, or one client's."""
        generator = self.randomness.generator(
            purpose, level="client", round=server_round, client=client
        )
        return NoiseSource(generator, hardened=self.plan.noise.hardened)


class Aggregation(ABC):
    """The aggregation of one round: from what its clients are asked to the release.

    A subclass says what becomes of a reply (`add`), and where it has them further stages, what
    its clients are told and the numbers that a reply must have.

    Parameters
    ----------
    settings : AggregationSettings
    pending : PendingRound

    Attributes
    ----------
    tally : Tally
        What became of each client that was asked.
    """

    placement: ClassVar[Placement] = "server"

    def __init__(self, settings: AggregationSettings, pending: PendingRound) -> None:
        self.settings, self.plan, self.pending = settings, settings.plan, pending
        self.tally = Tally(pending.client_ids, absent=pending.absent)
        self.releaser: Releaser
        self._total: PartialSum | None = None
        self._source: NoiseSource | None = None

    def request(self, instructions: Instructions) -> Instructions:
        """The first stage: the round's instructions, and what this aggregation adds to them."""
        counts = self.settings.example_counts
        if counts is None:
            return instructions
        declared = counts[instructions.client_ids].astype(int).tolist()
        return replace(instructions, numbers={DECLARED_EXAMPLES: declared})

    def next_stage(self, replies: Iterable[Message]) -> Iterable[Message] | None:
        """What clients are asked after these replies; None if the replies are the last ones."""
        return None

    def replies(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """The last stage's replies, read: each client at most once, and nobody who failed.

        Clients of fedsim's own engines are trained as this is iterated over.
        """
        if isinstance(messages, Replies):
            sent: Iterator[Reply] = map(Reply, messages.blocks())
        else:
            sent = read(messages, self.pending.client_of, self.expected(), self.tally)
        return self.counted(sent)

    @property
    def has_stages(self) -> bool:
        """Whether clients are asked more than once in a round."""
        return type(self).next_stage is not Aggregation.next_stage

    @abstractmethod
    def expected(self) -> ExpectedReply:
        """What a usable reply is like."""

    def counted(self, sent: Iterator[Reply]) -> Iterator[Reply]:
        """Those of the replies that may be added."""
        for reply in sent:
            block = self.tally.take(reply.block)
            reply = reply if block is reply.block else replace(reply, block=block)
            if len(block.client_ids):
                yield reply

    @property
    def shares_asked(self) -> int | None:
        """How many clients were asked for shares of the noise; None where the server draws it."""
        return None

    @abstractmethod
    def add(self, reply: Reply) -> Tensor:
        """Add a block's rows; which of its clients are now in the sum, bool ``[n]``."""

    @property
    def count(self) -> int:
        """How many clients are in the sum."""
        return self.total.count

    @property
    def total(self) -> PartialSum:
        """The sum; it lies where the first rows came, or where the parameters are."""
        return self.total_on(self.pending.vector.device)

    def total_on(self, device: torch.device) -> PartialSum:
        """The sum, which begins empty on this device if nothing was added before."""
        if self._total is None:
            self.releaser = self.settings.releaser(self.pending.layout, device)
            self._total = self.releaser.start(self.pending.state)
        return self._total

    @property
    def source(self) -> NoiseSource:
        """Of the release's noise, of which nothing leaves before the ledger has its line."""
        if self._source is None:
            self._source = self.settings.noise_source(Purpose.NOISE, self.pending.round)
        return self._source

    def content(self) -> Iterator[bytes]:
        """All of the round that its release follows from, but for the noise."""
        total = self.total
        shares = () if self.shares_asked is None else (self.shares_asked, self.count)
        yield repr((sorted(total.grids), sorted(total.before), shares)).encode()
        for name in sorted(total.before):
            yield _bytes(total.before[name])
        for name in sorted(total.grids):
            grid = total.grids[name]
            for tensor in (grid.radius, grid.coarse, grid.fine):
                yield b"" if tensor is None else _bytes(tensor)

    def release(self) -> Release:
        """The round's one release."""
        total = self.total
        return self.releaser.release(total, self.source, asked=self.shares_asked)


class MechanismState:
    """A mechanism's state over the rounds of a run, and the layout of the rows that it is about.

    Begins with the first parameters that are seen, or resumes an earlier run's.

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
        """For a checkpoint: ``parameters`` that it is about, and ``mechanism``."""
        if self.layout is None and self._restored is not None:
            return dict(self._restored)
        return {
            "parameters": None if self.layout is None else _described(self.layout),
            "mechanism": {name: value.clone() for name, value in self.values.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume what `state` gave; which model it is about is checked in the next round."""
        self.layout, self.values = None, {}
        self._restored = None
        if state["parameters"] is not None:
            self._restored = {name: state[name] for name in ("parameters", "mechanism")}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def _described(layout: Layout) -> list[list[object]]:
    """What a row is made of, as JSON says it."""
    return [[entry.name, list(entry.shape), str(entry.dtype)] for entry in layout.entries]
