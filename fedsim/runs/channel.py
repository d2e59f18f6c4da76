"""Callbacks across processes: a run that is driven elsewhere on this machine asks for them here.

What goes over the channel is pickled, by processes of one user, over a socket whose directory and
key are that user's alone.
"""

from __future__ import annotations

import _thread
import os
import secrets
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from fedsim.config import RunConfig
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.state_tree import Tree, join_tree, split_tree
from fedsim.runs.callbacks import Callback, Callbacks, RunStatus
from fedsim.runs.directory import RunDirectory

CHANNEL = "FEDSIM_CALLBACKS"
"""Environment variable: the key and the socket of the process that has a run's callbacks."""

_Parts = tuple[dict[str, Any], str]


class CallbackServer:
    """Answers, in a thread of its own, for the callbacks of a run in another process.

    Attributes
    ----------
    asked_to_end : bool
        Whether `end` was called.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = Callbacks.numbered(callbacks)
        self._directory = tempfile.TemporaryDirectory(prefix="fedsim-callbacks-")
        address = str(Path(self._directory.name) / "socket")
        key = secrets.token_bytes(32)
        self._listener = Listener(address, "AF_UNIX", authkey=key)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.asked_to_end = False
        self.variables = {CHANNEL: f"{key.hex()}:{address}"}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()
        self._directory.cleanup()

    def end(self) -> None:
        """Let the current round be the run's last one."""
        self.asked_to_end = True

    def _serve(self) -> None:
        with suppress(OSError, EOFError), self._listener.accept() as connection:
            while True:
                name, argument = connection.recv()
                answer = self._answer(name, argument)
                connection.send((answer, self.asked_to_end))

    def _answer(self, name: str, argument: Any) -> Any:
        callbacks = self._callbacks
        try:
            if name == "state":
                return _packed(callbacks.state())
            if name == "restore":
                return callbacks.restore(_unpacked(argument))
            return getattr(callbacks, name)(argument.status())
        except KeyboardInterrupt:
            _thread.interrupt_main()
            return None


class DistantCallback(Callback):
    """Asks a `CallbackServer` in another process.

    Attributes
    ----------
    asked_to_end : bool
        Whether the process that has the callbacks has asked the run to end, as of its last answer.
    """

    def __init__(self, channel: str) -> None:
        self.asked_to_end = False
        key, _, address = channel.partition(":")
        self._connection: Connection = Client(address, "AF_UNIX", authkey=bytes.fromhex(key))

    def on_start(self, status: RunStatus) -> str | None:
        """Ask the callbacks in the other process."""
        return _sentence(self._ask("on_start", _Sent.of(status)))

    def on_round(self, status: RunStatus) -> str | None:
        """Ask the callbacks in the other process."""
        return _sentence(self._ask("on_round", _Sent.of(status)))

    def on_end(self, status: RunStatus) -> None:
        """Ask the callbacks in the other process."""
        self._ask("on_end", _Sent.of(status))

    def state(self) -> Tree:
        """Get their state."""
        return _unpacked(self._ask("state", None))

    def restore(self, state: Tree) -> None:
        """Send them their state."""
        self._ask("restore", _packed(state))

    def _ask(self, name: str, argument: Any) -> Any:
        self._connection.send((name, argument))
        answer, self.asked_to_end = self._connection.recv()
        return answer


def _sentence(answer: object) -> str | None:
    return answer if isinstance(answer, str) else None


def distant_callback() -> DistantCallback | None:
    """That of the process that has started this one, if it has one."""
    return DistantCallback(os.environ[CHANNEL]) if CHANNEL in os.environ else None


@dataclass(frozen=True)
class _Sent:
    """A `RunStatus` as it is pickled."""

    config: dict[str, Any]
    arrays: dict[str, Any]
    directory: str | None
    rest: dict[str, Any]

    @classmethod
    def of(cls, status: RunStatus) -> _Sent:
        names = ("round", "row", "protects", "of_clients", "ended", "why")
        return cls(
            config=status.config.to_run_config(),
            arrays={name: value.cpu().numpy() for name, value in tensors(status.arrays).items()},
            directory=None if status.directory is None else str(status.directory.path),
            rest={name: getattr(status, name) for name in names},
        )

    def status(self) -> RunStatus:
        return RunStatus(
            config=RunConfig.from_run_config(self.config),
            arrays=array_record({k: torch.from_numpy(v) for k, v in self.arrays.items()}),
            directory=None if self.directory is None else RunDirectory(self.directory),
            **self.rest,
        )


def _packed(tree: Tree) -> _Parts:
    kept, text = split_tree(tree)
    return {name: tensor.numpy() for name, tensor in kept.items()}, text


def _unpacked(parts: _Parts) -> Tree:
    arrays, text = parts
    return join_tree({name: torch.from_numpy(array) for name, array in arrays.items()}, text)
