"""State that clients keep between rounds, and its stores: in memory, in files."""

from __future__ import annotations

import hashlib
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
from fedsim.array_types import Ints
from fedsim.clients.base import LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.rows.block import CLIENT_IDS, ClientStates
from fedsim.training.payload import PERSONAL, Personal

StateKind = Literal["reset", "client"]
"""Whether state is reset after a round, or kept by each client."""

ABSENT = -1  # row number of a client without state


class PersistentState:
    """State that clients keep between rounds, and the parameters they start and evaluate with.

    Besides its state and the personal parameters, an algorithm may keep a whole model to evaluate
    with (`LocalAlgorithm.evaluates`).

    Parameters
    ----------
    kind : "reset" or "client"
        The trainer's ``state``.
    algorithm : LocalAlgorithm
    personal : Personal
    population : int
    directory : path, optional
        Directory for the files of clients' state; in memory by default.

    Attributes
    ----------
    store : StateStore
        Loads and stores clients' state.

    Raises
    ------
    FedsimError
        If clients must keep state and ``kind`` does not allow it.
    """

    def __init__(
        self,
        kind: StateKind,
        algorithm: LocalAlgorithm,
        personal: Personal,
        population: int,
        directory: Path | None = None,
    ) -> None:
        self.kind, self.algorithm, self.personal = kind, algorithm, personal
        if kind != "client" and (
            personal or algorithm.evaluates or algorithm.requires_client_state
        ):
            raise FedsimError(
                f"client.state is '{kind}'; it must be 'client' where clients keep "
                "parameters to themselves (model.personal, or an algorithm with a model or a "
                "control variate of its own)."
            )
        self.store: StateStore
        if kind == "client":
            self.store = MemoryStore(population) if directory is None else FileStore(directory)
        else:
            self.store = StateStore()

    @property
    def entries(self) -> tuple[str, ...]:
        """Entries of the algorithm's state that are kept between rounds."""
        return () if self.kind == "reset" else self.algorithm.carried

    def start_parameters(self, shared: Tensor, carried: CarriedState) -> Tensor:
        """Start parameters ``[n, D]`` of ``n`` clients that were sent ``shared [1 or n, D]``.

        Both are packed. The result may be one expanded row; ``shared`` is not written to.
        """
        n, personal = len(carried.present), self.personal
        if not personal:
            return shared.expand(n, -1)
        theta = shared.repeat(n // len(shared), 1)
        initial = personal.initial[personal.positions].unsqueeze(0)
        theta[:, personal.positions] = carried.entry(PERSONAL, default=initial)
        return theta

    def evaluation_parameters(self, vector: Tensor, client_ids: Ints) -> Tensor:
        """Packed parameters ``[1 or n, D]`` with which these clients evaluate ``vector [d]``."""
        carried = self.store.load(client_ids, None)
        theta = self.personal.shared.pack(vector[None])
        if self.personal:
            theta = self.start_parameters(theta, carried)
        return carried.entry(self.algorithm.evaluates, default=theta)

    def state(self, client_ids: Ints | None, round: int | None) -> ClientStates:
        """State of these clients at the start of a round; without ids, what a checkpoint needs."""
        if client_ids is None:
            return self.store.state()
        if self.kind != "client":
            return {}
        return self.store.load(client_ids, round).to_client_states(client_ids)


class CarriedState(NamedTuple):
    """State of ``n`` clients from earlier rounds.

    Attributes
    ----------
    present : bool ``[n]``
        Whether a client has any state.
    rows : mapping of name to Tensor ``[n, ...]``
        The state; rows of clients without any are undefined.
    """

    present: npt.NDArray[np.bool_]
    rows: Mapping[str, Tensor]

    def select(self, positions: slice) -> CarriedState:
        """State of the clients at these positions."""
        rows = {name: values[positions] for name, values in self.rows.items()}
        return CarriedState(self.present[positions], rows)

    def entry(self, name: str, *, default: Tensor) -> Tensor:
        """The entry ``name [n, ...]``, with ``default [1 or n, ...]`` for clients without it."""
        if name not in self.rows:
            return default
        present = torch.from_numpy(self.present).to(default.device)
        present = present.view(-1, *[1] * (default.dim() - 1))
        return torch.where(present, self.rows[name].to(default), default)

    def to_client_states(self, client_ids: Ints) -> ClientStates:
        """Rows of the clients that have state, for a checkpoint or another process."""
        rows = self.rows
        if not self.present.all():  # else nothing is copied
            present = torch.from_numpy(self.present)
            rows = {name: values[present.to(values.device)] for name, values in rows.items()}
        return {CLIENT_IDS: torch.from_numpy(client_ids[self.present]), **rows}


def split_client_states(states: ClientStates) -> tuple[Ints, dict[str, Tensor]]:
    """Client ids, and their state by name."""
    if not states:
        return np.zeros(0, dtype=np.int64), {}
    rows = {name: values for name, values in states.items() if name != CLIENT_IDS}
    return states[CLIENT_IDS].numpy(), rows


class StateStore:
    """Store of clients' state between rounds; this base class keeps none."""

    def use_run(self, run: str) -> None:
        """Use the state of the run with this id only."""

    def load(self, client_ids: Ints, round: int | None) -> CarriedState:
        """State of these clients from before ``round``; the latest if it is None."""
        return CarriedState(np.zeros(len(client_ids), dtype=np.bool_), {})

    def save(self, states: ClientStates, round: int) -> None:
        """Store these clients' state, as of the end of ``round``."""

    def state(self) -> ClientStates:
        """State that a checkpoint must hold; none if the store itself outlives the process."""
        return {}

    def restore(self, states: ClientStates) -> None:
        """Replace all state by what `state` returned."""

    def retain_since(self, round: object) -> None:
        """Also keep states since ``round``, from which the run may resume; None: no such round."""


class MemoryStore(StateStore):
    """State in memory: for each entry one tensor, with a row for each client that has state."""

    def __init__(self, population: int) -> None:
        self._row_of = np.full(population, ABSENT, dtype=np.int64)
        self._row_count = 0
        self._columns: dict[str, Tensor] = {}

    @property
    def client_ids(self) -> Ints:
        """Ids of the clients that have state."""
        return np.flatnonzero(self._row_of != ABSENT)

    def load(self, client_ids: Ints, round: int | None) -> CarriedState:
        """The latest state, whatever the round."""
        rows = self._row_of[client_ids]
        index = torch.from_numpy(np.maximum(rows, 0))
        columns = {k: v[index.to(v.device)] for k, v in self._columns.items()}
        return CarriedState(rows != ABSENT, columns)

    def save(self, states: ClientStates, round: int) -> None:
        """Store all of it, or nothing if memory runs out."""
        client_ids, state = split_client_states(states)
        # A column has at least one row: `load` takes any of them for clients without state.
        if not state or not len(client_ids):
            return
        own_rows = self._row_of[client_ids]
        is_new = own_rows == ABSENT
        # All columns grow before any is written to: an allocation that fails changes nothing.
        count = int(is_new.sum())
        self._columns |= {name: self._column(name, rows, count) for name, rows in state.items()}
        own_rows[is_new] = np.arange(self._row_count, self._row_count + count)
        # Counted before they are given away: if this is interrupted, no two clients share a row.
        self._row_count += count
        index = torch.from_numpy(own_rows)
        for name, rows in state.items():
            # A checkpoint and other processes give rows on the CPU, a GPU's training on the GPU.
            column = self._columns[name]
            column[index.to(column.device)] = rows.to(column.device)
        self._row_of[client_ids] = own_rows

    def _column(self, name: str, rows: Tensor, new_clients: int) -> Tensor:
        """The entry's column, grown where needed to hold ``new_clients`` further clients."""
        column = self._columns.get(name, rows.new_zeros(0, *rows.shape[1:]))
        min_rows = self._row_count + new_clients
        if min_rows <= len(column):
            return column
        # More than the population only if a call that was interrupted had counted rows.
        count = max(min_rows, min(2 * min_rows, len(self._row_of)))
        larger = column.new_zeros(count, *column.shape[1:])
        larger[: len(column)] = column
        return larger

    def state(self) -> ClientStates:
        """All clients' state."""
        return self.load(self.client_ids, None).to_client_states(self.client_ids)

    def restore(self, states: ClientStates) -> None:
        """Replace all state by what `state` returned.

        Raises
        ------
        FedsimError
            If it has a client that this population does not.
        """
        client_ids, _ = split_client_states(states)
        population = len(self._row_of)
        if len(client_ids) and int(client_ids.max()) >= population:
            raise FedsimError(
                f"the checkpoint keeps state of client {client_ids.max()}; this run has clients 0 "
                f".. {population - 1}."
            )
        self._row_of[:], self._row_count, self._columns = ABSENT, 0, {}
        self.save(states, 0)


class FileStore(StateStore):
    """State on disk, ``RUN/client-ID/round-R.safetensors``, for processes that end with a round.

    Each round's state is a file of its own, written to a draft and renamed, so that a process
    killed at any instant leaves a whole file or none. Two rounds are kept: a round that is trained
    again must start from the state *before* it, and may find its own file already written.
    If the last checkpoint is older (`retain_since`), so is the oldest file kept. Files of later
    rounds belong to an abandoned attempt, and are removed, lest they pass for the latest state.

    Parameters
    ----------
    directory : path
        Directory of all runs of one name, with one in it for each run that clients `join`.
    """

    ROUNDS_STORED = 2

    def __init__(self, directory: Path) -> None:
        self.directory = self._of_all_runs = directory
        self._oldest_round: int | None = None

    def use_run(self, run: str) -> None:
        """Use the run's own directory from now on."""
        # A digest, since a server may send any text.
        name = hashlib.sha256(run.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self.directory = self._of_all_runs / name

    def retain_since(self, round: object) -> None:
        """Also keep states of the end of ``round`` and since; None: no such round."""
        self._oldest_round = round if isinstance(round, int) else None

    def _rounds(self, client: int) -> list[tuple[int, Path]]:
        paths = (self.directory / f"client-{client}").glob("round-*.safetensors")
        numbers = ((re.fullmatch(r"round-(\d+)", path.stem), path) for path in paths)
        return sorted((int(number[1]), path) for number, path in numbers if number)

    def load(self, client_ids: Ints, round: int | None) -> CarriedState:
        """State of these clients from before ``round``; the latest if it is None.

        Raises
        ------
        FedsimError
            If a file cannot be read, or has other entries than another client's.
        """
        present = np.zeros(len(client_ids), dtype=np.bool_)
        rows: dict[str, Tensor] = {}
        for k, client in enumerate(client_ids.tolist()):
            paths = [p for n, p in self._rounds(client) if round is None or n < round]
            if not paths:
                continue
            path = paths[-1]
            try:
                state = load_file(regular_files.require(path))
            except (OSError, SafetensorError) as error:
                raise FedsimError(
                    f"the state of client {client} in {path} is damaged ({error}); restore the "
                    f"file, or remove {path.parent}, and the client starts without state."
                ) from None
            if not present.any():
                rows = {k: v.new_zeros(len(client_ids), *v.shape) for k, v in state.items()}
            shapes = {name: row.shape[1:] for name, row in rows.items()}
            if {name: row.shape for name, row in state.items()} != shapes:
                # The block fails; its clients are then trained one by one, from their own entries.
                raise FedsimError(
                    f"the state of client {client} in {path} has other entries than other "
                    "clients' states."
                )
            present[k] = True
            for name, row in state.items():
                rows[name][k] = row
        return CarriedState(present, rows)

    def save(self, states: ClientStates, round: int) -> None:
        """Write a file for each client, whole or not at all."""
        client_ids, state = split_client_states(states)
        if not state:
            return
        for k, client in enumerate(client_ids.tolist()):
            path = self.directory / f"client-{client}" / f"round-{round}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".draft")
            save_file({name: rows[k].contiguous().clone() for name, rows in state.items()}, draft)
            os.replace(draft, path)
            for outdated in self._outdated_files(client, round):
                outdated.unlink(missing_ok=True)

    def _outdated_files(self, client: int, round: int) -> list[Path]:
        files = self._rounds(client)
        rounds = [file for file in files if file[0] <= round]
        last = len(rounds) - self.ROUNDS_STORED
        if self._oldest_round is not None:
            # The last file up to that round is the client's state at its end: it must stay too.
            last = min(last, sum(number <= self._oldest_round for number, _ in rounds) - 1)
        return [path for _, path in (*rounds[: max(last, 0)], *files[len(rounds) :])]
