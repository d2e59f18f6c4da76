"""The aggregation of masked shares: the stages of the protocol, and the unmasking of the sum.

Each sampled client bounds its row and adds noise of variance ``z^2 C^2 / h``, where h is the
minimum number of honest survivors: the threshold less the colluders. It sends that share as whole
numbers modulo 2^64, under masks that cancel in the sum over the survivors: the clients whose masked
shares have arrived. Engines that train clients in this process add the same shares without masks,
with the same bytes as result.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from fedsim.errors import FedsimError, printable
from fedsim.federation.aggregation.secagg.protocol import (
    KEY_BYTES,
    RECORD,
    SEALED_BYTES,
    SHARE_BYTES,
    Words,
    agreed_key,
    byte_string,
    byte_strings,
    context_of,
    derived_key,
    join_secret,
    mask,
    own_purpose,
    pair_purpose,
    public_key,
)
from fedsim.federation.aggregation.share_sums import MAX_DEVIATIONS, ShareSum
from fedsim.federation.aggregation.shares import share_multiplier, share_sizes, split
from fedsim.federation.replies import Reply, error_reason
from fedsim.mechanisms import PartialSum, Release
from fedsim.privacy.placement import SecureAggregation
from fedsim.rows.block import Block, Reason
from fedsim.rows.exact import RowMasks

_log = logging.getLogger("fedsim")

Answer = TypeVar("Answer")
Stages = Generator[list[Message], Iterable[Message], None]


@dataclass(eq=False)
class SecureSum(ShareSum):
    """Sums shares that are masked in messages, or made in this process without masks."""

    _stages: Stages | None = field(default=None, init=False)
    _why_lost: str | None = field(default=None, init=False)
    _failed: dict[int, Reason] = field(default_factory=dict, init=False)
    _survivors: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.plan.placement, SecureAggregation)
        self.secure = self.plan.placement

    # -- the stages ---------------------------------------------------------------------

    def request(self) -> Iterable[Message]:
        """Messages of the protocol's first stage; plain instructions for an engine with blocks."""
        if self.in_blocks:
            return self.instructions
        self._stages = self._protocol()
        return next(self._stages)

    def next_stage(self, replies: Iterable[Message]) -> Iterable[Message] | None:
        """The stage after these replies; None after the last one, or if the round is lost."""
        if self._stages is None:
            return None
        try:
            return self._stages.send(replies)
        except StopIteration:
            self._stages = None
            return None

    def _protocol(self) -> Stages:
        """Run the stages in order; each yields its messages and receives the replies.

        Ends with the unmasked sum added to `total`, or with `why_lost` set.
        """
        instructions, node_of = self.instructions, self.instructions.recipients.node_of
        # The nonce separates attempts at a round: keys, sealed shares and masks of one attempt are
        # useless in another, also if the server resumes.
        run = str(instructions.config.get("run", ""))
        context = context_of(run, instructions.round, secrets.token_bytes(16))

        def messages(stage: str, entries: Mapping[int, Mapping[str, object]]) -> list[Message]:
            common = {"stage": stage, "context": context}
            return [
                Message(
                    RecordDict({RECORD: ConfigRecord({**common, **entry})}),  # type: ignore[dict-item]
                    node_of[client],
                    instructions.message_type,
                )
                for client, entry in entries.items()
            ]

        replies = yield messages("keys", {client: {} for client in node_of})
        keys = self._answers(
            replies,
            [*node_of],
            lambda r: [byte_string(r, f"{name}-key", KEY_BYTES) for name in ("mask", "channel")],
        )
        if not self._has_enough(clients := sorted(keys), "sent keys"):
            return
        # Every client gets the same lists. Its position in them (plus 1) is its point in the secret
        # sharing, which must not change when other clients drop out in later stages.
        listed = {
            "clients": clients,
            "mask-keys": [keys[client][0] for client in clients],
            "channel-keys": [keys[client][1] for client in clients],
        }
        replies = yield messages("shares", dict.fromkeys(clients, listed))
        sealed = self._answers(
            replies, clients, lambda r: byte_strings(r, "sealed", len(clients), SEALED_BYTES)
        )
        if not self._has_enough(senders := sorted(sealed), "shared their keys"):
            return
        # From here on a client is masked only against the other senders of shares, whose mask keys
        # can be recovered if they drop out.
        masked_stage = {}
        for client in senders:
            other_senders = [other for other in senders if other != client]
            place = clients.index(client)
            sealed_shares = [sealed[other][place] for other in other_senders]
            masked_stage[client] = {"senders": other_senders, "sealed": sealed_shares}
        replies = yield self._with_instructions(messages("masked", masked_stage))
        # The sum of all shares is far below 2^63 grid units, so that it is exact modulo 2^64.
        sums = self.total
        size = sum(share_sizes(sums).values())
        masked = self._answers(
            replies,
            senders,
            lambda r: np.frombuffer(byte_string(r, "masked", 8 * size), dtype="<u8"),
        )
        if not self._has_enough(survivors := sorted(masked), "sent their masked shares"):
            return
        replies = yield messages(
            "unmask", {client: {"survivors": survivors} for client in survivors}
        )
        shares = self._answers(
            replies,
            survivors,
            lambda r: byte_strings(r, "shares", len(senders), SHARE_BYTES),
            consequence="does not help to unmask the sum, which its share is part of",
        )
        if not self._has_enough(sorted(shares), "helped to unmask their sum"):
            return
        # Any `threshold` shares determine a secret; which ones makes no difference to the sum.
        points = {client: clients.index(client) + 1 for client in clients}
        sources = sorted(shares)[: self.secure.threshold]
        gathered = {
            other: {points[c]: int.from_bytes(shares[c][k]) for c in sources}
            for k, other in enumerate(senders)
        }
        try:
            total = unmasked(masked, gathered, {c: keys[c][0] for c in senders}, context)
            self._add_words(sums, total, len(survivors))
        except FedsimError as error:
            self._why_lost = f"the sum cannot be unmasked: {str(error).rstrip('.')}"
            return
        self._survivors = survivors

    def _with_instructions(self, messages: list[Message]) -> list[Message]:
        """Add the records that clients need for training to these messages."""
        by_node = {message.metadata.dst_node_id: message for message in messages}
        for request in self.instructions:
            if (message := by_node.get(request.metadata.dst_node_id)) is not None:
                for name, record in request.content.items():
                    message.content[name] = record
        return messages

    def _answers(
        self,
        replies: Iterable[Message],
        expected: list[int],
        parse: Callable[[ConfigRecord], Answer],
        *,
        consequence: str = "is out of the round",
    ) -> dict[int, Answer]:
        """Parsed replies by client; a client whose reply cannot be parsed has failed."""
        client_of, waiting = self.instructions.recipients.client_of, {*expected}
        answers: dict[int, Answer] = {}
        for reply in replies:
            client = client_of.get(reply.metadata.src_node_id)
            if client is None or client not in waiting:
                continue
            waiting.discard(client)
            reason: Reason = "malformed"
            try:
                if reply.has_error():
                    reason = error_reason(reply)
                    raise FedsimError(str(reply.error.reason))
                answers[client] = parse(reply.content.config_records[RECORD])
            except Exception as error:  # a malformed reply may raise any exception
                _log.warning("client %s %s: %s", client, consequence, printable(error))
                self._failed[client] = reason
        return answers

    def _has_enough(self, clients: list[int], action: str) -> bool:
        """Whether enough clients remain to unmask the sum; if not, mark the round as lost."""
        if len(clients) >= self.secure.threshold:
            return True
        self._why_lost = self._too_few(len(clients), action)
        return False

    def _too_few(self, count: int, action: str) -> str:
        return (
            f"{count} of the {self.secure.threshold} clients that a sum must have "
            f"(secagg.threshold) {action}"
        )

    # -- the sum ------------------------------------------------------------------------

    @property
    def why_lost(self) -> str | None:
        """Why the round has no sum; None if it has one."""
        if self.in_blocks and self.total.count < self.secure.threshold:
            return self._too_few(self.total.count, "sent their shares")
        return self._why_lost

    def replies(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """Blocks from an engine that trains in blocks; else the survivors, without their rows.

        A survivor that fails at the last stage has not failed: its share is in the sum.
        """
        if self.in_blocks:
            yield from super().replies(messages)
            return
        ids = np.array(self._survivors, dtype=np.int64)
        failed = [
            Block.failed(np.array([client], dtype=np.int64), reason)
            for client, reason in self._failed.items()
            if client not in self._survivors
        ]
        for block in (*failed, Block.sent(ids, None, {})):
            if len((accepted := self.tally.accept(block)).client_ids):
                yield Reply(accepted)

    def add(self, reply: Reply) -> Reply:
        """Add the shares that a block's clients would have sent.

        A client whose row is not finite adds noise alone, as it would under masks.
        """
        if reply.block.rows is None:
            everyone = torch.ones(len(reply.block.client_ids), dtype=torch.bool)
            return replace(reply, block=replace(reply.block, usable=everyone))
        block = self.without_failed(reply.block)
        assert block.rows is not None
        total = self.sum_on_device(block.rows.device)
        if len(block.client_ids):
            for name, units in split(total, self.shares_of(block).units).items():
                total.grids[name].add_(units)
        usable = _count(total, len(block.client_ids))
        return replace(reply, block=replace(block, rows=None, usable=usable))

    def release(self) -> Release:
        """The round's one release: the shares contain all of its noise."""
        return self.releaser.release(self.total, self._noise_source(), missing=0.0)

    def _add_words(self, sums: PartialSum, words: Words, count: int) -> None:
        """Add an unmasked sum of ``count`` shares.

        Raises
        ------
        FedsimError
            If the sum is larger than ``count`` shares can be: some mask was not removed.
        """
        units = torch.from_numpy(words.view(np.int64).astype(np.float64))
        for name, vector in split(sums, units).items():
            grid = sums.grids[name]
            radius, unit = float(grid.radius), float(grid.unit)
            # A mask that was not removed is uniform over 2^64 grid units, beyond any honest sum.
            std = radius * share_multiplier(sums.definition.split[name], self.share_count)
            limit = radius * count + MAX_DEVIATIONS * std * math.sqrt(count)
            if float(vector.abs().max()) * unit > limit:
                raise FedsimError("it is larger than so many bounded shares can be.")
            grid.add_(vector[None])
        _count(sums, count)


def _count(total: PartialSum, shares: int) -> Tensor:
    """Count ``shares`` more shares, all of them in the sum."""
    total.expect(shares)
    masks = RowMasks((shares,), total.definition.device)
    total.count_rows(masks)
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
        Masked vectors of the survivors.
    shares : mapping of client to shares by their points
        Shares of a survivor's seed, or of a dropped client's mask key.
    mask_keys : mapping of client to bytes
        Public mask keys of all clients that masked their vectors against each other.

    Raises
    ------
    FedsimError
        If shares are inconsistent, or give another key than the client had announced.
    """
    # Masks between two survivors cancel in their sum. It still contains each survivor's own mask,
    # and its masks with clients that shared their keys but then sent no masked vector.
    total = np.add.reduce([np.asarray(vector) for vector in masked.values()])
    size = len(total)
    for client in masked:
        seed = join_secret(shares[client])
        total = total - mask(derived_key(seed, own_purpose(context)), size)
    for dropped in mask_keys.keys() - masked.keys():
        key = join_secret(shares[dropped])
        # Checked, since wrong shares would give a random sum and no error.
        if public_key(key) != mask_keys[dropped]:
            raise FedsimError("shares of a key do not give the key that was announced.")
        for client in masked:
            purpose = pair_purpose(context, mask_keys[dropped], mask_keys[client])
            common = mask(agreed_key(key, mask_keys[client], purpose), size)
            total = total - common if client < dropped else total + common
    return np.asarray(total, dtype=np.uint64)
