"""Checkpoints: what a run has reached, on the disk whole or not at all.

::

    checkpoint/round-20/SHA256.safetensors      the last two
    checkpoint/round-10/SHA256.safetensors
    checkpoint/best-12/SHA256.safetensors       where `checkpoint.best` names a metric

One is a directory that is written beside, synced and renamed. The file in it has its digest for
a name, so that what a crash of the machine or an editor has left of it is not taken for whole.
What clients keep is in it, which nobody else may read: directories are the owner's alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from fedsim import regular_files
from fedsim.config import Scalar
from fedsim.errors import FedsimError
from fedsim.federation.state_tree import Tree, join_tree, split_tree

_log = logging.getLogger("fedsim")

Name = Literal["round", "best"]
_KEEP: Mapping[Name, int] = {"round": 2, "best": 1}
_STATE = "state"
_DRAFT = ".draft-"
_SUFFIX = ".safetensors"


class Checkpoints:
    """The checkpoints in one directory.

    Parameters
    ----------
    path : Path
        Made with the first checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def rounds(self, name: Name = "round") -> list[int]:
        """Of the checkpoints of this name that are there, ascending."""
        if not self.path.is_dir():
            return []
        names = (re.fullmatch(rf"{name}-(\d{{1,12}})", entry.name) for entry in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def save(self, state: RunState, name: Name = "round") -> None:
        """Keep a state as the last one, beside the last but one, or as the best.

        Raises
        ------
        OSError
            If it cannot be written; the others are untouched.
        """
        self.writing(state, name)()

    def writing(self, state: RunState, name: Name = "round") -> Callable[[], None]:
        """What `save` has left to do once the state, which may change then, has been read."""
        tensors, text = state.parted()
        content = save(tensors, metadata={_STATE: text})
        return partial(self._write, content, name, state.round)

    def _write(self, content: bytes, name: Name, number: int) -> None:
        target = self.path / f"{name}-{number}"
        draft = self.path / f"{_DRAFT}{target.name}"
        self._clear_drafts()
        self.path.mkdir(mode=0o700, exist_ok=True)
        draft.mkdir(mode=0o700)
        _write_synced(draft / f"{hashlib.sha256(content).hexdigest()}{_SUFFIX}", content)
        if target.exists():  # of a round that has been done before
            target.rename(self.path / f"{_DRAFT}old-{target.name}")
        # Names are not synced: a crash of the machine that loses this one leaves the one before.
        draft.rename(target)
        self._clear_drafts()
        for old in self.rounds(name)[: -_KEEP[name]]:
            shutil.rmtree(self.path / f"{name}-{old}")

    def newest(self) -> RunState | None:
        """The last state that is whole; None if there is no checkpoint at all.

        Raises
        ------
        FedsimError
            If there are checkpoints and none of them can be read.
        """
        rounds = self.rounds()
        why = ""
        for number in reversed(rounds):
            try:
                return self._read(self.path / f"round-{number}")
            except (FedsimError, OSError) as error:
                why = str(error)
                _log.warning("%s", error)
        if rounds:
            raise FedsimError(
                f"no checkpoint in {self.path} can be used: {why} Put back what was there, or "
                "remove that directory to go through all rounds again, or --overwrite the run."
            )
        return None

    def best(self) -> RunState | None:
        """The state that was best by `checkpoint.best`; None if there is none."""
        rounds = self.rounds("best")
        return self._read(self.path / f"best-{rounds[-1]}") if rounds else None

    def _read(self, path: Path) -> RunState:
        files = [entry for entry in path.iterdir() if entry.suffix == _SUFFIX]
        if len(files) != 1:
            raise FedsimError(f"checkpoint {path} is not whole; one file must be in it.")
        content = regular_files.read_bytes(files[0])
        if hashlib.sha256(content).hexdigest() != files[0].stem:
            raise FedsimError(
                f"checkpoint {path} was cut off or changed after it was written; its file's "
                "digest must be its name."
            )
        try:
            with safe_open(files[0], framework="pt") as file:
                text = (file.metadata() or {})[_STATE]
            return RunState.joined(load(content), text)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise FedsimError(f"checkpoint {path} cannot be read: {error}") from None

    def _clear_drafts(self) -> None:
        """Remove what a run that was killed has left half-written."""
        if self.path.is_dir():
            for entry in self.path.iterdir():
                if entry.name.startswith(_DRAFT):
                    shutil.rmtree(entry)


def _write_synced(path: Path, content: bytes) -> None:
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


FORMAT = 1


@cache
def versions() -> dict[str, str]:
    """Of the packages whose arithmetic a run's bytes depend on."""
    return {"torch": torch.__version__} | {
        name: importlib.metadata.version(name) for name in ("numpy", "flwr")
    }


@dataclass(frozen=True)
class RunState:
    """What a run has reached after a round; whoever has it needs nothing else to go on.

    Its parts are given by `state` and taken by `restore` of those whose they are; how independent
    noise and fedsim's own cohorts are drawn is a function of seed, release digest and round, and
    has no state.

    Attributes
    ----------
    round : int
        The last one whose release was made.
    parameters : mapping of name to Tensor
        Reached after it: the run's arrays.
    strategy : Tree
        Of `DPFedAvg`: sampler, mechanism and noise, server optimiser, means of the clients' state,
        failures, budget.
    clients : mapping of name to Tensor
        What clients keep: `BlockTrainer.state`.
    ledger_head : str
        Hash of the ledger's last line; a ledger that goes on from it has it among its heads.
    ledger_length : int
        Lines.
    metrics_length : int
        Rows of metrics.csv up to and with this round's.
    metrics_code : str
        HMAC of the rows before it, under the run's key; empty in checkpoints of older versions.
    row : mapping of str to number
        This round's, which may not have been written yet.
    config : mapping of str to scalar
        The resolved config, flat: what a resumed run is held against.
    client_ledgers : mapping of client id to mapping
        `Ledger.state` of those that protect their examples, where their ledgers are at hand.
    callbacks : Tree
        Of those that keep anything, by their places; and why one of them has stopped the run.
    versions : mapping of str to str
        Of the packages that arithmetic depends on.
    """

    round: int
    parameters: Mapping[str, Tensor]
    strategy: Tree
    clients: Mapping[str, Tensor]
    ledger_head: str
    ledger_length: int
    metrics_length: int
    row: Mapping[str, float | int]
    config: Mapping[str, Scalar]
    metrics_code: str = ""
    client_ledgers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    callbacks: Tree = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)

    def parted(self) -> tuple[dict[str, Tensor], str]:
        """Its tensors, by names of their own, and JSON for the rest."""
        values = {state_field.name: getattr(self, state_field.name) for state_field in fields(self)}
        return split_tree({"format": FORMAT, **values})

    @classmethod
    def joined(cls, tensors: Mapping[str, Tensor], text: str) -> RunState:
        """What `split_tree` took apart.

        Raises
        ------
        ValueError
            If it was written by a version whose format is another.
        """
        tree = join_tree(tensors, text)
        if (written := tree.pop("format", None)) != FORMAT:
            raise ValueError(f"the run's state has format {written}; this version reads {FORMAT}.")
        # Checkpoints of older versions know nothing of these.
        tree.setdefault("client_ledgers", {})
        tree.setdefault("metrics_code", "")
        if tree.keys() != {part.name for part in fields(cls)}:
            raise ValueError("the run's state lacks something, or has what this version does not.")
        return cls(**tree)
