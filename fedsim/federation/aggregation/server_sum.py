"""The aggregation of one round: what its clients are asked, and what becomes of their replies.

A strategy makes one for each round, and goes through it in this order::

    messages = aggregation.request(instructions)
    while (stage := aggregation.next_stage(replies)) is not None:  # most have one stage
        replies = grid.send_and_receive(stage)
    for reply in aggregation.replies(replies):
        aggregation.add(reply)
    ledger.record(..., aggregation.content())
    release = aggregation.release()

Nothing is drawn or released before the ledger has its line, and no engine, wrapper or loop knows
more of an aggregation than this. `ServerSum` is the plain one: the server bounds and adds the rows
that clients send, and draws the noise. Other aggregations change one or two of its steps.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor

from fedsim.federation.aggregation.robust import RobustMean
from fedsim.federation.exchange import Instructions, Recipients, Replies
from fedsim.federation.replies import ExpectedReply, RecordKeys, Reply, read
from fedsim.federation.round_report import Tally
from fedsim.federation.row_sums import Floats, RowSum, Summing
from fedsim.mechanisms import Mechanism, NoiseSource, PartialSum, Release, Releaser, State
from fedsim.mechanisms.releaser import NUMBERS, prefetched
from fedsim.privacy.noise import Noise
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import Layout
from fedsim.rows.block import DECLARED_EXAMPLES, Block


@dataclass(frozen=True)
class PendingRound:
    """A round that has been configured and not yet aggregated.

    Attributes
    ----------
    round : int
    recipients : Recipients
        Those of the cohort that are sent messages.
    server : mapping of name to Tensor
        The global parameters, entries that are not trained included.
    vector : Tensor ``[d]``
        What rows are differences from.
    layout : Layout
        Of a row.
    state : State
        The mechanism's, as of this round.
    in_blocks : bool
        Whether the grid trains clients in this process, in blocks, and not message by message.
    """

    round: int
    recipients: Recipients
    server: dict[str, Tensor]
    vector: Tensor
    layout: Layout
    state: State
    in_blocks: bool = False


class NoiseSources:
    """Sources of a noise, round by round.

    Noise that is correlated over rounds needs the draws of earlier rounds again, also in a process
    that resumes the run. With entropy from the operating system all draws are therefore keyed by
    one 256-bit secret of the plan, which is in `state` and nowhere else.
    """

    def __init__(self, randomness: Randomness, noise: Noise) -> None:
        self._randomness, self._noise = randomness, noise
        self._secret = ""
        self._attempts: dict[int, int] = {}
        if noise.correlated and randomness.seed is None:
            self._take_secret(secrets.token_hex(32))

    def _take_secret(self, secret: str) -> None:
        self._secret, self._randomness = secret, Randomness(0, secret)

    def share(self, server_round: int, client: int) -> NoiseSource:
        """The source of a client's share of this round's noise."""
        generator = self._randomness.generator(
            Purpose.SHARE, level="client", round=server_round, client=client
        )
        return NoiseSource(generator, self._noise.hardened)

    def of_round(self, server_round: int) -> NoiseSource:
        """The source of this round's noise; to be called once a round."""
        generator = self._generator(server_round, 0, 0)
        elsewhere = partial(self._generator, server_round)
        return NoiseSource(generator, self._noise.hardened, server_round, elsewhere)

    def _generator(self, server_round: int, age: int, number: int) -> np.random.Generator:
        randomness = self._randomness.repeated() if age else self._randomness
        drawn_in = server_round - age
        # An attempt's draws follow those of the one before.
        part = self._attempts.get(drawn_in, 0) * NUMBERS + number
        return randomness.generator(Purpose.NOISE, level="client", round=drawn_in, part=part)

    def begin(self, server_round: int, attempt: int) -> None:
        """Use other addresses for a round that was drawn ``attempt`` times before."""
        if attempt:
            self._attempts[server_round] = attempt

    def state(self) -> dict[str, Any] | None:
        """What a resumed run needs; a secret, unlike the rest of a strategy's state."""
        if not self._noise.correlated:
            return None
        return {"secret": self._secret, "attempts": {str(r): n for r, n in self._attempts.items()}}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from what `state` gave."""
        if state is None:
            return
        self._attempts = {int(r): n for r, n in state["attempts"].items()}
        if state["secret"]:
            self._take_secret(state["secret"])


@dataclass
class AggregationSettings:
    """What the aggregations of all rounds have in common.

    Parameters
    ----------
    plan : ReleasePlan
    randomness : Randomness
        Where a run's draws come from.
    keys : RecordKeys
    example_counts : float64 ``[population]``, optional
        Declared by client id; they weigh in place of what clients report.

    Attributes
    ----------
    noise : NoiseSources
        Where a round's noise comes from.
    """

    plan: ReleasePlan[Mechanism]
    randomness: Randomness
    keys: RecordKeys
    example_counts: Floats | None = None

    def __post_init__(self) -> None:
        self.noise = NoiseSources(self.randomness, self.plan.noise)
        self._releasers: dict[tuple[Layout, str], Releaser] = {}

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


class ServerSum:
    """Rows that clients send are bounded, weighted and summed, and noised once.

    Where workers of an engine train the clients, they bound and sum the rows there and then:
    `Summing` goes to them, and what comes back merges exactly, so that bytes do not depend on who
    summed what.

    Parameters
    ----------
    settings : AggregationSettings
    pending : PendingRound

    Attributes
    ----------
    tally : Tally
        What became of each client that was asked.
    """

    on_workers: ClassVar[bool] = True
    """Whether a worker may sum the rows of the clients that it trains."""
    shares_asked: int | None = None
    """How many clients were asked for shares of the noise; None where the server draws it."""

    def __init__(self, settings: AggregationSettings, pending: PendingRound) -> None:
        self.settings, self.plan, self.pending = settings, settings.plan, pending
        self.tally = Tally(pending.recipients.client_ids, absent=pending.recipients.absent)
        counts, ids = settings.example_counts, pending.recipients.client_ids
        self.summing = Summing(
            settings.plan,
            pending.layout,
            pending.state,
            settings.keys.weighted_by if settings.plan.bound.weighting == "num-examples" else None,
            None if counts is None else (ids, counts[ids]),
            asked=len(ids),
        )
        self._sum: RowSum | None = None
        self._drawn_ahead: NoiseSource | None = None

    @property
    def lost(self) -> str | None:
        """Why the round has no sum, where that is so; it is charged, and nothing is released."""
        return None

    def request(self, instructions: Instructions) -> Iterable[Message]:
        """The messages of the first stage, which for most is the only one."""
        return self.training(instructions)

    def training(self, instructions: Instructions) -> Instructions:
        """The round's instructions for clients that train, with what this aggregation adds."""
        if self.summing.declared is None:
            return instructions
        declared = self.summing.declared[1].astype(int).tolist()
        return replace(instructions, numbers={DECLARED_EXAMPLES: declared})

    def next_stage(self, replies: Iterable[Message]) -> Iterable[Message] | None:
        """What clients are asked after these replies; None if the replies are the last ones."""
        return None

    def replies(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """The last stage's replies: each client at most once, and none that has failed.

        Clients of fedsim's own engines are trained as this is iterated over. From workers, rows
        come added up already, and the replies are without.
        """
        if not isinstance(messages, Replies):
            sent = read(messages, self.pending.recipients.client_of, self.expected(), self.tally)
        elif not (self.on_workers and messages.sums):
            sent = map(Reply, messages.blocks())
        else:
            into = self.sum_on(self.pending.vector.device)
            sent = map(Reply, messages.blocks(into))
            # Workers train, and this process only waits for them: it draws the noise meanwhile.
            # None of it is used before the ledger has its line.
            self._drawn_ahead = prefetched(
                self._noise_source(), into.releaser.draw_sizes(into.total)
            )
        for reply in sent:
            block = self.tally.take(reply.block)
            if len(block.client_ids):
                yield replace(reply, block=block)

    def _noise_source(self) -> NoiseSource:
        return self.settings.noise.of_round(self.pending.round)

    def expected(self) -> ExpectedReply:
        """What a usable reply is like: the clients' parameters, and numbers that enter the sum."""
        return ExpectedReply(
            self.pending.layout,
            self.pending.vector,
            self.settings.keys,
            needed=self.summing.reported,
        )

    def add(self, reply: Reply) -> Reply:
        """Add a block's rows; the reply of those who may be in the sum, and in it are `usable`.

        What workers have added passes through.
        """
        block = reply.block
        if block.rows is not None:
            block = self.without_failed(self.sum_on(block.rows.device).add(block))
        assert block.usable is not None
        weights = self.summing.weights(block)
        # Without examples a client weighs nothing, which is no failure.
        counted = slice(None) if weights is None else weights > 0
        self.tally.doubt(block.client_ids[counted], block.usable[counted], "non-finite")
        return replace(reply, block=block)

    def without_failed(self, block: Block) -> Block:
        """The clients that have not failed; the others are noted."""
        for client, reason in block.reasons.items():
            self.tally.reject(np.array([client]), reason)
        return block.select(block.ok) if block.reasons else block

    def sum_on(self, device: torch.device) -> RowSum:
        """The sum; it lies where the first rows came, or where the parameters are."""
        if self._sum is None:
            releaser = self.settings.releaser(self.pending.layout, device)
            self._sum = RowSum(self.summing, releaser)
        return self._sum

    @property
    def total(self) -> PartialSum:
        """What has been added so far."""
        return self.sum_on(self.pending.vector.device).total

    def content(self) -> Iterator[bytes]:
        """All of the round that its release follows from, but for the noise."""
        total = self.total
        return total.content(() if self.shares_asked is None else (self.shares_asked, total.count))

    def release(self) -> Release:
        """The round's one release."""
        rows = self.sum_on(self.pending.vector.device)
        source = self._drawn_ahead or self._noise_source()
        return rows.releaser.release(rows.total, source, asked=self.shares_asked)


class RobustAggregation(ServerSum):
    """Keeps the usable rows of a round, and releases their centre in place of their mean.

    Which rows are usable the plain sum says: what may enter a robust mean may enter a mean.
    """

    on_workers: ClassVar[bool] = False

    def __init__(
        self, mean: RobustMean, settings: AggregationSettings, pending: PendingRound
    ) -> None:
        super().__init__(settings, pending)
        self._mean = mean
        self._client_ids: list[int] = []
        self._rows: list[Tensor] = []

    def add(self, reply: Reply) -> Reply:
        """Keep the rows of those who are usable."""
        rows, added = reply.block.rows, super().add(reply)
        assert rows is not None
        assert added.block.usable is not None
        # No weight or scalar enters a robust mean, so that nobody was left out of the block.
        usable = added.block.usable
        self._client_ids += added.block.client_ids[usable.cpu().numpy()].tolist()
        self._rows.append(rows[usable.to(rows.device)])
        return added

    def release(self) -> Release:
        """The robust mean, in the order of client ids; without rows the mean of none, zero."""
        release = super().release()
        if not self._client_ids:
            return release
        order = torch.tensor(self._client_ids).argsort()
        rows = torch.cat(self._rows)
        return replace(release, mean=self._mean.center(rows[order.to(rows.device)]))
