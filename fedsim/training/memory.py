"""Where clients have their state from: columns with a row a client, files, or the server."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedsim.clients.base import LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.rows.exchange import CLIENT_STATE

__all__ = ["Columns", "Files", "Memory", "Sent", "StateKind", "memory_for"]

Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
StateKind = Literal["reset", "client", "server"]


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


class Sent:
    """State that the server sends: one number for all, the mean of what others ended with.

    Nothing is kept here. What clients end with goes back among their metrics.

    Parameters
    ----------
    values : mapping of name to float
        Empty before the first round has ended.
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = dict(values)

    @classmethod
    def of(cls, config: Mapping[str, object]) -> Sent:
        """From the config entries of a round's instructions.

        Raises
        ------
        FedsimError
            If they do not say that the server keeps the state.
        """
        if not config.get(CLIENT_STATE):
            raise FedsimError(
                "client.state is 'server', but this strategy keeps no state of clients; it must be "
                "'reset' or 'client', or the strategy DPFedAvg(average_client_state=True)."
            )
        prefix = f"{CLIENT_STATE}."
        return cls(
            {
                key.removeprefix(prefix): value
                for key, value in config.items()
                if key.startswith(prefix) and isinstance(value, float)
            }
        )

    def load(self, client_ids: Ids, round: int) -> tuple[Bools, dict[str, Tensor]]:
        """See `Memory`: the same for every client."""
        n = len(client_ids)
        rows = {k: torch.full((n,), v, dtype=torch.float64) for k, v in self._values.items()}
        return np.full(n, bool(rows)), rows

    def store(self, client_ids: Ids, round: int, state: Mapping[str, Tensor]) -> None:
        """See `Memory`: the server is told by other means."""


def memory_for(
    state: StateKind,
    algorithm: LocalAlgorithm,
    population: int,
    width: int,
    directory: Path | None = None,
) -> Memory | None:
    """Where clients have their state from; None if it starts anew in every round.

    Parameters
    ----------
    state : "reset", "client" or "server"
    algorithm : LocalAlgorithm
    population : int
    width : int
        Length ``D`` of a packed row.
    directory : path, optional
        Where clients keep their own in files.

    Raises
    ------
    FedsimError
        If the server is to send a state that is as large as the model.
    """
    if state == "reset":
        return None
    if state == "client":
        return Columns(population) if directory is None else Files(directory)
    if state != "server":
        raise FedsimError(f"client.state is '{state}'; it must be 'reset', 'client' or 'server'.")
    numbers = {name: torch.tensor([value]) for name, value in algorithm.numbers().items()}
    sample = algorithm.init(torch.zeros(1, width), numbers)
    large = [name for name in algorithm.carried if name in sample and sample[name].dim() > 1]
    if large:
        raise FedsimError(
            f"client.state is 'server', but {', '.join(large)} of {algorithm} is as large "
            "as the model; it must be 'reset' or 'client'."
        )
    return Sent({})
