"""Where clients have their state from: columns with a row a client, files, or the server."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedsim import regular_files
from fedsim.clients.base import LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.rows.block import CLIENT_IDS, ClientStates, Ids
from fedsim.rows.exchange import CLIENT_STATE

ABSENT = -1
StateKind = Literal["reset", "client", "server"]


class CarriedState(NamedTuple):
    """What ``n`` clients have from earlier rounds.

    Attributes
    ----------
    present : bool ``[n]``
        Which of them have anything.
    rows : mapping of name to Tensor ``[n, ...]``
        It; rows of clients that have nothing mean nothing.
    """

    present: npt.NDArray[np.bool_]
    rows: Mapping[str, Tensor]

    def at(self, positions: npt.NDArray[np.int64]) -> CarriedState:
        """What the clients at these positions have."""
        rows = {k: v[torch.from_numpy(positions).to(v.device)] for k, v in self.rows.items()}
        return CarriedState(self.present[positions], rows)

    def packed(self, client_ids: Ids) -> ClientStates:
        """What these ``n`` clients have, for a checkpoint or another process."""
        present = torch.from_numpy(self.present)
        return {
            CLIENT_IDS: torch.from_numpy(client_ids[self.present]),
            **{name: values[present.to(values.device)] for name, values in self.rows.items()},
        }


def unpacked(states: ClientStates) -> tuple[Ids, dict[str, Tensor]]:
    """Clients, and what they keep."""
    if not states:
        return np.zeros(0, dtype=np.int64), {}
    rows = {name: values for name, values in states.items() if name != CLIENT_IDS}
    return states[CLIENT_IDS].numpy(), rows


class StateStore:
    """State of clients between rounds; this one keeps none, so that each round starts afresh."""

    def load(self, client_ids: Ids, round: int | None) -> CarriedState:
        """What these clients have from rounds before this one; without a round, the latest."""
        return CarriedState(np.zeros(len(client_ids), dtype=np.bool_), {})

    def store(self, client_ids: Ids, round: int, state: Mapping[str, Tensor]) -> None:
        """Keep these clients' state as of the end of ``round``."""

    def state(self) -> ClientStates:
        """What a checkpoint must hold: nothing where it outlives the process by itself."""
        return {}

    def restore(self, states: ClientStates) -> None:
        """Resume from what `state` gave, and nothing else."""

    def keep_since(self, round: object) -> None:
        """Keep the states since this round too, to which the run may go back; None: no such."""


class MemoryStore(StateStore):
    """State in memory: for each entry one tensor, with a row for each client that has state.

    Parameters
    ----------
    population : int
    """

    def __init__(self, population: int) -> None:
        self._row_of = np.full(population, ABSENT, dtype=np.int64)
        self._used = 0
        self._columns: dict[str, Tensor] = {}

    @property
    def client_ids(self) -> Ids:
        """Who has state."""
        return np.flatnonzero(self._row_of != ABSENT)

    def load(self, client_ids: Ids, round: int | None) -> CarriedState:
        """The latest state, whatever the round."""
        rows = self._row_of[client_ids]
        index = torch.from_numpy(np.maximum(rows, 0))
        columns = {k: v[index.to(v.device)] for k, v in self._columns.items()}
        return CarriedState(rows != ABSENT, columns)

    def store(self, client_ids: Ids, round: int, state: Mapping[str, Tensor]) -> None:
        """Keep all of it, or nothing where memory runs out."""
        # A column has at least one row: `load` takes any of them for clients without state.
        if not state or not len(client_ids):
            return
        new = client_ids[self._row_of[client_ids] == ABSENT]
        # All columns grow before any is written to: an allocation that fails changes nothing.
        self._columns |= {name: self._column(name, rows, len(new)) for name, rows in state.items()}
        self._row_of[new] = np.arange(self._used, self._used + len(new))
        self._used += len(new)
        index = torch.from_numpy(self._row_of[client_ids])
        for name, rows in state.items():
            self._columns[name][index.to(rows.device)] = rows

    def _column(self, name: str, rows: Tensor, more: int) -> Tensor:
        """The entry's column, with room for so many clients more."""
        column = self._columns.get(name, rows.new_zeros(0, *rows.shape[1:]))
        needed = self._used + more
        if needed <= len(column):
            return column
        larger = column.new_zeros(min(2 * needed, len(self._row_of)), *column.shape[1:])
        larger[: len(column)] = column
        return larger

    def state(self) -> ClientStates:
        """All clients' state."""
        return self.load(self.client_ids, None).packed(self.client_ids)

    def restore(self, states: ClientStates) -> None:
        """Resume from what `state` gave.

        Raises
        ------
        FedsimError
            If it is of another population.
        """
        client_ids, rows = unpacked(states)
        population = len(self._row_of)
        if len(client_ids) and int(client_ids.max()) >= population:
            raise FedsimError(
                f"the checkpoint keeps state of client {client_ids.max()}; this run has clients 0 "
                f".. {population - 1}."
            )
        self._row_of[:], self._used, self._columns = ABSENT, 0, {}
        self.store(client_ids, 0, rows)


class FileStore(StateStore):
    """State on disk, ``client-ID/round-R.safetensors``, where no process outlives a round.

    A round's state is a file of its own, written beside its place and renamed, so that a process
    killed at any instant leaves a whole file or none. Two rounds are kept: a round that is trained
    again must start from the state *before* it, and may find that its own is written already.
    Where a checkpoint lies further back (`keep_since`), so does the oldest file kept.

    Parameters
    ----------
    directory : path
        One for each run.
    """

    KEEP = 2

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._since: int | None = None

    def keep_since(self, round: object) -> None:
        """Keep what clients had at the end of this round, and since; None: no such round."""
        self._since = round if isinstance(round, int) else None

    def _rounds(self, client: int) -> list[tuple[int, Path]]:
        files = []
        for path in (self.directory / f"client-{client}").glob("round-*.safetensors"):
            number = re.fullmatch(r"round-(\d+)", path.stem)
            if number:
                files.append((int(number[1]), path))
        return sorted(files)

    def load(self, client_ids: Ids, round: int | None) -> CarriedState:
        """What these clients have from rounds before this one; without a round, the latest.

        Raises
        ------
        FedsimError
            If a file cannot be read, or has other entries than another of these clients'.
        """
        present = np.zeros(len(client_ids), dtype=np.bool_)
        rows: dict[str, Tensor] = {}
        for k, client in enumerate(client_ids):
            rounds = self._rounds(int(client))
            earlier = [path for number, path in rounds if round is None or number < round]
            if not earlier:
                continue
            state = _state_in(earlier[-1], int(client))
            if not present.any():
                rows = {k: v.new_zeros(len(client_ids), *v.shape) for k, v in state.items()}
            shapes = {name: row.shape[1:] for name, row in rows.items()}
            if {name: row.shape for name, row in state.items()} != shapes:
                # The block fails, its clients are then asked one by one, and each has its own.
                raise FedsimError(
                    f"the state of client {client} in {earlier[-1]} has other entries than other "
                    "clients' states."
                )
            present[k] = True
            for name, row in state.items():
                rows[name][k] = row
        return CarriedState(present, rows)

    def store(self, client_ids: Ids, round: int, state: Mapping[str, Tensor]) -> None:
        """Write a file for each client; it is there whole or not at all."""
        if not state:
            return
        for k, client in enumerate(client_ids):
            directory = self.directory / f"client-{client}"
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"round-{round}.safetensors"
            draft = path.with_suffix(".draft")
            save_file({name: rows[k].contiguous().clone() for name, rows in state.items()}, draft)
            os.replace(draft, path)
            for old in self._outdated(int(client)):
                old.unlink(missing_ok=True)

    def _outdated(self, client: int) -> list[Path]:
        rounds = self._rounds(client)
        last = len(rounds) - self.KEEP
        if self._since is not None:
            # The last file up to that round is what the client had at its end: it stays as well.
            last = min(last, sum(number <= self._since for number, _ in rounds) - 1)
        return [path for _, path in rounds[: max(last, 0)]]


def _state_in(path: Path, client: int) -> dict[str, Tensor]:
    """What a client's file holds; a `FedsimError` if it cannot be read."""
    try:
        return load_file(regular_files.require(path))
    except (OSError, SafetensorError) as error:
        raise FedsimError(
            f"the state of client {client} in {path} is damaged ({error}); put back the file, or "
            f"remove {path.parent}, and the client starts without state."
        ) from None


class ServerState(StateStore):
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
    def of(cls, config: Mapping[str, object]) -> ServerState:
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

    def load(self, client_ids: Ids, round: int | None) -> CarriedState:
        """The same for every client."""
        n = len(client_ids)
        rows = {k: torch.full((n,), v, dtype=torch.float64) for k, v in self._values.items()}
        return CarriedState(np.full(n, bool(rows)), rows)


def state_store(
    state: StateKind,
    algorithm: LocalAlgorithm,
    population: int,
    width: int,
    directory: Path | None = None,
) -> StateStore:
    """Where clients have their state from.

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
        return StateStore()
    if state == "client":
        return MemoryStore(population) if directory is None else FileStore(directory)
    if state != "server":
        raise FedsimError(f"client.state is '{state}'; it must be 'reset', 'client' or 'server'.")
    sample = algorithm.sample(width)
    large = [name for name in algorithm.carried if name in sample and sample[name].dim() > 1]
    if large:
        raise FedsimError(
            f"client.state is 'server', but {', '.join(large)} of {algorithm} is as large "
            "as the model; it must be 'reset' or 'client'."
        )
    return ServerState({})
