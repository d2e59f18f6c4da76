"""The aggregation of one round: what its clients are asked, and how their replies are combined.

A strategy creates one for each round, and calls it in this order::

    messages = aggregation.request()
    while (stage := aggregation.next_stage(replies)) is not None:  # most have one stage
        replies = grid.send_and_receive(stage)
    for reply in aggregation.replies(replies):
        aggregation.add(reply)
    ledger.record(...)  # where clients add noise, before the first message
    release = aggregation.release()

Nothing is released before its ledger line is on disk, and engines, wrappers and loops use no other
methods of an aggregation. `ServerSum` is the basic one: the server bounds and adds the rows that
clients send, and draws the noise. Other aggregations change one or two of its steps.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor

from fedsim.array_types import Floats
from fedsim.federation.aggregation.robust import RobustMean
from fedsim.federation.exchange import Instructions, RecordKeys, Replies
from fedsim.federation.replies import Reply, changed_whole_numbers, read_replies
from fedsim.federation.round_report import Tally
from fedsim.federation.row_sums import Summing
from fedsim.mechanisms import Mechanism, NoiseSource, PartialSum, Release, Releaser, State
from fedsim.mechanisms.releaser import prefetched
from fedsim.privacy.noise import Noise
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import Layout
from fedsim.rows.block import DECLARED_EXAMPLES, Block

_log = logging.getLogger("fedsim")


class NoiseSources:
    """Sources of each round's noise.

    Noise that is correlated over rounds needs the draws of earlier rounds again, also in a process
    that resumes the run. With entropy from the operating system all draws are therefore keyed by
    256-bit secrets: one from round 1 on, and a fresh one from the first round after each resume on,
    so that two resumes of one checkpoint draw independent noise. They are stored only in `state`:
    with them, the noise could be subtracted from all releases.
    """

    def __init__(self, randomness: Randomness, noise: Noise) -> None:
        self._randomness, self._noise = randomness, noise
        self._secrets: list[tuple[int, str]] = []  # the first round of each, and the secret
        if noise.correlated and randomness.seed is None:
            self._secrets = [(1, secrets.token_hex(32))]

    def _randomness_of(self, draw_round: int) -> Randomness:
        """The source of a round's draws."""
        if not self._secrets:
            return self._randomness
        # A round keeps the secret under which it was drawn first.
        return Randomness(0, [secret for first, secret in self._secrets if first <= draw_round][-1])

    def round_source(self, server_round: int) -> NoiseSource:
        """The source of this round's noise; call it once a round, or noise would be drawn twice."""
        generator = self._generator(server_round, 0, 0)
        other_generators = partial(self._generator, server_round)
        return NoiseSource(generator, self._noise.hardened, server_round, other_generators)

    def _generator(self, server_round: int, age: int, number: int) -> np.random.Generator:
        draw_round = server_round - age
        randomness = self._randomness_of(draw_round)
        # Correlated noise uses the draws of earlier rounds (age > 0) again. Every other address is
        # used once; `for_replay` marks the exception.
        randomness = randomness.for_replay() if age else randomness
        return randomness.generator(Purpose.NOISE, level="client", round=draw_round, part=number)

    def state(self) -> dict[str, Any] | None:
        """The secrets that a resumed run needs: the only ones in a strategy's state."""
        if not self._noise.correlated:
            return None
        return {"secrets": [[first, secret] for first, secret in self._secrets]}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state`; its rounds keep their secrets."""
        if state is not None:
            self._secrets = [(int(first), str(secret)) for first, secret in state["secrets"]]

    def renew_secret(self, first_round: int) -> None:
        """Draw the noise of all rounds from ``first_round`` on under a fresh secret."""
        if self._secrets:
            earlier = [pair for pair in self._secrets if pair[0] < first_round]
            self._secrets = [*earlier, (first_round, secrets.token_hex(32))]


@dataclass
class AggregationSettings:
    """Settings that the aggregations of all rounds share.

    Parameters
    ----------
    plan : ReleasePlan
    randomness : Randomness
        Randomness of the run.
    keys : RecordKeys
    example_counts : float64 ``[population]``, optional
        Declared number of examples by client id, used as weights in place of what clients report.

    Attributes
    ----------
    noise : NoiseSources
        Sources of the noise of each round.
    """

    plan: ReleasePlan[Mechanism]
    randomness: Randomness
    keys: RecordKeys
    example_counts: Floats | None = None

    def __post_init__(self) -> None:
        self.noise = NoiseSources(self.randomness, self.plan.noise)
        self._releasers: dict[tuple[Layout, str], Releaser] = {}

    def releaser(self, layout: Layout, device: torch.device | str = "cpu") -> Releaser:
        """The releaser of a round's sum on this device; stateless, so that all rounds share it.

        Raises
        ------
        FedsimError
            If the noise and the mechanism are incompatible.
        """
        key = layout, str(device)
        if key not in self._releasers:
            self._releasers[key] = Releaser(self.plan, layout, device=device)
        return self._releasers[key]


@dataclass(eq=False)
class ServerSum:
    """Bounds, weights and sums the rows that clients send, and adds noise to the sum once.

    Where an engine's workers train the clients, they also bound and sum the rows, as `Summing`
    describes; their sums merge exactly, so that the bytes do not depend on the workers.

    Parameters
    ----------
    settings : AggregationSettings
    instructions : Instructions
        The round's instructions, to which the aggregation adds what its clients need.
    state : State
        State of the mechanism in this round.
    in_blocks : bool
        Whether the grid trains clients in blocks rather than message by message.

    Attributes
    ----------
    tally : Tally
        Outcome of each client that was asked.
    summing : Summing
        How rows are bounded, weighted and added up.
    releaser : Releaser
        Releaser of the round's sum, on its device; there is none before the sum (`sum_on_device`).
    """

    sums_on_workers: ClassVar[bool] = True
    """Whether a worker may sum the rows of the clients that it trains."""
    charged_before_request: ClassVar[bool] = False
    """Whether clients add the noise, so that a release leaves them with their first replies: it is
    then on record before they are asked, and otherwise before the sum gets its noise."""
    settings: AggregationSettings
    instructions: Instructions
    state: State
    in_blocks: bool
    releaser: Releaser = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.plan, recipients = self.settings.plan, self.instructions.recipients
        counts, ids = self.settings.example_counts, recipients.client_ids
        counts = None if counts is None else counts[ids]
        declared, weights = counts, self.plan.relative_weights
        if weights:  # of the cohort alone: a round's time must not grow with the population
            declared = np.array([weights[client] for client in ids.tolist()], dtype=np.float64)
        self.tally = Tally(ids, absent=recipients.absent)
        assert self.instructions.layout is not None  # since it is no evaluation
        weighs = self.plan.mechanism.weighting == "num-examples" or bool(self.plan.weights)
        self.summing = Summing(
            self.plan,
            self.instructions.layout,
            self.state,
            self.settings.keys.weighted_by if weighs else None,
            None if declared is None else (ids, declared),
            asked=len(ids),
        )
        self.instructions = replace(
            self.instructions,
            numbers={} if counts is None else {DECLARED_EXAMPLES: counts.astype(int).tolist()},
            summing=self.summing if self.sums_on_workers else None,
        )
        self._sum: PartialSum | None = None
        self._prefetched_noise: NoiseSource | None = None

    @property
    def missing_noise(self) -> float:
        """The part of the noise's variance that the server adds, from 0 to 1."""
        return 1.0

    @property
    def why_lost(self) -> str | None:
        """Why the round has no sum (it is charged, and nothing is released); None if it has one."""
        return None

    def request(self) -> Iterable[Message]:
        """The messages of the first stage, which is the only one of most aggregations."""
        return self.instructions

    def next_stage(self, replies: Iterable[Message]) -> Iterable[Message] | None:
        """The messages of the next stage, given these replies; None after the last stage."""
        return None

    def replies(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """Decode the last stage's replies: each client at most once, without failed clients.

        fedsim's own engines train their clients as this is iterated over. Rows that workers have
        summed are already merged into `total`, and missing from the replies.
        """
        if not isinstance(messages, Replies):
            decoded = self.read(messages)
        elif not (self.sums_on_workers and messages.sums):
            decoded = map(Reply, messages.blocks())
        else:
            total = self.total
            decoded = map(Reply, messages.blocks(total))
            # While workers train, this process only waits, so that it can draw the noise. The noise
            # is not used before the ledger line is on disk.
            self._prefetched_noise = prefetched(self._noise_source(), self.releaser.draw_sizes)
        for reply in decoded:
            block = self.tally.accept(reply.block)
            if len(block.client_ids):
                yield replace(reply, block=block)

    def _noise_source(self) -> NoiseSource:
        return self.settings.noise.round_source(self.instructions.round)

    def read(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """Decode messages; they must have parameters, and the numbers that enter the sum."""
        replies = read_replies(
            messages, self.instructions, self.tally, needed=self.summing.reported
        )
        if self.instructions.round != 1 or self.plan.private:
            return replies
        return self._warn_of_whole_numbers(replies)

    def _warn_of_whole_numbers(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """The replies; a line in the log at the first that changes entries which are not averaged.

        Flower's strategies average them too.
        """
        names: list[str] = []
        for reply in replies:
            if not names and reply.content is not None:
                names = changed_whole_numbers(reply.content, self.instructions)
                if names:
                    _log.warning(
                        "clients change %s, of whole numbers, which are not averaged: the model "
                        "keeps its own values.",
                        ", ".join(names),
                    )
            yield reply

    def add(self, reply: Reply) -> Reply:
        """Add a block's rows to the sum, unless workers have added them already.

        Returns
        -------
        Reply
            The reply without failed clients; those in the sum are True in the block's ``usable``.
        """
        block = reply.block
        if block.rows is not None:
            total = self.sum_on_device(block.rows.device)
            block = self.without_failed(self.summing.add(block, total))
        assert block.usable is not None
        weights = self.summing.weights(block)
        # A client without examples has weight 0: it is not in the sum, but has not failed.
        has_weight = slice(None) if weights is None else weights > 0
        self.tally.reject_later(
            block.client_ids[has_weight], block.usable[has_weight], "non-finite"
        )
        return replace(reply, block=block)

    def without_failed(self, block: Block) -> Block:
        """The clients of a block that have not failed; the others are counted in the tally."""
        for client, reason in block.reasons.items():
            self.tally.reject(np.array([client]), reason)
        return block.select(block.ok) if block.reasons else block

    def sum_on_device(self, device: torch.device) -> PartialSum:
        """Sum of the rows added so far, which the first call creates on this device."""
        if self._sum is None:
            self.releaser = self.settings.releaser(self.summing.layout, device)
            self._sum = self.summing.start(self.releaser)
        return self._sum

    @property
    def total(self) -> PartialSum:
        """Sum of the rows added so far."""
        return self.sum_on_device(self.instructions.vector.device)

    def release(self) -> Release:
        """The round's one release."""
        total, source = self.total, self._prefetched_noise or self._noise_source()
        return self.releaser.release(total, source, missing=self.missing_noise)


Aggregation = Callable[[AggregationSettings, Instructions, State, bool], ServerSum]
"""Callable that creates the aggregation of a round; its arguments are those of `ServerSum`."""


@dataclass(eq=False)
class RobustAggregation(ServerSum):
    """Stores the usable rows of a round, and releases their robust mean in place of their mean.

    The rows are summed as well, which checks whether they are usable, and counts them.
    """

    sums_on_workers: ClassVar[bool] = False

    _client_ids: list[int] = field(default_factory=list, init=False)
    _rows: list[Tensor] = field(default_factory=list, init=False)

    def add(self, reply: Reply) -> Reply:
        """Store the rows of the usable clients."""
        rows, added = reply.block.rows, super().add(reply)
        assert rows is not None
        assert added.block.usable is not None
        # Without weights and scalars the sum leaves no client out of the block: `usable` still has
        # one entry a row.
        usable = added.block.usable
        self._client_ids += added.block.client_ids[usable.cpu().numpy()].tolist()
        self._rows.append(rows[usable.to(rows.device)])
        return added

    def release(self) -> Release:
        """The robust mean, of rows in the order of client ids; zero if there are no rows."""
        release = super().release()
        if not self._client_ids:
            return release
        order = torch.tensor(self._client_ids).argsort()
        rows = torch.cat(self._rows)
        assert isinstance(self.plan.mechanism, RobustMean)
        return replace(release, mean=self.plan.mechanism.center(rows[order.to(rows.device)]))
