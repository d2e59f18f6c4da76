"""Running a config in Flower's simulation and deployment runtimes, from start to end."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from safetensors.torch import load_file

from fedsim import allowed_code, registry, regular_files
from fedsim.config import RunConfig
from fedsim.config.release_keys import modules_named
from fedsim.deploy.bundle import write_app
from fedsim.deploy.federation import CONNECTION, Federation
from fedsim.deploy.operator import Operator
from fedsim.deploy.rehearsal import Rehearsal, Simulation, resources
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record
from fedsim.privacy import Ledger
from fedsim.process import end_on_signal
from fedsim.runs.callbacks import Callback, Callbacks, RunStatus
from fedsim.runs.channel import CallbackServer
from fedsim.runs.directory import OUT, RunDirectory, ending, last_run
from fedsim.runs.record import RanElsewhere, RunResult
from fedsim.runs.resolve import Resolved
from fedsim.runs.run_ledgers import RunLedgers
from fedsim.strategies import RunFailedError


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
    sized = resources(clients, engine.cpus_per_worker, engine.gpus_per_worker)
    return _run_locally(resolved, out, callbacks, lambda env: Simulation(allowed | env), sized)


def run_deployment(
    resolved: Resolved, out: Path | None = None, callbacks: Iterable[Callback] = ()
) -> RunResult:
    """Run a config on a deployed federation of SuperNodes; parameters as for `run_simulation`.

    With ``engine.federation``, the directory of a running federation, the ServerApp writes the
    artefacts on its SuperLink's host. If that is this machine, they are copied to ``out``, and
    callbacks get the rows of its metrics as they are written, without parameters. Otherwise a
    federation with a SuperNode for each client is started on this machine for this run.

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
    flower: Callable[[dict[str, str]], Simulation | Rehearsal],
    federation_config: str = "",
) -> RunResult:
    """Run a config in Flower processes on this machine, which end with the run.

    ``flower`` prepares these processes, given environment variables for the ServerApp.
    """
    config = resolved.config
    with (
        _directory(out, config) as directory,
        CallbackServer(callbacks) as server,
        flower({OUT: str(directory), **server.variables}) as processes,
        tempfile.TemporaryDirectory(prefix="fedsim-app-") as app,
    ):
        processes.start_all()
        operator, bundle = processes.operator, write_app(Path(app), config.to_tree())
        run_id = operator.submit(bundle, federation_config=federation_config)
        with _interruptible_by(server):
            _follow(operator, run_id, processes.tend)
        return _read(resolved, RunDirectory(directory))


def _own_policy(config: RunConfig) -> dict[str, Any]:
    """Policy for the user's own nodes: allows all files, and the modules that the config names."""
    modules = set()
    for key, name, module in modules_named(config):
        home = allowed_code.home_of(registry.load(key, name)) if ":" in name else None
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
    resumed = last_run(federation.runs, config.name) if config.checkpoint.resume else None
    with tempfile.TemporaryDirectory(prefix="fedsim-app-") as app:
        run_id = operator.submit(write_app(Path(app), config.to_tree()))
    directory = resumed or RunDirectory(federation.runs / f"{config.name}-{run_id}")
    rows = _Rows(resolved, directory, Callbacks.numbered(callbacks))
    _follow(operator, run_id, rows.look)
    if not directory.path.is_dir():
        raise RanElsewhere(run_id, _artefact_place(operator.log(run_id)))
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


def _follow(operator: Operator, run_id: int, look: Callable[[], None]) -> None:
    """Wait for a run to end; raise if it failed, and stop it on Ctrl-C."""
    try:
        status = operator.follow(run_id, look)
    except KeyboardInterrupt:
        operator.stop(run_id)
        raise
    if status != "finished:completed":
        reason = _reason(operator, run_id)
        raise RunFailedError(f"Flower reports '{status}' for run {run_id}: {reason}")


class _Rows:
    """Passes new rows of metrics.csv, which another process writes, to callbacks."""

    def __init__(self, resolved: Resolved, directory: RunDirectory, callbacks: Callbacks) -> None:
        self._resolved = resolved
        self._directory = directory
        self._callbacks = callbacks
        self._row_count = 0
        self._size = 0

    def look(self) -> None:
        try:
            size = self._directory.metrics.stat().st_size
        except OSError:
            return
        if size == self._size:
            return
        self._size = size
        rows = self._directory.metrics_file.rows()
        for row in rows[self._row_count :]:
            self._callbacks.on_round(
                RunStatus(
                    config=self._resolved.config,
                    round=int(row["round"]),
                    row=row,
                    arrays=ArrayRecord(),
                    protects=self._resolved.config.protects,
                    uncovered=self._resolved.uncovered,
                    directory=self._directory,
                )
            )
        self._row_count = len(rows)


def _read(resolved: Resolved, directory: RunDirectory) -> RunResult:
    delta = resolved.config.noise.delta
    has_ledger = directory.ledger.exists()
    ledger = Ledger.read(directory.ledger, delta=delta) if has_ledger else Ledger(delta=delta)
    saved = load_file(regular_files.require(directory.model))
    rows = directory.metrics_file.rows()
    end_state, reason = ending(directory.path)
    config, clients = resolved.config.to_run_config(), resolved.client_ledgers
    return RunResult(
        metrics=[*rows],
        # In the order of the model's parameters, which safetensors files do not preserve.
        arrays=array_record({name: saved[name] for name in resolved.initial_arrays}),
        claims=RunLedgers(config, ledger, clients, end_state).statements,
        ended=end_state,
        why=reason,
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
    return (causes or errors)[-1] if errors else "\n".join(log.splitlines()[-5:])


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
