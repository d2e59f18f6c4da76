"""The operator of a SuperLink, who registers nodes and submits runs by Flower's ``flwr`` command.

Run as ``python -m fedsim.deploy.operator CONNECTION KEY...`` with FLWR_HOME set, this module
registers SuperNodes by their public keys, with Flower's own command but one Python for all keys.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsim import regular_files
from fedsim.deploy.processes import environment, program
from fedsim.errors import FedsimError, RunFailedError
from fedsim.process import deferred_signals

_log = logging.getLogger("fedsim")

_OUTAGE = 90.0  # seconds; an app of Flower's waits for its SuperLink for 60
_STOP_SECONDS = 12.0
_HANDSHAKE_SECONDS = 5.0


class Operator:
    """A SuperLink's operator: registers nodes, submits runs and follows them.

    Parameters
    ----------
    home : Path
        FLWR_HOME, whose config.toml has the connection.
    connection : str
        Name of the SuperLink in that config.toml.
    """

    def __init__(self, home: Path, connection: str) -> None:
        self.home = home
        self.connection = connection

    def register(self, public_keys: Sequence[Path]) -> None:
        """Register SuperNodes by their public keys.

        Raises
        ------
        FedsimError
            If the SuperLink refuses one, for example because its key is registered already.
        """
        module = [sys.executable, "-m", "fedsim.deploy.operator", self.connection]
        self._run_to_end([*module, *(os.fspath(key) for key in public_keys)], "supernode register")

    def submit(self, app: Path, *, federation_config: str = "", run_config: str = "") -> int:
        """Submit a run.

        Returns
        -------
        int
            The run's id.

        Raises
        ------
        KeyboardInterrupt
            On Ctrl-C or SIGTERM, after the run has been stopped: nobody else would know its id.
        """
        options = ["--federation-config", federation_config] if federation_config else []
        options += ["--run-config", run_config] if run_config else []
        run_id = None
        try:
            with deferred_signals():
                answer = self._json("run", str(app), self.connection, *options)
                run_id = int(answer["run-id"])
        except KeyboardInterrupt:
            if run_id is not None:
                self.stop(run_id)
            raise
        return run_id

    def status(self, run_id: int) -> str:
        """A run's status: "pending", "starting", "running" or "finished:..."."""
        return str(self._run_entry(run_id)["status"])

    def details(self, run_id: int) -> str:
        """Why a run has ended, as far as Flower knows."""
        return str(self._run_entry(run_id).get("status-details", ""))

    def _run_entry(self, run_id: int) -> dict[str, Any]:
        answer = self._json("list", self.connection, "--run-id", str(run_id))
        for run in answer["runs"]:
            if int(run["run-id"]) == run_id:
                entry: dict[str, Any] = run
                return entry
        raise FedsimError(f"the SuperLink knows no run {run_id}.")

    def stop(self, run_id: int) -> None:
        """Stop a run, after an interruption; warn how to stop it if that fails."""
        try:
            self._run("stop", str(run_id), self.connection, seconds=_STOP_SECONDS)
        except (FedsimError, KeyboardInterrupt) as error:
            _log.warning(
                "run %d was not stopped (%s), and continues; stop it with "
                "`FLWR_HOME=%s flwr stop %d %s`.",
                *(run_id, str(error) or "interrupted again"),
                *(shlex.quote(os.fspath(self.home)), run_id, self.connection),
            )

    def log(self, run_id: int) -> str:
        """Output of the run's ServerApp so far."""
        return self._run("log", str(run_id), self.connection, "--show")

    def follow(
        self,
        run_id: int,
        poll: Callable[[], None] = lambda: None,
        show: Callable[[str], None] = lambda line: None,
    ) -> str:
        """Wait for a run to end.

        Parameters
        ----------
        poll : callable
            Called several times a second, and at the end; it may raise to end the waiting.
        show : callable
            Called with each line of the run's log, once for lines that are equal.

        Returns
        -------
        str
            The run's final status, which the exit code of ``flwr run --stream`` does not tell.

        Raises
        ------
        RunFailedError
            If the SuperLink does not answer for longer than a run can survive.
        """
        silent_since: float | None = None
        shown: set[str] = set()  # a stream that is opened again begins at the log's first line
        while True:
            with self._stream(run_id) as (stream, lines):
                while stream.poll() is None:
                    poll()
                    _show_new(lines, shown, show)
                    time.sleep(0.1)
                _show_new(lines, shown, show)
            try:
                status, silent_since = self.status(run_id), None
            except FedsimError:
                status, silent_since = "unknown", silent_since or time.monotonic()
                if time.monotonic() - silent_since > _OUTAGE:
                    raise RunFailedError(
                        f"the SuperLink has not answered for {_OUTAGE:g} s, longer than a run "
                        "survives; when it is up again, the same command with --resume continues "
                        f"from the last checkpoint.{self._certificate_fault()}"
                    ) from None
            poll()
            if status.startswith("finished"):
                return status
            time.sleep(1.0)

    @contextmanager
    def _stream(self, run_id: int) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[str]]]:
        """A process that ends with the run, or with its connection to the SuperLink; its output."""
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [program("flwr"), "log", str(run_id), self.connection, "--stream"],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
            )
            try:
                yield process, _complete_lines(output.fileno())
            finally:
                process.kill()
                process.wait()

    def _json(self, *arguments: str) -> dict[str, Any]:
        text = self._run(*arguments, "--format", "json")
        try:
            answer: dict[str, Any] = json.loads(text[text.index("{") :])
        except ValueError:
            raise FedsimError(f"flwr {arguments[0]} answered: {text.strip()}") from None
        if answer.get("success") is False:
            raise FedsimError(f"flwr {arguments[0]} failed: {answer.get('error-message', text)}")
        return answer

    def _run(self, *arguments: str, seconds: float | None = None) -> str:
        return self._run_to_end([program("flwr"), *arguments], arguments[0], seconds)

    def _run_to_end(self, command: Sequence[str], name: str, seconds: float | None = None) -> str:
        try:
            process = subprocess.run(
                command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds,
                # A terminal sends Ctrl-C to all processes of its group.
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise FedsimError(f"flwr {name} has not ended in {seconds:g} s.") from None
        if process.returncode != 0:
            said = (process.stdout + process.stderr).strip() + self._certificate_fault()
            raise FedsimError(f"flwr {name} failed: {said}")
        return process.stdout

    def _certificate_fault(self) -> str:
        """A sentence if the SuperLink's certificate is not accepted, as once it has expired.

        Flower then says that there is no connection.
        """
        try:
            link = regular_files.read_toml(self.home / "config.toml")["superlink"][self.connection]
            context = ssl.create_default_context(cafile=link["root-certificates"])
            host, _, port = str(link["address"]).rpartition(":")
            with socket.create_connection((host, int(port)), timeout=_HANDSHAKE_SECONDS) as plain:
                context.wrap_socket(plain, server_hostname=host).close()
        except ssl.SSLCertVerificationError as error:
            return (
                f" The SuperLink's certificate is not accepted ({error.verify_message}); "
                "`fedsim deploy renew` makes a new one."
            )
        except (OSError, ValueError, KeyError):
            pass  # it has no certificate, or cannot be reached
        return ""

    def _environment(self) -> dict[str, str]:
        return {**environment(), "FLWR_HOME": os.fspath(self.home)}


def _complete_lines(file: int) -> Iterator[str]:
    """Each line of a file that another process writes; an empty string where there is none yet."""
    unread, offset = b"", 0
    while True:
        arrived = os.pread(file, 1 << 20, offset)
        offset += len(arrived)
        *lines, unread = (unread + arrived).split(b"\n")
        yield from (line.decode(errors="replace") for line in filter(None, lines))
        if not arrived:
            yield ""


def _show_new(lines: Iterator[str], shown: set[str], show: Callable[[str], None]) -> None:
    """Show the lines that have arrived and were not shown before."""
    while line := next(lines):
        if line not in shown:
            shown.add(line)
            show(line)


def main(connection: str, keys: list[str]) -> None:
    """Register public key files; the process ends at the first that is refused."""
    from flwr.cli.app import app

    for key in keys:
        app(["supernode", "register", key, connection], standalone_mode=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
