"""A process that forks those of many nodes, with all modules imported once.

Started by itself, each of a node's three processes imports Flower, and one of them torch: half a
GiB, and several CPU seconds, a node. The forks of a process that has imported all of it share its
memory. Only a rehearsal, whose nodes are on one machine, has any use for this.

Run as ``python -m fedsim.deploy.fork_server DESCRIPTOR``, with the descriptor of a socket, it reads
requests (`ForkServer.fork`) until the other end of the socket is closed, and writes a line for each
process when it starts and when it ends.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fedsim import regular_files
from fedsim.deploy import flower_programs
from fedsim.errors import FedsimError
from fedsim.process import Closed, die_with_parent

_LOOK_SECONDS = 0.1
_START_SECONDS = 120.0  # to import all modules, on a busy machine


@dataclass(eq=False)
class Fork:
    """A process of a `ForkServer`, with the methods of `subprocess.Popen` that fedsim uses."""

    server: ForkServer
    number: int
    pid: int = 0
    code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative after a signal; None while it runs."""
        self.server.read()
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for it to end, and return its exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
            time.sleep(_LOOK_SECONDS)
        return code


class ForkServer(Closed):
    """The side of the process that asks for forks.

    Attributes
    ----------
    server_end : socket
        For the server's process; to be closed here once that has started.
    """

    def __init__(self) -> None:
        self._connection, self.server_end = socket.socketpair()
        self._forks: list[Fork] = []
        self._unread = b""
        self._ended = False

    def fork(self, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> Fork:
        """Fork a process that runs one of `fedsim.deploy.flower_programs`, in a session of its own.

        Parameters
        ----------
        arguments : sequence of str
            Those of ``python -m fedsim.deploy.flower_programs``.
        variables : mapping
            All its environment variables.
        log : path
            File to which its output is appended.

        Raises
        ------
        FedsimError
            If the server has ended.
        """
        forked = Fork(self, len(self._forks))
        self._forks.append(forked)
        request = json.dumps([list(arguments), dict(variables), str(log)]).encode() + b"\n"
        self._connection.settimeout(_START_SECONDS)
        with suppress(OSError):  # it has ended, as the next read shows
            self._connection.sendall(request)
        deadline = time.monotonic() + _START_SECONDS
        while not forked.pid and not self._ended and time.monotonic() < deadline:
            self.read(_LOOK_SECONDS)
        if not forked.pid:
            raise FedsimError("the process that forks the nodes' programs does not answer.")
        return forked

    def close(self) -> None:
        """Close the connection, after the processes have ended."""
        self._ended = True
        self._connection.close()
        self.server_end.close()

    def read(self, seconds: float = 0.0) -> None:
        """Take note of the processes that have started or ended, after waiting for news so long."""
        while (arrived := self._arrived(seconds)) is not None:
            seconds = 0.0
            *lines, self._unread = (self._unread + arrived).split(b"\n")
            for line in lines:
                event, number, value = line.decode().split()
                setattr(self._forks[int(number)], event, int(value))
        if self._ended:  # and with it all its processes (`die_with_parent`)
            for forked in self._forks:
                forked.code = -signal.SIGKILL if forked.code is None else forked.code

    def _arrived(self, seconds: float) -> bytes | None:
        """What arrives within so many seconds; None if nothing does, or the server has ended."""
        if self._ended:
            return None
        self._connection.settimeout(seconds)
        try:
            arrived = self._connection.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError:
            arrived = b""
        self._ended = not arrived
        return arrived or None


@dataclass(eq=False)
class _Server:
    """The server's own side: the number of each of its processes, by pid."""

    connection: socket.socket
    running: dict[int, int] = field(default_factory=dict)
    count: int = 0
    terminated: bool = False

    def serve(self) -> list[str]:
        """Serve until this is told to end and all processes have; returns in each new process.

        Returns
        -------
        list of str
            The arguments of the program that a new process is for.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._end)
        unread, open_ = b"", True
        while self.running or not self.terminated:
            self._reap()
            readable, _, _ = select.select(
                [self.connection] if open_ else [], [], [], _LOOK_SECONDS
            )
            if not readable:
                continue
            arrived = self.connection.recv(1 << 16)
            open_ = bool(arrived)
            *lines, unread = (unread + arrived).split(b"\n")
            for line in lines:
                arguments, variables, log = json.loads(line)
                if self._fork(variables, log):
                    return [*arguments]
        sys.exit()

    def _end(self, _number: int, _frame: object) -> None:
        self.terminated = True

    def _fork(self, variables: dict[str, str], log: str) -> bool:
        """Fork; returns whether this is the new process."""
        server, number = os.getpid(), self.count
        self.count += 1
        pid = os.fork()
        if pid:
            self.running[pid] = number
            self._tell(f"pid {number} {pid}")
            return False
        os.setsid()
        die_with_parent(server)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.connection.close()
        os.umask(0o077)
        with open(log, "ab", opener=partial(regular_files.opener, mode=0o600)) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ.clear()
        os.environ.update(variables)
        return True

    def _reap(self) -> None:
        for pid in [*self.running]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                self._tell(f"code {self.running.pop(pid)} {code}")

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # whoever asked has ended; a janitor ends the processes
            self.connection.sendall(line.encode() + b"\n")


if __name__ == "__main__":
    flower_programs.import_programs_of_nodes()
    gc.collect()
    gc.freeze()  # the collector would write to shared pages, which copies them
    flower_programs.main(*_Server(socket.socket(fileno=int(sys.argv[1]))).serve())
