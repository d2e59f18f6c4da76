"""Running a config in Flower's simulation and deployment runtimes, from start to end."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from safetensors.torch import load_file

from fedsim import allowed_code, registry, regular_files
from fedsim.config import RunConfig
from fedsim.config.release_keys import modules_in_config
from fedsim.deploy.bundle import write_app
from fedsim.deploy.federation import CONNECTION, Federation
from fedsim.deploy.operator import Operator
from fedsim.deploy.rehearsal import Rehearsal, Simulation, federation_config
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record
from fedsim.privacy import Ledger, durable
from fedsim.process import end_on_signal
from fedsim.runs.callbacks import Callback, Callbacks, RunStatus
from fedsim.runs.channel import CallbackServer
from fedsim.runs.checkpoints import Checkpoints
from fedsim.runs.directory import OUT, RunDirectory, latest_run
from fedsim.runs.metrics import Row
from fedsim.runs.record import ArtefactsElsewhere, RunResult
from fedsim.runs.resolve import Resolved
from fedsim.runs.run_ledgers import RunLedgers, RunOutcome
from fedsim.strategies import RunFailedError

_log = logging.getLogger("fedsim")


def run_simulation(
    resolved: Resolved, out: Path | None = None, callbacks: Iterable[Callback] = ()
) -> RunResult:
    """Run a config as Flower virtual clients, on Flower's Ray-backed runtime.

    A SuperLink is started for the run on loopback, and ended with it.

    Parameters
    ----------
    resolved : Resolved
        Its config is sent with the run. Every client of the partition is a SuperNode.
    out : path, optional
        Directory for the artefacts, already claimed; a run in it is resumed.
    callbacks : iterable of Callback
        Called after each round; the run waits for their answers.

    Raises
    ------
    RunFailedError
        If the run failed, with its last error.
    """
    engine, clients = resolved.config.engine, resolved.config.partition.clients
    allowed = {allowed_code.VARIABLE: ",".join(allowed_code.current().modules)}
    return _run_locally(
        resolved,
        out,
        callbacks,
        lambda env: Simulation(allowed | env),
        federation_config(clients, engine.cpus_per_worker, engine.gpus_per_worker),
    )


def run_deployment(
    resolved: Resolved, out: Path | None = None, callbacks: Iterable[Callback] = ()
) -> RunResult:
    """Run a config on a deployed federation of SuperNodes; parameters as for `run_simulation`.

    With ``engine.federation``, the directory of a running federation, the ServerApp writes the
    artefacts on its SuperLink's host. If that is this machine, they are copied to ``out``, and
    callbacks get the rows of its metrics as they are written, without parameters; one that stops
    the run ends it after the round that is then in progress. Otherwise a federation with a
    SuperNode for each client is started on this machine for this run.

    Raises
    ------
    RunFailedError
        If the run failed, with its last error.
    FedsimError
        If the federation cannot be reached.
    """
    if resolved.config.engine.federation:
        federation = Federation.load(Path(resolved.config.engine.federation))
        return _submit(resolved, federation, out, callbacks)
    policy, clients = _own_policy(resolved.config), resolved.config.partition.clients
    modules = policy["modules"]
    return _run_locally(
        resolved,
        out,
        callbacks,
        lambda env: Rehearsal.temporary(clients, variables=env, policy=policy, modules=modules),
    )


def _run_locally(
    resolved: Resolved,
    out: Path | None,
    callbacks: Iterable[Callback],
    start_flower: Callable[[dict[str, str]], Simulation | Rehearsal],
    federation_config: str = "",
) -> RunResult:
    """Run a config in Flower processes on this machine, which end with the run.

    ``start_flower`` prepares these processes, given environment variables for the ServerApp.
    """
    config = resolved.config
    with (
        _directory(out, config) as directory,
        CallbackServer(callbacks) as server,
        start_flower({OUT: str(directory), **server.variables}) as processes,
    ):
        processes.start_all()
        # In the processes' directory, which is removed even if this process is killed.
        bundle = write_app(processes.directory / "app", config.to_tree())
        operator = processes.operator
        run_id = operator.submit(bundle, federation_config=federation_config)
        with _interruptible_by(server):
            _follow(operator, run_id, processes.check, None if out is None else RunDirectory(out))
        return _read(resolved, RunDirectory(directory))


def _own_policy(config: RunConfig) -> dict[str, Any]:
    """Policy for the user's own nodes: allows all files, and the modules that the config names."""
    modules = set()
    for key, name, module in modules_in_config(config):
        home = allowed_code.defining_module(registry.load(key, name)) if ":" in name else None
        modules |= {module, home or module}
    policy: dict[str, Any] = {"files": ["/"], "modules": sorted(modules)}
    if config.client.state_dir:
        policy["state-dir"] = str(Path(config.client.state_dir).absolute())
    return policy


def _submit(
    resolved: Resolved, federation: Federation, out: Path | None, callbacks: Iterable[Callback]
) -> RunResult:
    operator = Operator(federation.operator, CONNECTION)
    config = resolved.config
    resumed = latest_run(federation.runs, config.name) if config.checkpoint.resume else None
    rows = _MetricsWatcher(resolved, Callbacks.numbered(callbacks), resumed)
    with tempfile.TemporaryDirectory(prefix="fedsim-app-") as app:
        run_id = operator.submit(write_app(Path(app), config.to_tree()))
    directory = resumed or RunDirectory(federation.runs / f"{config.name}-{run_id}")
    with rows.watch(directory, run_id) as poll:
        _follow(operator, run_id, poll, directory)
    if not directory.path.is_dir():
        place = _artefact_place(operator.log(run_id))
        directory = RunDirectory(place)
        # The run's id is in the path, so that on another machine there is no such directory.
        if not os.access(directory.config, os.R_OK):
            raise ArtefactsElsewhere(run_id, place)
    if out is not None:
        RunDirectory(out).copy_from(directory)
    return _read(resolved, directory if out is None else RunDirectory(out))


@contextmanager
def _interruptible_by(server: CallbackServer) -> Iterator[None]:
    """Context in which Ctrl-C and SIGTERM end the run after its round, or at once if repeated."""
    with end_on_signal(server.end):
        try:
            yield
        except (FedsimError, RunFailedError):
            # A scheduler signals all processes of a job, so that Flower's may end before the run
            # has finished its round: that is an interruption, not a failure.
            if server.asked_to_end:
                raise KeyboardInterrupt from None
            raise


def _follow(
    operator: Operator, run_id: int, poll: Callable[[], None], directory: RunDirectory | None
) -> None:
    """Wait for a run to end; raise if it failed, and stop it on Ctrl-C.

    ``poll`` raises ChildProcessError if a process that the run needs has ended. The artefacts are
    in ``directory``, if that is on this machine; None if they are not kept.
    """
    try:
        status = operator.follow(run_id, poll, _show_warning)
    except KeyboardInterrupt:
        operator.stop(run_id)
        raise
    except ChildProcessError as error:
        raise RunFailedError(f"{error}.{_how_to_resume(directory)}") from None
    if status != "finished:completed":
        reason = _reason(operator, run_id).rstrip(".")
        raise RunFailedError(
            f"Flower reports '{status}' for run {run_id}: {reason}.{_how_to_resume(directory)}"
        )


def _how_to_resume(directory: RunDirectory | None) -> str:
    """How to continue a run that failed; empty if it cannot be."""
    if directory is None:
        return ""
    if not directory.path.is_dir():
        return " If it has a checkpoint, the same command with --resume continues from there."
    last = max(Checkpoints(directory.checkpoint).rounds(), default=None)
    if last is None:
        return ""
    return f" The same command with --resume continues from its checkpoint of round {last}."


def _show_warning(line: str) -> None:
    """Show a line of a run's log if it is the ServerApp's warning, such as why a node refuses."""
    _, mark, warning = line.partition("fedsim: WARNING: ")
    if mark:
        _log.warning("%s", warning)


class _MetricsWatcher:
    """Calls callbacks for a federation's run, by the metrics.csv that its ServerApp writes.

    Parameters
    ----------
    resolved : Resolved
    callbacks : Callbacks
    resumed : RunDirectory or None
        Directory of the run that is resumed, before the ServerApp writes to it again.
    """

    def __init__(
        self, resolved: Resolved, callbacks: Callbacks, resumed: RunDirectory | None
    ) -> None:
        self._resolved = resolved
        self._callbacks = callbacks
        self._round, self._requested = -1, False
        self._row: Row = {}
        self._version: tuple[int, int] | None = None
        if resumed is not None:
            self._round = max(Checkpoints(resumed.checkpoint).rounds(), default=-1)
            rows = resumed.metrics_file.rows()
            self._row = next((row for row in rows if row["round"] == self._round), {})
            # A resumed run writes the file again, without the rounds after its checkpoint.
            self._version = _version_of(resumed.metrics)

    @contextmanager
    def watch(self, directory: RunDirectory, run_id: int) -> Iterator[Callable[[], None]]:
        """Context of the run, with a function that passes new rows to the callbacks."""
        request = directory.stop_request(run_id)
        self._callbacks.on_start(self._status(directory))
        end: RunOutcome | None = None
        try:
            yield lambda: self._poll(directory, request)
            # Not if the run failed: the file may then be from before it was resumed.
            end = RunOutcome.read(directory.path) if directory.done.is_file() else None
        finally:
            if self._requested:
                with suppress(OSError):
                    request.unlink()
            elif self._callbacks.stopped is not None:
                self._warn_of_stop("it wrote nothing on this machine")
            self._callbacks.on_end(self._status(directory, end))

    def _poll(self, directory: RunDirectory, request: Path) -> None:
        version = _version_of(directory.metrics)
        if version not in (None, self._version):
            self._version = version
            for row in directory.metrics_file.rows():
                if row["round"] > self._round:
                    self._round, self._row = int(row["round"]), row
                    self._callbacks.on_round(self._status(directory))
        if self._callbacks.stopped and not self._requested and directory.path.is_dir():
            # The ServerApp stops the run itself, at the end of a round. Flower would end it at
            # once, without charging the ledger for a decision that depends on what was released.
            self._requested = True
            try:
                durable.replace(request, self._callbacks.stopped.encode(errors="replace"))
            except OSError as error:
                self._warn_of_stop(f"{request} cannot be written ({error.strerror})")

    def _warn_of_stop(self, obstacle: str) -> None:
        _log.warning(
            "A callback asked to stop the run (%s), but it continued, since %s.",
            self._callbacks.stopped,
            obstacle,
        )

    def _status(self, directory: RunDirectory, end: RunOutcome | None = None) -> RunStatus:
        return RunStatus(
            config=self._resolved.config,
            round=int(self._row.get("round", 0)),
            row=self._row,
            arrays=ArrayRecord(),
            protects=self._resolved.config.protects,
            uncovered=self._resolved.uncovered,
            directory=directory if directory.path.is_dir() else None,
            outcome=end,
            columns=self._resolved.data.dataset.columns,
        )


def _version_of(file: Path) -> tuple[int, int] | None:
    """A file's inode and size, which change if it is replaced or grows; None without the file."""
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_ino, about.st_size


def _read(resolved: Resolved, directory: RunDirectory) -> RunResult:
    ledgers = RunLedgers.read(directory.path)
    if ledgers.server is None:
        ledgers = replace(ledgers, server=Ledger(delta=resolved.config.noise.delta))
    saved = load_file(regular_files.require(directory.model))
    rows = directory.metrics_file.rows()
    return RunResult(
        metrics=[*rows],
        # In the order of the model's parameters, which safetensors files do not preserve.
        arrays=array_record({name: saved[name] for name in resolved.initial_arrays}),
        ledgers=ledgers,
        directory=directory,
        notes=resolved.notes,
    )


def _reason(operator: Operator, run_id: int) -> str:
    """The error that ended a run, from its log."""
    try:
        log = operator.log(run_id)
    except FedsimError:
        return "its log cannot be had."
    errors: list[str] = re.findall(r"^[\w.]*(?:Error|Exception)\b.*$", log, flags=re.MULTILINE)
    causes = [error for error in errors if not any(words in error for words in _WRAPPED)]
    if errors:
        return (causes or errors)[-1]
    details = operator.details(run_id)
    return _CAUSES.get(details, details)


_CAUSES = {
    "No heartbeat received from the task": (
        "the ServerApp has died, or has not reached its SuperLink for a minute"
    )
}
"""Causes of what Flower says of a run that has logged no error."""

_WRAPPED = ("Ending simulation", "Simulation Runtime crashed")
"""Errors that Flower's simulation logs after any error; they are not the cause."""


def _artefact_place(log: str) -> str:
    places = re.findall(r"the artefacts of run \d+ are in (.*)$", log, flags=re.MULTILINE)
    return str(places[-1]).strip() if places else "its log"


@contextmanager
def _directory(out: Path | None, config: RunConfig) -> Iterator[Path]:
    """``out``, which is claimed already, or a temporary directory, claimed here."""
    if out is not None:
        yield out.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="fedsim-run-") as temporary:
        directory = RunDirectory(Path(temporary) / "run")
        with directory.claim(config.to_toml()):
            yield directory.path
