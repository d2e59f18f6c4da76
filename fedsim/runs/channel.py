"""Callbacks across processes: a run driven by another process of this machine calls them here.

Messages are pickled. Both processes are one user's, and only that user can read the socket's
directory and key, so that nobody else can send a pickle.
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

from fedsim.process import Closed
from fedsim.runs.callbacks import Callback, Callbacks

CHANNEL = "FEDSIM_CALLBACKS"
"""Environment variable: key and socket of the process that has a run's callbacks."""


class CallbackServer(Closed):
    """Calls callbacks, in a thread of its own, for a run in another process.

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
        """Close the socket and remove its directory."""
        self._listener.close()
        self._directory.cleanup()

    def end(self) -> None:
        """Ask the run to end after its current round."""
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


def _remote_method(name: str) -> Any:
    """The method of this name, called in the other process."""
    return lambda callback, *arguments: callback.ask(name, *arguments)


class RemoteCallback(Callback):
    """Forwards every call to a `CallbackServer` in another process.

    Attributes
    ----------
    asked_to_end : bool
        Whether the other process has asked the run to end; known from its last answer.
    """

    def __init__(self, channel: str) -> None:
        self.asked_to_end = False
        key, _, address = channel.partition(":")
        self._connection: Connection = Client(address, "AF_UNIX", authkey=bytes.fromhex(key))

    on_start, on_round = _remote_method("on_start"), _remote_method("on_round")
    on_end, state, restore = map(_remote_method, ("on_end", "state", "restore"))

    def ask(self, *question: Any) -> Any:
        """Call a method of the callbacks in the other process: its name, then its arguments.

        Raises
        ------
        KeyboardInterrupt
            If that process has ended. Its lock on the run's directory has ended with it: the run
            must not continue there, where another process may have resumed it.
        """
        try:
            _send(self._connection, *question)
            answer, self.asked_to_end = _receive(self._connection)
        except (OSError, EOFError):
            raise KeyboardInterrupt from None
        return answer


# Not `Connection.send`: with torch's reducers it would send a handle to a tensor's shared memory,
# which the other process may not be able to open, instead of the tensor's bytes.
def _send(connection: Connection, *message: Any) -> None:
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def remote_callback() -> RemoteCallback | None:
    """Callback of the process that started this one; None if that has none."""
    return RemoteCallback(os.environ[CHANNEL]) if CHANNEL in os.environ else None
