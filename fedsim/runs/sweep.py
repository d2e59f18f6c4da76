"""Many runs in one go: a grid over a config's keys, its members trained side by side.

Members whose clients do the same work but for per-client numbers (rates), draws (seeds) and
data (partitions) go through their rounds in step, and all their clients of a round train
in common blocks. A client's bits do not depend on who stands beside it, so each member ends
with the same bytes as when it is run alone.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message

from fedsim.config import RunConfig, Scalar
from fedsim.config.values import apart, read_value
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.randomness import Purpose, Randomness
from fedsim.rows.exchange import Block, Ids, Instructions, Replies
from fedsim.runs.artefacts import Row, RunDirectory
from fedsim.runs.build import Build
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.check import check
from fedsim.runs.drive import YOURS, Session
from fedsim.runs.objects import algorithm
from fedsim.runs.report import leave_report
from fedsim.runs.signals import asked_to_end
from fedsim.runs.state import RunState
from fedsim.strategies import Rounds, RunFailedError, run_to_end
from fedsim.training import Trainer

__all__ = ["Member", "is_done", "members", "parse_axes", "run_sweep"]

_log = logging.getLogger("fedsim")

Axes = dict[str, list[Any]]

LONGEST_LABEL = 150
Observer = Callable[["Member", Row], None]


@dataclass(frozen=True)
class Member:
    """One point of the grid.

    Attributes
    ----------
    point : mapping of key to value
        Its place on each axis.
    config : RunConfig
    """

    point: dict[str, Scalar]
    config: RunConfig

    @property
    def label(self) -> str:
        """``key=value`` for each axis; also the name of its directory.

        What cannot stand in a path, or makes it too long, is left out, and a digest of the whole
        comes in its place.
        """
        label = ",".join(f"{key}={value}" for key, value in self.point.items())
        name = re.sub(r"[^A-Za-z0-9=,.+_-]", "_", label)
        if name == label and len(name) <= LONGEST_LABEL:
            return name
        digest = hashlib.sha256(label.encode()).hexdigest()[:8]
        return f"{name[: LONGEST_LABEL - 9]}-{digest}"


def parse_axes(overs: Iterable[str]) -> Axes:
    """``key=v1,v2`` for each axis, each value as ``--set`` reads it; lists stand in brackets.

    Raises
    ------
    FedsimError
        If an axis has no values, or comes twice.
    """
    axes: Axes = {}
    for over in overs:
        key, _, text = over.partition("=")
        key = key.strip()
        if not key or not text.strip():
            raise FedsimError(f"--over {over!r} is not of the form key=v1,v2,....")
        if key in axes:
            raise FedsimError(f"--over {key} is given twice; give all its values at once.")
        axes[key] = [read_value(value) for value in apart(text)]
    return axes


def members(config: RunConfig, axes: Axes) -> list[Member]:
    """The grid, the last axis fastest, of valid configs; those that are equal are one member."""
    grid: dict[tuple[object, ...], Member] = {}
    for values in itertools.product(*axes.values()):
        changed = config.replace(**dict(zip(axes, values, strict=True)))
        flat = changed.to_run_config()
        # As a config writes them: 64 and '64' are one value of a list, 1 and 1.0 of a number.
        point = {key: flat.get(key, "") for key in axes}
        grid.setdefault(tuple(flat.items()), Member(point, changed))
    return list(grid.values())


def run_sweep(
    grid: Sequence[Member], out: Path, observer: Observer | None = None
) -> dict[str, str]:
    """Run the members that have not been run to their end in ``out``.

    Parameters
    ----------
    grid : sequence of Member
    out : path
        Each member's artefacts go to a directory of its own in it.
    observer : callable, optional
        Called with each row of each member.

    Returns
    -------
    dict of str to str
        Why those members failed that did, by their labels; the others go on without them.

    Raises
    ------
    FedsimError
        If ``out`` holds a member of another sweep, or one is for another engine.
    """
    for member in grid:
        engine = member.config.engine.name
        if engine != "local":
            raise FedsimError(f"engine.name = '{engine}'; a sweep's members run on 'local'.")
    waiting = [member for member in grid if not is_done(member, out)]
    for member in waiting:
        RunDirectory(out / member.label).check_free(overwrite=True)
        check(Build(member.config))
    failed: dict[str, str] = {}
    for group in _groups(waiting, out):
        failed |= _run_group(group, out, observer)
    return failed


def is_done(member: Member, out: Path) -> bool:
    """Whether the member has been run to its end in ``out``.

    Raises
    ------
    FedsimError
        If its directory holds a run of another config.
    """
    directory = RunDirectory(out / member.label)
    if not directory.config.exists():
        return False
    stored = RunConfig.load(directory.config)
    if _without_resolved(stored) != _without_resolved(Build(member.config).released):
        raise FedsimError(f"{directory.path} holds a run of another config; choose another --out.")
    return directory.done.exists()


_RESOLVED = ("client.path", "client.block-size", "engine.device", "noise.entropy")


def _without_resolved(config: RunConfig) -> dict[str, Scalar]:
    return {k: v for k, v in config.to_run_config().items() if k not in _RESOLVED}


def _groups(waiting: Sequence[Member], out: Path) -> list[list[Member]]:
    """Members whose clients can share blocks, from the same round on, together."""
    groups: dict[tuple[object, ...], list[Member]] = {}
    for member in waiting:
        state = _reached(RunDirectory(out / member.label))
        first = 0 if state is None else state.round
        groups.setdefault((first, *_shared_work(member)), []).append(member)
    return list(groups.values())


def _reached(directory: RunDirectory) -> RunState | None:
    """The last checkpoint of a member, if it has one."""
    return directory.checkpoints.newest() if directory.holds_run() else None


def _shared_work(member: Member) -> tuple[object, ...]:
    """What must be equal for clients to share a block: all that is not a number of their own."""
    config = member.config
    if config.client.private or config.client.state != "reset":
        # Ledgers and kept state belong to one run's clients.
        return (member.label,)
    free = {f"client.{name.replace('_', '-')}" for name in algorithm(config).numbers()}
    # Frozen parameters are the trainer's, and start from the seed.
    seed = config.seed if config.model.trainable else None
    return (
        seed,
        *(
            (key, value)
            for key, value in config.to_run_config().items()
            if key.split(".")[0] in ("data", "model", "client", "engine") and key not in free
        ),
    )


def _run_group(group: Sequence[Member], out: Path, observer: Observer | None) -> dict[str, str]:
    directories = [RunDirectory(out / member.label) for member in group]
    builds = [
        Build(member.config, directory.path)
        for member, directory in zip(group, directories, strict=True)
    ]
    with ExitStack() as claims:
        sessions = []
        for member, directory, build in zip(group, directories, builds, strict=True):
            text = build.resolved.to_toml()
            state = _reached(directory)
            claims.enter_context(
                directory.claim(text, overwrite=True) if state is None else directory.resumed(text)
            )
            watching = {} if observer is None else {YOURS: _Watcher(member, observer)}
            sessions.append(Session(build, directory, watching, resume=state))
        failed = _run_sessions(sessions)
    return {group[index].label: reason for index, reason in failed.items()}


def _run_sessions(sessions: Sequence[Session]) -> dict[int, str]:
    """Run them to their ends; why those failed that did."""
    failed: dict[int, str] = {}
    whole = False

    def end() -> None:
        for session in sessions:
            session.end()

    with asked_to_end(end):
        try:
            failed = _advance(sessions)
            whole = True
        finally:
            for index, session in enumerate(sessions):
                session.finish(whole=whole and index not in failed)
    for index, session in enumerate(sessions):
        result = session.result(interrupted=session.ended == "interrupted")
        leave_report(session.build, result, failed.get(index, ""))
    if any(session.ended == "interrupted" for session in sessions):
        raise KeyboardInterrupt
    return failed


def _advance(sessions: Sequence[Session]) -> dict[int, str]:
    runs = [(session, LocalGrid(session.build.trainer)) for session in sessions]
    if len(runs) == 1:
        ((session, grid),) = runs
        try:
            run_to_end(session.rounds(grid), grid, session.timeout(grid))
        except RunFailedError as error:
            return {0: str(error)}
        return {}
    shared = _SharedTrainer([session.build for session in sessions])
    return _in_step([session.rounds(grid) for session, grid in runs], shared)


def _in_step(runs: Sequence[Rounds], shared: _SharedTrainer) -> dict[int, str]:
    """Advance all runs together: what they ask for at a time is trained at a time."""
    asked: dict[int, Iterable[Message]] = {}
    failed: dict[int, str] = {}

    def advance(index: int, step: Callable[[], Iterable[Message]]) -> None:
        asked.pop(index, None)
        try:
            asked[index] = step()
        except StopIteration:
            pass
        except RunFailedError as error:
            failed[index] = str(error)

    for index, rounds in enumerate(runs):
        advance(index, partial(next, rounds))
    while asked:
        replies = shared.replies({i: m for i, m in asked.items() if isinstance(m, Instructions)})
        for index in list(asked):
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


class _Watcher(Callback):
    """Tells a sweep's observer of a member's rows."""

    def __init__(self, member: Member, observer: Observer) -> None:
        self._member = member
        self._observer = observer

    def on_round(self, status: RunStatus) -> None:
        self._observer(self._member, status.row)


class _SharedTrainer:
    """One trainer over all members' clients, numbered one member after another."""

    def __init__(self, builds: Sequence[Build]) -> None:
        sizes = [build.config.partition.clients for build in builds]
        self._first = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        self._algorithms = [algorithm(build.config) for build in builds]
        self._randomness = [
            _Shifted(build.randomness.seed, build.randomness.release, first=int(first))
            for build, first in zip(builds, self._first, strict=True)
        ]
        first = builds[0]
        parts = [indices for build in builds for indices in build.parts]
        data = first.client_data(first.dataset.train, parts)
        self._trainer: Trainer = first.make_trainer(data)
        self._members = [build.trainer for build in builds]

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
        rounds = {instructions.round for instructions in asked.values()}
        # Members go in step from one round on, and one that has stopped asks for nothing more.
        (server_round,) = rounds
        for start in range(0, len(ids), self._trainer.block_size):
            block = slice(start, start + self._trainer.block_size)
            yield from self._guarded(asked, member[block], ids[block], server_round)

    def _guarded(
        self, asked: dict[int, Instructions], member: Ids, ids: Ids, server_round: int
    ) -> list[tuple[int, Block]]:
        """A common block; where it raises, its clients one by one, so that only one has failed."""
        try:
            return list(self._block(asked, member, ids, server_round))
        except Exception:
            if len(ids) > 1:
                alone = (slice(position, position + 1) for position in range(len(ids)))
                blocks = (self._guarded(asked, member[k], ids[k], server_round) for k in alone)
                return list(itertools.chain.from_iterable(blocks))
            _log.warning("client %d failed in round %d", ids[0], server_round, exc_info=True)
            index = int(member[0])
            return [(index, Block.failed(ids - self._first[index], "raised"))]

    def _block(
        self, asked: dict[int, Instructions], member: Ids, ids: Ids, server_round: int
    ) -> Iterator[tuple[int, Block]]:
        owners = member.tolist()
        vectors = torch.stack([asked[i].vector for i in owners])
        names = self._algorithms[0].numbers()
        values = [algorithm.numbers() for algorithm in self._algorithms]
        local = self._trainer.fit(
            vectors,
            ids,
            server_round,
            numbers={name: [values[i][name] for i in owners] for name in names},
            randomness=[self._randomness[i] for i in owners],
        )
        rows = local.theta - vectors.to(local.theta)
        for index in dict.fromkeys(owners):
            mine = np.flatnonzero(member == index)
            yield (
                index,
                Block.sent(
                    ids[mine] - self._first[index],
                    rows[torch.from_numpy(mine)],
                    {name: column[mine] for name, column in local.metrics.items()},
                ),
            )

    def _evaluate(self, index: int, asked: Instructions) -> list[Block]:
        # By the member's own trainer: test examples and what a model draws are its own.
        trainer = self._members[index]
        return list(trainer.evaluate(asked.vector, asked.client_ids, asked.round))


def _replies(blocks: list[Block]) -> Replies:
    return Replies(produce=lambda: iter(blocks), to_messages=lambda _: iter(()))
