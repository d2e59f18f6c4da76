"""Makes several runs at once: all their clients of a round train in common blocks.

A client's result does not depend on the others in its block, so each run ends with the same
bytes as when it is made alone.
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

from fedsim.array_types import Ints
from fedsim.clients.proximal import server_numbers
from fedsim.errors import described
from fedsim.federation.exchange import Instructions, Replies
from fedsim.randomness import DrawLevel, Purpose, Randomness
from fedsim.rows.block import Block
from fedsim.runs.data_split import client_data
from fedsim.runs.factories import algorithm, seed_or_none
from fedsim.runs.resolve import Resolved
from fedsim.strategies import Rounds
from fedsim.training import Trainer

_log = logging.getLogger("fedsim")


def advance_in_lockstep(rounds: Sequence[Rounds], runs: Sequence[Resolved]) -> dict[int, Exception]:
    """Advance all runs together, round by round, with their clients in common blocks.

    Returns
    -------
    dict of int to Exception
        Errors of the runs that failed, by index; the others have ended normally.
    """
    shared = _SharedTrainer(runs)
    requests: dict[int, Iterable[Message]] = {}  # messages that unfinished runs wait for
    failed: dict[int, Exception] = {}

    def advance(run: int, step: Callable[[], Iterable[Message]]) -> None:
        requests.pop(run, None)
        try:
            requests[run] = step()
        except StopIteration:
            pass
        except Exception as error:
            failed[run] = error

    for run, generator in enumerate(rounds):
        advance(run, partial(next, generator))
    while requests:
        instructions = {run: m for run, m in requests.items() if isinstance(m, Instructions)}
        # A run that evaluates on clients has one more step in a round. The others wait for it,
        # since only clients of the same round can share a block.
        first = min((m.round for m in instructions.values()), default=0)
        due = {run: m for run, m in instructions.items() if m.round == first}
        replies = shared.replies(due)
        for run in [run for run in requests if run in due or run not in instructions]:
            advance(run, partial(rounds[run].send, replies.get(run, [])))
    return failed


@dataclass(frozen=True)
class _OffsetRandomness(Randomness):
    """A run's randomness for clients whose ids in the common trainer start at ``offset``."""

    offset: int = 0

    def _start(
        self, purpose: Purpose, level: DrawLevel, round: int, client: int, parts: range
    ) -> tuple[Any, ...]:
        return super()._start(purpose, level, round, client - self.offset, parts)


class _SharedTrainer:
    """One trainer over all runs' clients, whose ids are consecutive, one run after another.

    Runs are identified by their indices; a run's client ids start at its offset.
    """

    def __init__(self, runs: Sequence[Resolved]) -> None:
        sizes = [run.config.partition.clients for run in runs]
        self._offsets = [sum(sizes[:run]) for run in range(len(runs))]
        self._numbers = [algorithm(run.config).numbers() for run in runs]
        self._randomness = [
            _OffsetRandomness(seed_or_none(run.config), run.release, offset=offset)
            for run, offset in zip(runs, self._offsets, strict=True)
        ]
        client_indices = [indices for run in runs for indices in run.data.client_indices]
        dataset = runs[0].data.dataset
        data = client_data(dataset, dataset.train, client_indices)
        self._trainer: Trainer = runs[0].trainer_for(data)
        self._trainers = [run.trainer for run in runs]

    def replies(self, due: dict[int, Instructions]) -> dict[int, Replies]:
        """Train or evaluate the clients of each run's request."""
        blocks: dict[int, list[Block]] = {run: [] for run in due}
        training = {run: m for run, m in due.items() if m.message_type == "train"}
        for run, block in self._train(training):
            blocks[run].append(block)
        for run in due.keys() - training.keys():
            # Evaluation uses the run's own trainer, which has its test examples and random draws.
            vector, ids, number = due[run].vector, due[run].recipients.client_ids, due[run].round
            blocks[run] += self._trainers[run].evaluate(vector, ids, number)
        return {run: Replies(m, partial(_in_memory, blocks[run])) for run, m in due.items()}

    def _train(self, training: dict[int, Instructions]) -> Iterator[tuple[int, Block]]:
        """Yield blocks of trained clients, each of one run, with the run's index."""
        owners = np.repeat([*training], [len(m) for m in training.values()])
        ids = [self._offsets[run] + m.recipients.client_ids for run, m in training.items()]
        for start in range(0, len(owners), self._trainer.block_size):
            block = slice(start, start + self._trainer.block_size)
            yield from self._train_or_isolate(training, owners[block], np.concatenate(ids)[block])

    def _train_or_isolate(
        self, training: dict[int, Instructions], owners: Ints, ids: Ints
    ) -> list[tuple[int, Block]]:
        """Train a common block; if it raises, each client alone, so that only the culprit fails."""
        try:
            return list(self._block(training, owners, ids))
        except (Exception, SystemExit) as error:  # a client's code may raise anything
            if len(ids) > 1:
                each = range(len(ids))
                blocks = (self._train_or_isolate(training, owners[[k]], ids[[k]]) for k in each)
                return list(itertools.chain.from_iterable(blocks))
            run, client = int(owners[0]), ids - self._offsets[int(owners[0])]
            number = training[run].round
            _log.warning("client %d failed in round %d: %s", client[0], number, described(error))
            return [(run, Block.failed(client, "raised"))]

    def _block(
        self, training: dict[int, Instructions], owners: Ints, ids: Ints
    ) -> Iterator[tuple[int, Block]]:
        # Runs in the order of the block's rows: `starts` must match `ids` row by row.
        counts = {run: int((owners == run).sum()) for run in dict.fromkeys(owners.tolist())}
        starts = torch.cat([training[run].vector.expand(n, -1) for run, n in counts.items()])
        numbers = {
            run: self._numbers[run] | server_numbers(self._trainer.algorithm, training[run].config)
            for run in counts
        }
        local = self._trainer.fit(
            starts,
            ids,
            training[next(iter(counts))].round,
            numbers={
                name: [numbers[run][name] for run in owners.tolist()] for name in self._numbers[0]
            },
            randomness=[self._randomness[run] for run in owners],
        )
        rows = local.theta - starts.to(local.theta)
        for run in counts:
            of_run = owners == run
            metrics = {name: column[of_run] for name, column in local.metrics.items()}
            yield run, Block.sent(ids[of_run] - self._offsets[run], rows[of_run], metrics)


def _in_memory(blocks: list[Block], into: object) -> Iterator[Block]:
    del into
    return iter(blocks)
