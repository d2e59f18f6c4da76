"""What clients keep from one round to the next: columns with a row a client, or files."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedsim.errors import FedsimError

__all__ = ["Columns", "Files", "Memory", "Shared"]

Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Memory(Protocol):
    """State of clients between rounds."""

    def load(self, client_ids: Ids, round: int) -> tuple[Bools, dict[str, Tensor]]:
        """Which of these clients have state from an earlier round, and it: each ``[n, ...]``.

        Rows of clients without state mean nothing.
        """

    def store(self, client_ids: Ids, round: int, state: Mapping[str, Tensor]) -> None:
        """Keep these clients' state as of the end of ``round``."""


class Columns:
    """State in memory: one tensor ``[population, ...]`` for each entry, made when first needed.

    Parameters
    ----------
    population : int
    """

    def __init__(self, population: int) -> None:
        self.present = np.zeros(population, dtype=np.bool_)
        self._columns: dict[str, Tensor] = {}

    def load(self, client_ids: Ids, round: int) -> tuple[Bools, dict[str, Tensor]]:
        """See `Memory`."""
        at = torch.from_numpy(client_ids)
        rows = {name: column[at.to(column.device)] for name, column in self._columns.items()}
        return self.present[client_ids], rows

    def store(self, client_ids: Ids, round: int, state: Mapping[str, Tensor]) -> None:
        """See `Memory`."""
        for name, rows in state.items():
            if name not in self._columns:
                self._columns[name] = rows.new_zeros(len(self.present), *rows.shape[1:])
            self._columns[name][torch.from_numpy(client_ids).to(rows.device)] = rows
        if state:
            self.present[client_ids] = True

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, for a checkpoint."""
        return {"present": torch.from_numpy(self.present.copy()), **self._columns}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint.

        Raises
        ------
        FedsimError
            If it is of another population.
        """
        if len(state["present"]) != len(self.present):
            raise FedsimError(
                f"the checkpoint keeps state of {len(state['present'])} clients; this run has "
                f"{len(self.present)}."
            )
        self.present = state["present"].numpy().copy()
        self._columns = {k: v.clone() for k, v in state.items() if k != "present"}


class Files:
    """State on disk, ``client-ID/round-R.safetensors``, where no process outlives a round.

    The last two rounds are kept, so that a round run again starts from where it did.

    Parameters
    ----------
    directory : path
        One for each run.
    """

    KEEP = 2

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def _rounds(self, client: int) -> list[tuple[int, Path]]:
        found = []
        for path in (self.directory / f"client-{client}").glob("round-*.safetensors"):
            number = re.fullmatch(r"round-(\d+)", path.stem)
            if number:
                found.append((int(number[1]), path))
        return sorted(found)

    def load(self, client_ids: Ids, round: int) -> tuple[Bools, dict[str, Tensor]]:
        """See `Memory`."""
        present = np.zeros(len(client_ids), dtype=np.bool_)
        rows: dict[str, Tensor] = {}
        for k, client in enumerate(client_ids):
            earlier = [path for number, path in self._rounds(int(client)) if number < round]
            if earlier:
                present[k] = True
                for name, row in load_file(earlier[-1]).items():
                    rows.setdefault(name, row.new_zeros(len(client_ids), *row.shape))[k] = row
        return present, rows

    def store(self, client_ids: Ids, round: int, state: Mapping[str, Tensor]) -> None:
        """See `Memory`; a file is there whole or not at all."""
        if not state:
            return
        for k, client in enumerate(client_ids):
            directory = self.directory / f"client-{client}"
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"round-{round}.safetensors"
            draft = path.with_suffix(".draft")
            save_file({name: rows[k].contiguous().clone() for name, rows in state.items()}, draft)
            os.replace(draft, path)
            for _, old in self._rounds(int(client))[: -self.KEEP]:
                old.unlink()


class Shared:
    """One number for all: the mean of what the last round's clients ended with.

    The server sends it to every client of the next round. Clients have to report theirs for
    that, which is a release of its own.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._round = 0
        self._ended: dict[str, list[float]] = {}

    def load(self, client_ids: Ids, round: int) -> tuple[Bools, dict[str, Tensor]]:
        """See `Memory`: the same for every client, once there was a round."""
        if round != self._round:
            # The exact sum does not depend on the order in which clients came.
            self.values |= {k: math.fsum(v) / len(v) for k, v in self._ended.items()}
            self._round, self._ended = round, {}
        n = len(client_ids)
        rows = {
            name: torch.full((n,), value, dtype=torch.float64)
            for name, value in self.values.items()
        }
        return np.full(n, bool(self.values)), rows

    def store(self, client_ids: Ids, round: int, state: Mapping[str, Tensor]) -> None:
        """See `Memory`."""
        for name, rows in state.items():
            self._ended.setdefault(name, []).extend(rows.double().tolist())

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, for a checkpoint at the end of a round."""
        ended = {k: math.fsum(v) / len(v) for k, v in self._ended.items()}
        return {k: torch.tensor(v, dtype=torch.float64) for k, v in (self.values | ended).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.values, self._ended = {k: float(v) for k, v in state.items()}, {}
