"""The aggregation of masked shares: its stages, and the sum that alone can be unmasked.

Each client that is asked bounds its row and adds noise of variance ``z^2 C^2 / h``, where h is the
number of honest survivors that every sum has: the threshold less the colluders. What leaves a
client is that share as whole numbers modulo 2^64, under masks that cancel in the sum of those who
survive. Engines that train clients in this process add the same shares in the clear, to the same
bytes.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from fedsim.errors import FedsimError, printable
from fedsim.federation.aggregation.secagg.primitives import (
    KEY_BYTES,
    SHARE_BYTES,
    Words,
    agreed_key,
    derived_key,
    join_secret,
    mask,
    public_key,
)
from fedsim.federation.aggregation.secagg.transcript import (
    RECORD,
    SEALED_BYTES,
    byte_string,
    byte_strings,
    context_of,
    own_purpose,
    pair_purpose,
)
from fedsim.federation.aggregation.server_sum import AggregationSettings, PendingRound
from fedsim.federation.aggregation.shares import (
    FARTHEST,
    ShareSum,
    summed_grids,
)
from fedsim.federation.exchange import Instructions
from fedsim.federation.replies import Reply
from fedsim.mechanisms import PartialSum, Release
from fedsim.privacy.noise import share_multiplier
from fedsim.rows.block import Block
from fedsim.rows.exact import RowMasks

_log = logging.getLogger("fedsim")

Answer = TypeVar("Answer")
Stages = Generator[list[Message], Iterable[Message], None]


@dataclass(frozen=True)
class SecureAggregation:
    """How many clients a sum must be of.

    Parameters
    ----------
    threshold : int
        With fewer survivors nothing is unmasked, and the round is lost, and charged.
    colluders : int
        So many of them may tell the server what they know; the noise is that of the others.

    Raises
    ------
    FedsimError
        If nobody honest would be left.
    """

    threshold: int
    colluders: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.colluders < self.threshold or self.threshold < 2:
            raise FedsimError(
                f"secagg.threshold = {self.threshold} with secagg.colluders = {self.colluders}; "
                "it must be at least 2, and more than the colluders."
            )

    @property
    def public(self) -> dict[str, int]:
        """What a ledger's line says of it."""
        return {"secagg-threshold": self.threshold, "secagg-colluders": self.colluders}

    @property
    def honest(self) -> int:
        """Honest survivors that every sum has: their shares' noise is what is charged."""
        return self.threshold - self.colluders


class SecureSum(ShareSum):
    """Sums shares of which the server sees none: under masks, or where this process makes them.

    Parameters
    ----------
    secure : SecureAggregation
    settings : AggregationSettings
    pending : PendingRound
    """

    def __init__(
        self, secure: SecureAggregation, settings: AggregationSettings, pending: PendingRound
    ) -> None:
        super().__init__(settings, pending, secure.honest)
        self._secure = secure
        self._stages: Stages | None = None
        self._why_lost: str | None = None
        self._failed: list[Block] = []
        self._survivors: list[int] = []

    # -- the stages ---------------------------------------------------------------------

    def request(self, instructions: Instructions) -> Iterable[Message]:
        """Where clients answer messages, the first stage; else the round's own instructions."""
        whole = self.share_instructions(instructions)
        if self.pending.in_blocks:
            return whole
        self._stages = self._protocol(whole)
        return next(self._stages)

    def next_stage(self, replies: Iterable[Message]) -> Iterable[Message] | None:
        """The stage after these replies; None after the last, and once the round is lost."""
        if self._stages is None:
            return None
        try:
            return self._stages.send(replies)
        except StopIteration:
            self._stages = None
            return None

    def _protocol(self, instructions: Instructions) -> Stages:
        """Sends each stage, takes its replies, and ends with the sum or with why there is none."""
        node_of = dict(
            zip(instructions.client_ids.tolist(), instructions.node_ids.tolist(), strict=True)
        )
        run = str(instructions.config.get("run", ""))
        context = context_of(run, self.pending.round, secrets.token_bytes(16))

        def asked(stage: str, entries: Mapping[int, Mapping[str, object]]) -> list[Message]:
            beside = {"stage": stage, "context": context}
            return [
                Message(
                    RecordDict({RECORD: ConfigRecord({**beside, **entry})}),  # type: ignore[dict-item]
                    node_of[client],
                    instructions.message_type,
                )
                for client, entry in entries.items()
            ]

        replies = yield asked("keys", {client: {} for client in node_of})
        keys = self._answers(
            replies,
            [*node_of],
            lambda r: [byte_string(r, f"{name}-key", KEY_BYTES) for name in ("mask", "channel")],
        )
        if not self._enough(clients := sorted(keys), "sent keys"):
            return
        listed = {
            "clients": clients,
            "mask-keys": [keys[client][0] for client in clients],
            "channel-keys": [keys[client][1] for client in clients],
        }
        replies = yield asked("shares", dict.fromkeys(clients, listed))
        sealed = self._answers(
            replies, clients, lambda r: byte_strings(r, "sealed", len(clients), SEALED_BYTES)
        )
        if not self._enough(senders := sorted(sealed), "shared their keys"):
            return
        masked_stage = {}
        for client in senders:
            others = [other for other in senders if other != client]
            place = clients.index(client)
            received = [sealed[other][place] for other in others]
            masked_stage[client] = {"senders": others, "sealed": received}
        replies = yield self._with_instructions(asked("masked", masked_stage), instructions)
        sums = self.total
        size = sum(grid.coarse.shape[-1] for grid in summed_grids(sums).values())
        masked = self._answers(
            replies,
            senders,
            lambda r: np.frombuffer(byte_string(r, "masked", 8 * size), dtype="<u8"),
        )
        if not self._enough(survivors := sorted(masked), "sent their masked shares"):
            return
        replies = yield asked("unmask", {client: {"survivors": survivors} for client in survivors})
        shares = self._answers(
            replies, survivors, lambda r: byte_strings(r, "shares", len(senders), SHARE_BYTES)
        )
        if not self._enough(sorted(shares), "helped to unmask their sum"):
            return
        points = {client: clients.index(client) + 1 for client in clients}
        chosen = sorted(shares)[: self._secure.threshold]
        gathered = {
            other: {points[c]: int.from_bytes(shares[c][k]) for c in chosen}
            for k, other in enumerate(senders)
        }
        try:
            total = unmasked(masked, gathered, {c: keys[c][0] for c in senders}, context)
            self._take(sums, total, len(survivors))
        except FedsimError as error:
            self._why_lost = f"the sum cannot be unmasked: {error}"
            return
        self._survivors = survivors

    def _with_instructions(
        self, messages: list[Message], instructions: Instructions
    ) -> list[Message]:
        """These messages, with what clients train by."""
        chosen = {message.metadata.dst_node_id: message for message in messages}
        for whole in instructions:
            if (message := chosen.get(whole.metadata.dst_node_id)) is not None:
                for name, record in whole.content.items():
                    message.content[name] = record
        return messages

    def _answers(
        self,
        replies: Iterable[Message],
        asked: list[int],
        parse: Callable[[ConfigRecord], Answer],
    ) -> dict[int, Answer]:
        """What those who were asked answered; who answers with anything else is out."""
        client_of, left = self.pending.recipients.client_of, {*asked}
        answers: dict[int, Answer] = {}
        for reply in replies:
            client = client_of.get(reply.metadata.src_node_id)
            if client is None or client not in left:
                continue
            left.discard(client)
            try:
                if reply.has_error():
                    raise FedsimError(str(reply.error.reason))
                answers[client] = parse(reply.content.config_records[RECORD])
            except Exception as error:  # what a reply is made of may raise anything
                _log.warning("client %s is out of the round: %s", client, printable(error))
                ids = np.array([client], dtype=np.int64)
                self._failed.append(Block.failed(ids, "malformed"))
        return answers

    def _enough(self, clients: list[int], what: str) -> bool:
        """Whether so many are left that the sum may be unmasked."""
        if len(clients) >= self._secure.threshold:
            return True
        self._why_lost = self._too_few(len(clients), what)
        return False

    def _too_few(self, count: int, what: str) -> str:
        return (
            f"{count} clients {what}, of the secagg.threshold = {self._secure.threshold} that a "
            "sum must have"
        )

    # -- the sum ------------------------------------------------------------------------

    @property
    def lost(self) -> str | None:
        """Why there is no sum, where that is so."""
        if self.pending.in_blocks and self.total.count < self._secure.threshold:
            return self._too_few(self.total.count, "sent their shares")
        return self._why_lost

    def replies(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """Blocks where this process trains; else who is in the sum, of whom no more is known."""
        if self.pending.in_blocks:
            yield from super().replies(messages)
            return
        ids = np.array(self._survivors, dtype=np.int64)
        for block in (*self._failed, Block.sent(ids, None, {})):
            if len((taken := self.tally.take(block)).client_ids):
                yield Reply(taken)

    def add(self, reply: Reply) -> Reply:
        """Add the shares that a block's clients would have sent, whether their rows were finite
        or not: who sends a row that is not adds noise alone, and nobody else learns of it.
        """
        if reply.block.rows is None:
            everyone = torch.ones(len(reply.block.client_ids), dtype=torch.bool)
            return replace(reply, block=replace(reply.block, usable=everyone))
        block = self.without_failed(reply.block)
        assert block.rows is not None
        total = self.sum_on(block.rows.device).total
        if len(block.client_ids):
            units = self.shares_of(block).units
            for name, grid in summed_grids(total).items():
                grid.add_(units[name])
        usable = _count(total, len(block.client_ids))
        return replace(reply, block=replace(block, rows=None, usable=usable))

    def release(self) -> Release:
        """The round's one release: the shares have brought all of its noise."""
        rows = self.sum_on(self.pending.vector.device)
        return rows.releaser.release(rows.total, self._noise_source(), asked=rows.total.count)

    def _take(self, sums: PartialSum, words: Words, count: int) -> None:
        """Add an unmasked sum of so many shares.

        Raises
        ------
        FedsimError
            If so many shares cannot have such a sum: some masks have not been removed.
        """
        start = 0
        units = torch.from_numpy(words.view(np.int64).astype(np.float64))
        for name, grid in summed_grids(sums).items():
            size = grid.coarse.shape[-1]
            vector, start = units[start : start + size], start + size
            radius, unit = float(grid.radius), float(grid.unit)
            std = radius * share_multiplier(sums.terms.split[name], self.share_request.asked)
            most = radius * count + FARTHEST * std * math.sqrt(count)
            if float(vector.abs().max()) * unit > most:
                raise FedsimError("it is none that so many bounded shares can have.")
            grid.add_(vector[None])
        _count(sums, count)


def _count(total: PartialSum, shares: int) -> Tensor:
    """Note so many shares, all of them in the sum."""
    total.expect(shares)
    masks = RowMasks((shares,), total.terms.device)
    total.note(masks)
    return masks.usable


def unmasked(
    masked: Mapping[int, Words],
    shares: Mapping[int, Mapping[int, int]],
    mask_keys: Mapping[int, bytes],
    context: bytes,
) -> Words:
    """The sum of the survivors' vectors.

    Parameters
    ----------
    masked : mapping of client to uint64 ``[d]``
        Of the survivors.
    shares : mapping of client to shares by their points
        Of a survivor's seed, and of the mask key of one that is gone.
    mask_keys : mapping of client to bytes
        Public ones, of all who are in others' masks.

    Raises
    ------
    FedsimError
        If shares do not fit together, or are not of the key that was announced.
    """
    total = np.add.reduce([np.asarray(vector) for vector in masked.values()])
    size = len(total)
    for client in masked:
        seed = join_secret(shares[client])
        total = total - mask(derived_key(seed, own_purpose(context)), size)
    for gone in mask_keys.keys() - masked.keys():
        key = join_secret(shares[gone])
        if public_key(key) != mask_keys[gone]:
            raise FedsimError("shares of a key are not of the one that was announced.")
        for client in masked:
            purpose = pair_purpose(context, mask_keys[gone], mask_keys[client])
            common = mask(agreed_key(key, mask_keys[client], purpose), size)
            total = total - common if client < gone else total + common
    return np.asarray(total, dtype=np.uint64)
