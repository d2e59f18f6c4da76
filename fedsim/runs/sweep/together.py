"""Runs whose clients share blocks: their rounds are made at the same time.

All their clients of a round train in common blocks. A client's result does not depend on the
others in its block, so each run ends with the same bytes as when it is made alone.
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
from fedsim.runs.factories import algorithm, seed_of
from fedsim.runs.resolve import Resolved
from fedsim.strategies import Rounds
from fedsim.training import Trainer

_log = logging.getLogger("fedsim")


def in_step(rounds: Sequence[Rounds], runs: Sequence[Resolved]) -> dict[int, Exception]:
    """Advance all runs together: their clients of one round train in one go.

    Returns
    -------
    dict of int to Exception
        The errors of the runs that failed; the others have ended without them.
    """
    shared = _SharedTrainer(runs)
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

    for index, generator in enumerate(rounds):
        advance(index, partial(next, generator))
    while asked:
        instructions = {i: m for i, m in asked.items() if isinstance(m, Instructions)}
        # A run that evaluates on its clients has one more step in that round: the others wait.
        first = min((m.round for m in instructions.values()), default=0)
        due = {i: m for i, m in instructions.items() if m.round == first}
        replies = shared.replies(due)
        for index in [i for i in asked if i in due or i not in instructions]:
            advance(index, partial(rounds[index].send, replies.get(index, [])))
    return failed


@dataclass(frozen=True)
class _Shifted(Randomness):
    """A run's draws, for clients that are numbered from ``first`` on."""

    first: int = 0

    def generators(
        self, purpose: Purpose, *, client: int = 0, **address: Any
    ) -> Iterator[np.random.Generator]:
        return super().generators(purpose, client=client - self.first, **address)


class _SharedTrainer:
    """One trainer over all runs' clients, numbered one run after another."""

    def __init__(self, runs: Sequence[Resolved]) -> None:
        sizes = [run.config.partition.clients for run in runs]
        self._first = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        numbers = [algorithm(run.config).numbers() for run in runs]
        self._numbers = {name: [values[name] for values in numbers] for name in numbers[0]}
        self._randomness = [
            _Shifted(seed_of(run.config), run.release, first=int(first))
            for run, first in zip(runs, self._first, strict=True)
        ]
        first = runs[0]
        parts = [indices for run in runs for indices in run.data.split.train]
        data = first.data.clients(first.data.dataset.train, parts)
        self._trainer: Trainer = first.local.trainer(data)
        self._trainers = [run.trainer for run in runs]

    def replies(self, asked: dict[int, Instructions]) -> dict[int, Replies]:
        """Train or evaluate the clients that each run asks."""
        blocks: dict[int, list[Block]] = {index: [] for index in asked}
        training = {
            i: instructions
            for i, instructions in asked.items()
            if instructions.message_type == "train"
        }
        for index, block in self._train(training):
            blocks[index].append(block)
        for index in asked.keys() - training.keys():
            # By the run's own trainer: test examples and a model's draws are its own.
            trainer, its = self._trainers[index], asked[index]
            blocks[index] += trainer.evaluate(its.vector, its.client_ids, its.round)
        return {index: _replies(of_run) for index, of_run in blocks.items()}

    def _train(self, asked: dict[int, Instructions]) -> Iterator[tuple[int, Block]]:
        if not asked:
            return
        owners = np.concatenate(
            [np.full(len(instructions), i) for i, instructions in asked.items()]
        )
        ids = np.concatenate(
            [self._first[i] + instructions.client_ids for i, instructions in asked.items()]
        )
        (server_round,) = {instructions.round for instructions in asked.values()}
        vectors = {i: instructions.vector for i, instructions in asked.items()}
        self._server_numbers = {
            i: server_numbers(self._trainer.algorithm, instructions.config)
            for i, instructions in asked.items()
        }
        for start in range(0, len(ids), self._trainer.block_size):
            block = slice(start, start + self._trainer.block_size)
            yield from self._guarded(vectors, owners[block], ids[block], server_round)

    def _guarded(
        self, vectors: dict[int, Tensor], owners: Ids, ids: Ids, server_round: int
    ) -> list[tuple[int, Block]]:
        """A common block; where it raises, its clients one by one, so that only one has failed.

        ``owners`` is sorted: a run's clients stand together.
        """
        try:
            return list(self._block(vectors, owners, ids, server_round))
        except Exception:
            if len(ids) > 1:
                alone = (slice(position, position + 1) for position in range(len(ids)))
                blocks = (self._guarded(vectors, owners[k], ids[k], server_round) for k in alone)
                return list(itertools.chain.from_iterable(blocks))
            _log.warning("client %d failed in round %d", ids[0], server_round, exc_info=True)
            index = int(owners[0])
            return [(index, Block.failed(ids - self._first[index], "raised"))]

    def _block(
        self, vectors: dict[int, Tensor], owners: Ids, ids: Ids, server_round: int
    ) -> Iterator[tuple[int, Block]]:
        present, firsts, counts = np.unique(owners, return_index=True, return_counts=True)
        starts = torch.cat(
            [vectors[i].expand(n, -1) for i, n in zip(present.tolist(), counts, strict=True)]
        )
        local = self._trainer.fit(
            starts,
            ids,
            server_round,
            numbers={
                name: [self._server_numbers[i].get(name, of[i]) for i in owners.tolist()]
                for name, of in self._numbers.items()
            },
            randomness=[self._randomness[i] for i in owners],
        )
        rows = local.theta - starts.to(local.theta)
        for index, first, count in zip(present.tolist(), firsts, counts, strict=True):
            its_clients = slice(first, first + count)
            yield (
                index,
                Block.sent(
                    ids[its_clients] - self._first[index],
                    rows[its_clients],
                    {name: column[its_clients] for name, column in local.metrics.items()},
                ),
            )


def _replies(blocks: list[Block]) -> Replies:
    return Replies(produce=lambda _: iter(blocks), to_messages=lambda _: iter(()))
