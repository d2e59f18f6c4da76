"""Checkpoints: the state of a run after a round, written atomically.

::

    checkpoint/round-20/SHA256.safetensors      the last two
    checkpoint/round-10/SHA256.safetensors
    checkpoint/best-12/SHA256.safetensors       the best round, if `checkpoint.best` names a metric
    checkpoint/best-7/SHA256.safetensors        the best round up to round 10

A checkpoint is a directory that is written under a temporary name, synced and renamed. Its file is
named by its digest, so that a file that was truncated by a crash of the machine, or edited, is
recognised. It has clients' state, so that only the owner can read the directories (0700).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import ConfigRecord
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from fedsim import regular_files
from fedsim.config import Scalar
from fedsim.errors import FedsimError
from fedsim.federation.state_tree import Tree, join_tree, split_tree
from fedsim.rows.block import KEEP_SINCE
from fedsim.runs.callbacks import Measure
from fedsim.runs.directory import RunDirectory
from fedsim.runs.metrics import Row
from fedsim.runs.resolve import Resolved

_log = logging.getLogger("fedsim")

Name = Literal["round", "best"]
_LAST_ROUNDS = 2  # those whose checkpoints are not removed
_STATE = "state"
_DRAFT = ".draft-"
_SUFFIX = ".safetensors"

FORMAT = 3
"""Version of the format."""


@cache
def versions() -> dict[str, str]:
    """Versions of the packages whose arithmetic a run's bytes depend on."""
    return {"torch": torch.__version__} | {
        name: importlib.metadata.version(name) for name in ("numpy", "flwr")
    }


@dataclass(frozen=True)
class RunState:
    """State of a run after a round: all that is needed to resume it.

    Each part comes from the `state` of an object and goes back to its `restore`. Independent noise
    and fedsim's own cohorts need no state: they are functions of seed, release digest and round.

    Attributes
    ----------
    round : int
        The last round whose release was made.
    parameters : mapping of name to Tensor
        Shared parameters after that round.
    strategy : Tree
        State of `DPFedAvg`: the run's id and its ledger's end, sampler, mechanism and noise,
        server optimizer, means of the clients' state, failures.
    clients : mapping of name to Tensor
        State of the clients: `BlockTrainer.state`.
    release : str
        Digest of all that determines what the run releases; a resumed run's must be the same.
    examples : mapping
        The `LedgerPosition` of the ledger of clients' examples.
    data : mapping
        `data_shape` of the run's data.
    metrics_length : int
        Number of rows of metrics.csv, including this round's.
    metrics_code : str
        Digest of the rows before this round's.
    row : mapping of str to number
        This round's row, which may not be in metrics.csv yet; empty before the first round.
    config : mapping of str to scalar
        The resolved config, flattened; a resumed run's must match it.
    first_config : mapping of str to scalar
        The config with which the run began, for whose rounds a target epsilon was calibrated.
    callbacks : Tree
        State of the callbacks that have any, by name.
    versions : mapping of str to str
        Versions of the packages whose arithmetic the run's bytes depend on.
    """

    round: int
    parameters: Mapping[str, Tensor]
    strategy: Tree
    clients: Mapping[str, Tensor]
    release: str
    examples: Mapping[str, Any]
    data: Mapping[str, Any]
    metrics_length: int
    row: Mapping[str, float | int]
    config: Mapping[str, Scalar]
    first_config: Mapping[str, Scalar]
    metrics_code: str = ""
    callbacks: Tree = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)

    def to_parts(self) -> tuple[dict[str, Tensor], str]:
        """Split the state into named tensors and JSON for the rest."""
        return split_tree({"format": FORMAT, **vars(self)})

    @classmethod
    def from_parts(cls, tensors: Mapping[str, Tensor], text: str) -> RunState:
        """Make the state from the tensors and JSON of `to_parts`.

        Raises
        ------
        ValueError
            If it was written in another format, or has missing or unknown parts.
        """
        tree = join_tree(tensors, text)
        if (version := tree.pop("format", None)) != FORMAT:
            raise ValueError(
                f"the run's state has format {version}, and this fedsim reads {FORMAT}; resume the "
                "run with the fedsim that began it, or begin another with --out."
            )
        if tree.keys() != {part.name for part in fields(cls)}:
            raise ValueError(
                "the run's state lacks entries, or has some that this version does not know."
            )
        return cls(**tree)


class Checkpoints:
    """The checkpoints in one directory.

    Parameters
    ----------
    path : Path
        Directory, which is created with the first checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def rounds(self, name: Name = "round") -> list[int]:
        """Rounds of the existing checkpoints of this name, ascending."""
        if not self.path.is_dir():
            return []
        names = (re.fullmatch(rf"{name}-(\d{{1,12}})", entry.name) for entry in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def save(self, state: RunState, name: Name = "round") -> None:
        """Write a state as the latest checkpoint, or as the best, and remove older ones.

        The previous latest one stays too. The run may be resumed from either of these two, so that
        the best round up to each of them stays as well.

        Raises
        ------
        OSError
            If it cannot be written; the existing checkpoints are untouched then.
        """
        self.writing(state, name)()

    def writing(self, state: RunState, name: Name = "round") -> Callable[[], None]:
        """Serialise the state now, and return the function that writes it to disk.

        The state may change before the function is called, in another thread.
        """
        tensors, text = state.to_parts()
        content = save(tensors, metadata={_STATE: text})
        return partial(self._write, content, name, state.round)

    def _write(self, content: bytes, name: Name, number: int) -> None:
        target = self.path / f"{name}-{number}"
        draft = self.path / f"{_DRAFT}{target.name}"
        self._clear_drafts()
        self.path.mkdir(mode=0o700, exist_ok=True)
        draft.mkdir(mode=0o700)
        _write_synced(draft / f"{hashlib.sha256(content).hexdigest()}{_SUFFIX}", content)
        if target.exists():  # the run was resumed from an earlier round and has made this one again
            target.rename(self.path / f"{_DRAFT}old-{target.name}")
        # The rename is not synced: if the machine crashes and loses it, the previous checkpoint is
        # still there.
        draft.rename(target)
        self._clear_drafts()
        rounds, bests = self.rounds(), self.rounds("best")
        self.remove("round", rounds[:-_LAST_ROUNDS])
        best_rounds = {max((b for b in bests if b <= r), default=0) for r in rounds[-_LAST_ROUNDS:]}
        self.remove("best", {*bests[:-1]} - best_rounds)

    def remove(self, name: Name, rounds: Iterable[int]) -> None:
        """Remove the checkpoints of these rounds."""
        for number in rounds:
            shutil.rmtree(self.path / f"{name}-{number}")

    def newest(self) -> RunState | None:
        """Read the latest intact state; None if there is no checkpoint at all.

        Raises
        ------
        FedsimError
            If there are checkpoints and none of them can be read.
        """
        rounds = self.rounds()
        reason = ""
        for number in reversed(rounds):
            try:
                return self._read(self.path / f"round-{number}")
            except (FedsimError, OSError) as error:
                reason = str(error)
                _log.warning("%s", error)
        if rounds:
            raise FedsimError(
                f"no checkpoint in {self.path} can be used: {reason} Restore it, or remove that "
                "directory to repeat all rounds, or --overwrite the run."
            )
        return None

    def best(self) -> RunState | None:
        """Read the state that was best by `checkpoint.best`'s metric; None if there is none."""
        rounds = self.rounds("best")
        return self._read(self.path / f"best-{rounds[-1]}") if rounds else None

    def _read(self, path: Path) -> RunState:
        files = [entry for entry in path.iterdir() if entry.suffix == _SUFFIX]
        if len(files) != 1:
            raise FedsimError(f"checkpoint {path} is incomplete; it must contain one file.")
        content = regular_files.read_bytes(files[0])
        if hashlib.sha256(content).hexdigest() != files[0].stem:
            raise FedsimError(
                f"checkpoint {path} was cut off or changed after it was written; its file's "
                "digest must be its name."
            )
        try:
            with safe_open(files[0], framework="pt") as file:
                text = (file.metadata() or {})[_STATE]
            return RunState.from_parts(load(content), text)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise FedsimError(f"checkpoint {path} cannot be read: {error}") from None

    def _clear_drafts(self) -> None:
        """Remove half-written checkpoints of a run that was killed."""
        if self.path.is_dir():
            for entry in self.path.iterdir():
                if entry.name.startswith(_DRAFT):
                    shutil.rmtree(entry)


def _write_synced(path: Path, content: bytes) -> None:
    try:
        with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


class Checkpointing:
    """Saves a session's state when a checkpoint is due, in a thread, so that rounds do not wait.

    All writes go through one thread in order, and each first checks that the one before succeeded:
    metrics.csv and client-metrics.csv are synced, then the checkpoint is written, then the round's
    row is appended. If the rows before a checkpoint were not on disk, a resumed run would lack
    them.

    Parameters
    ----------
    resolved : Resolved
    directory : RunDirectory
    state : callable
        Returns the state to save.
    sync : callable
        Syncs the rows of clients' evaluations to disk.
    start_round : int
        Round after which the run starts or is resumed.

    Attributes
    ----------
    train_config : ConfigRecord or None
        Sent to clients in each round if they keep state: the round since which they must keep it,
        because the run may be resumed from there.
    """

    def __init__(
        self,
        resolved: Resolved,
        directory: RunDirectory,
        state: Callable[[], RunState],
        sync: Callable[[], None],
        start_round: int,
    ) -> None:
        self._state = state
        self._settings = resolved.config.checkpoint
        self._correlated, self._planned = resolved.plan.noise.correlated, resolved.config.rounds
        self._checkpoints = Checkpoints(directory.checkpoint)
        self._metrics, self._sync_clients = directory.metrics_file, sync
        # With the operating system's entropy a repeated round has other results.
        bests = self._checkpoints.rounds("best")
        self._checkpoints.remove("best", [number for number in bests if number > start_round])
        self._best: float | None = None
        self._measure: Measure | None = None
        if self._settings.best:
            self._measure = Measure.of_column(resolved, "checkpoint.best", self._settings.best)
            best = self._checkpoints.best()
            self._best = None if best is None else best.row.get(self._settings.best)
        self._saved = start_round
        self._since = time.monotonic()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: list[Future[None]] = []
        self.train_config: ConfigRecord | None = None
        if self._settings.every and resolved.config.client.state == "client":
            self.train_config = ConfigRecord()
            self._set_keep_since()

    def begin(self, *, fixed: bool) -> None:
        """Save the state before round 1 of a plan whose rounds are ``fixed``, unless it is saved.

        Such a plan is charged as a whole: a run that is killed in its first rounds, and resumed,
        must know that it was, and keep its noise.
        """
        if fixed and self._settings.every and not self._checkpoints.rounds():
            self._checkpoints.save(self._state())

    def on_round(self, row: Row) -> None:
        """Save the round if a checkpoint is due, then write its row to metrics.csv.

        Raises
        ------
        OSError
            If it cannot be written, or an earlier save has failed.
        """
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()
        number = int(row["round"])
        tasks: list[Callable[[], None]] = []
        if self._settings.every and number:
            if self._measure is not None and self._measure.improves(row, self._best):
                self._best = row[self._measure.name]
                # Runs are never resumed from the best, so it need not hold the noise's secret key.
                best = replace(self._state(), strategy={})
                tasks.append(self._checkpoints.writing(best, "best"))
            waited = time.monotonic() - self._since
            if number % self._settings.every == 0 or 0 < self._settings.seconds <= waited:
                tasks.append(self._checkpoints.writing(self._state()))
                self._saved, self._since = number, time.monotonic()
                self._set_keep_since()
        if tasks:
            # The rows before a checkpoint must be on disk before it is.
            tasks[:0] = [self._metrics.sync, self._sync_clients]
        tasks.append(partial(self._metrics.append, row))
        if self._pending:
            # If an earlier write failed, this one must not happen: it would rely on missing rows.
            tasks.insert(0, self._pending[-1].result)
        if len(tasks) > 1:
            self._pending.append(self._thread.submit(_call_all, tasks))
        else:
            tasks[0]()

    def save(self, done: int, *, force: bool = False) -> None:
        """Save the state after the last round, if it is not saved yet, or ``force``."""
        self.wait()
        if self._settings.every and (force or done != self._saved):
            self._metrics.sync()
            self._sync_clients()
            self._checkpoints.save(self._state())
            self._saved = done
        if self._correlated and done >= self._planned:
            # Earlier checkpoints have the key of the noise, by which it could be subtracted.
            self._checkpoints.remove("round", self._checkpoints.rounds()[:-1])

    def wait(self) -> None:
        """Wait until every save is on disk.

        Raises
        ------
        OSError
            If one has failed.
        """
        while self._pending:
            self._pending.pop(0).result()

    def _set_keep_since(self) -> None:
        if self.train_config is not None:
            self.train_config[KEEP_SINCE] = min(self._checkpoints.rounds(), default=0)


def _call_all(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        task()
