"""Members whose clients share blocks: they go through their rounds in step.

All their clients of a round train in common blocks. A client's bits do not depend on who
stands beside it, so each member ends with the same bytes as when it is run alone.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor

from fedsim.clients.proximal import server_numbers
from fedsim.randomness import Purpose, Randomness
from fedsim.rows.block import Block, Ids
from fedsim.rows.exchange import Instructions, Replies
from fedsim.runs.factories import algorithm
from fedsim.runs.local_training import seed_of
from fedsim.runs.resolve import Resolved
from fedsim.strategies import Rounds
from fedsim.training import Trainer

_log = logging.getLogger("fedsim")


def in_step(runs: Sequence[Rounds], members: Sequence[Resolved]) -> dict[int, Exception]:
    """Advance all runs together: what they ask for at a time is trained at a time.

    Returns
    -------
    dict of int to Exception
        What ended those that failed; the others have gone on without them.
    """
    shared = _SharedTrainer(members)
    asked: dict[int, Iterable[Message]] = {}
    failed: dict[int, Exception] = {}

    def advance(index: int, step: Callable[[], Iterable[Message]]) -> None:
        asked.pop(index, None)
        try:
            asked[index] = step()
        except StopIteration:
            pass
        except Exception as error:
            failed[index] = error

    for index, rounds in enumerate(runs):
        advance(index, partial(next, rounds))
    while asked:
        instructions = {i: m for i, m in asked.items() if isinstance(m, Instructions)}
        # A member that evaluates on its clients has a step more in that round: others wait for it.
        first = min((m.round for m in instructions.values()), default=0)
        due = {i: m for i, m in instructions.items() if m.round == first}
        replies = shared.replies(due)
        for index in [i for i in asked if i in due or i not in instructions]:
            advance(index, partial(runs[index].send, replies.get(index, [])))
    return failed


@dataclass(frozen=True)
class _Shifted(Randomness):
    """A member's draws, for clients that are numbered from ``first`` on."""

    first: int = 0

    def generators(
        self, purpose: Purpose, *, client: int = 0, **address: Any
    ) -> Iterator[np.random.Generator]:
        return super().generators(purpose, client=client - self.first, **address)


class _SharedTrainer:
    """One trainer over all members' clients, numbered one member after another."""

    def __init__(self, members: Sequence[Resolved]) -> None:
        sizes = [member.config.partition.clients for member in members]
        self._first = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        numbers = [algorithm(member.config).numbers() for member in members]
        self._numbers = {name: [values[name] for values in numbers] for name in numbers[0]}
        self._randomness = [
            _Shifted(seed_of(member.config), member.release, first=int(first))
            for member, first in zip(members, self._first, strict=True)
        ]
        first = members[0]
        parts = [indices for member in members for indices in member.data.split.train]
        data = first.data.clients(first.data.dataset.train, parts)
        self._trainer: Trainer = first.local.trainer(data)
        self._members = [member.trainer for member in members]

    def replies(self, asked: dict[int, Instructions]) -> dict[int, Replies]:
        """Train or evaluate everybody who was asked."""
        blocks: dict[int, list[Block]] = {index: [] for index in asked}
        training = {
            i: instructions
            for i, instructions in asked.items()
            if instructions.message_type == "train"
        }
        for index, block in self._train(training):
            blocks[index].append(block)
        for index in asked.keys() - training.keys():
            blocks[index] += self._evaluate(index, asked[index])
        return {index: _replies(member_blocks) for index, member_blocks in blocks.items()}

    def _train(self, asked: dict[int, Instructions]) -> Iterator[tuple[int, Block]]:
        if not asked:
            return
        member = np.concatenate(
            [np.full(len(instructions), i) for i, instructions in asked.items()]
        )
        ids = np.concatenate(
            [self._first[i] + instructions.client_ids for i, instructions in asked.items()]
        )
        (server_round,) = {instructions.round for instructions in asked.values()}
        vectors = {i: instructions.vector for i, instructions in asked.items()}
        self._told = {
            i: server_numbers(self._trainer.algorithm, instructions.config)
            for i, instructions in asked.items()
        }
        for start in range(0, len(ids), self._trainer.block_size):
            block = slice(start, start + self._trainer.block_size)
            yield from self._guarded(vectors, member[block], ids[block], server_round)

    def _guarded(
        self, vectors: dict[int, Tensor], member: Ids, ids: Ids, server_round: int
    ) -> list[tuple[int, Block]]:
        """A common block; where it raises, its clients one by one, so that only one has failed.

        ``member`` is sorted: a member's clients stand together.
        """
        try:
            return list(self._block(vectors, member, ids, server_round))
        except Exception:
            if len(ids) > 1:
                alone = (slice(position, position + 1) for position in range(len(ids)))
                blocks = (self._guarded(vectors, member[k], ids[k], server_round) for k in alone)
                return list(itertools.chain.from_iterable(blocks))
            _log.warning("client %d failed in round %d", ids[0], server_round, exc_info=True)
            index = int(member[0])
            return [(index, Block.failed(ids - self._first[index], "raised"))]

    def _block(
        self, vectors: dict[int, Tensor], member: Ids, ids: Ids, server_round: int
    ) -> Iterator[tuple[int, Block]]:
        owners, firsts, counts = np.unique(member, return_index=True, return_counts=True)
        starts = torch.cat(
            [vectors[i].expand(n, -1) for i, n in zip(owners.tolist(), counts, strict=True)]
        )
        local = self._trainer.fit(
            starts,
            ids,
            server_round,
            numbers={
                name: [self._told[i].get(name, of[i]) for i in member.tolist()]
                for name, of in self._numbers.items()
            },
            randomness=[self._randomness[i] for i in member],
        )
        rows = local.theta - starts.to(local.theta)
        for index, first, count in zip(owners.tolist(), firsts, counts, strict=True):
            its_clients = slice(first, first + count)
            yield (
                index,
                Block.sent(
                    ids[its_clients] - self._first[index],
                    rows[its_clients],
                    {name: column[its_clients] for name, column in local.metrics.items()},
                ),
            )

    def _evaluate(self, index: int, asked: Instructions) -> list[Block]:
        # By the member's own trainer: test examples and what a model draws are its own.
        trainer = self._members[index]
        return list(trainer.evaluate(asked.vector, asked.client_ids, asked.round))


def _replies(blocks: list[Block]) -> Replies:
    return Replies(produce=lambda _: iter(blocks), to_messages=lambda _: iter(()))
