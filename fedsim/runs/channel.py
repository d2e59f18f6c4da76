"""Callbacks across processes: a run that is driven elsewhere on this machine asks for them here.

What goes over the channel is pickled, by processes of one user, over a socket whose directory and
key are that user's alone.
"""

from __future__ import annotations

import _thread
import os
import pickle
import secrets
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self

from fedsim.federation.state_tree import Tree
from fedsim.process import Closed
from fedsim.runs.callbacks import Callback, Callbacks, RunStatus

CHANNEL = "FEDSIM_CALLBACKS"
"""Environment variable: the key and the socket of the process that has a run's callbacks."""


class CallbackServer(Closed):
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

    def close(self) -> None:
        """Answer no more."""
        self._listener.close()
        self._directory.cleanup()

    def end(self) -> None:
        """Let the current round be the run's last one."""
        self.asked_to_end = True

    def _serve(self) -> None:
        with suppress(OSError, EOFError), self._listener.accept() as connection:
            while True:
                name, *arguments = _receive(connection)
                answer = self._answer(name, *arguments)
                _send(connection, answer, self.asked_to_end)

    def _answer(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._callbacks, name)(*arguments)
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
        answer: str | None = self._ask("on_start", status)
        return answer

    def on_round(self, status: RunStatus) -> str | None:
        """Ask the callbacks in the other process."""
        answer: str | None = self._ask("on_round", status)
        return answer

    def on_end(self, status: RunStatus) -> None:
        """Ask the callbacks in the other process."""
        self._ask("on_end", status)

    def state(self) -> Tree:
        """Get their state."""
        state: Tree = self._ask("state")
        return state

    def restore(self, state: Tree) -> None:
        """Send them their state."""
        self._ask("restore", state)

    def _ask(self, *question: Any) -> Any:
        _send(self._connection, *question)
        answer, self.asked_to_end = _receive(self._connection)
        return answer


# Not `Connection.send`: torch would have it share a tensor's memory, by a file that only one of the
# two processes may open.
def _send(connection: Connection, *message: Any) -> None:
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def distant_callback() -> DistantCallback | None:
    """That of the process that has started this one, if it has one."""
    return DistantCallback(os.environ[CHANNEL]) if CHANNEL in os.environ else None
