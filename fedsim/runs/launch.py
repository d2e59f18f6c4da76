"""Running a config in Flower's own runtimes, from start to end."""

from __future__ import annotations

import csv
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from fedsim.deploy.bundle import write_app
from fedsim.deploy.federation import CONNECTION, Federation
from fedsim.deploy.flwr_cli import Operator
from fedsim.deploy.rehearsal import Rehearsal
from fedsim.deploy.simulation import Simulation, resources
from fedsim.engines.arrays import array_record
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.runs.artefacts import OUT, RunDirectory
from fedsim.runs.build import Build
from fedsim.runs.drive import Observer, Row, RunResult
from fedsim.strategies import RunFailedError

__all__ = ["RanElsewhere", "run_deployment", "run_simulation"]


class RanElsewhere(Exception):  # noqa: N818 - a run that succeeded is no error
    """A run has finished, and its artefacts are on the SuperLink's host, not on this one.

    Attributes
    ----------
    run_id : int
    path : str
        Where they are there.
    """

    def __init__(self, run_id: int, path: str) -> None:
        super().__init__(f"run {run_id} has finished; on the SuperLink's host, see {path}")
        self.run_id = run_id
        self.path = path


def run_simulation(
    build: Build,
    out: Path | None = None,
    observer: Observer | None = None,
    *,
    cpus_per_client: float = 1.0,
    gpus_per_client: float = 0.0,
) -> RunResult:
    """Run a config as Flower virtual clients, on Flower's Ray-backed runtime.

    A SuperLink of our own is started for it on loopback, and ended with it.

    Parameters
    ----------
    build : Build
        Its config, resolved, goes with the run. Every client of the partition is a SuperNode.
    out : path, optional
        Directory for the artefacts, claimed already.
    observer : callable, optional
        Called with each row of the metrics when it is there.
    cpus_per_client, gpus_per_client : float
        What Ray reserves for a client, and so how many run at a time.

    Raises
    ------
    RunFailedError
        If the run failed, with its last error.
    """
    with (
        _directory(out) as directory,
        Simulation({OUT: str(directory)}) as simulation,
    ):
        app = write_app(simulation.directory / "app", build.resolved.to_tree())
        sized = resources(build.config.partition.clients, cpus_per_client, gpus_per_client)
        run_id = simulation.operator.submit(app, federation_config=sized)
        rows = _follow(simulation.operator, run_id, directory, observer, simulation.check)
        return _read(build, directory, rows)


def run_deployment(
    build: Build,
    out: Path | None = None,
    observer: Observer | None = None,
    *,
    federation: Path | None = None,
) -> RunResult:
    """Run a config on a deployed federation of SuperNodes.

    Parameters
    ----------
    build, out, observer
        As for `run_simulation`.
    federation : path, optional
        Directory of a federation that is up: the ServerApp writes the artefacts on its
        SuperLink's host, and if that is this machine they are copied to ``out``. Without one,
        a federation with a SuperNode for each client is brought up here for this run.

    Raises
    ------
    RunFailedError
        If the run failed, with its last error.
    FedsimError
        If the federation cannot be reached.
    """
    if federation is not None:
        return _submit(build, Federation.load(federation), out, observer)
    with (
        _directory(out) as directory,
        Rehearsal.temporary(
            build.config.partition.clients,
            variables={OUT: str(directory)},
            policy=_own_policy(build),
        ) as rehearsal,
        tempfile.TemporaryDirectory(prefix="fedsim-app-") as app,
    ):
        rehearsal.start_all()
        operator = rehearsal.operator
        run_id = operator.submit(write_app(Path(app), build.resolved.to_tree()))
        rows = _follow(operator, run_id, directory, observer, rehearsal.tend)
        return _read(build, directory, rows)


def _own_policy(build: Build) -> dict[str, Any]:
    """Policy of nodes that are this user's own: whatever the config says goes."""
    config = build.config
    texts = [value for value in config.to_run_config().values() if isinstance(value, str)]
    modules = [text.partition(":")[0] for text in texts if ":" in text]
    policy: dict[str, Any] = {"files": ["/"], "modules": sorted(set(modules))}
    if config.client.state_dir:
        policy["state-dir"] = str(Path(config.client.state_dir).absolute())
    return policy


def _submit(
    build: Build, federation: Federation, out: Path | None, observer: Observer | None
) -> RunResult:
    operator = Operator(federation.operator, CONNECTION)
    with tempfile.TemporaryDirectory(prefix="fedsim-app-") as app:
        run_id = operator.submit(write_app(Path(app), build.resolved.to_tree()))
    written = federation.runs / f"{build.config.name}-{run_id}"
    rows = _follow(operator, run_id, written, observer, lambda: None)
    if not written.is_dir():
        raise RanElsewhere(run_id, _where(operator.log(run_id)))
    if out is not None:
        RunDirectory(out).copy_from(RunDirectory(written))
    return _read(build, out or written, rows)


def _follow(
    operator: Operator,
    run_id: int,
    directory: Path,
    observer: Observer | None,
    alive: Callable[[], None],
) -> list[Row]:
    """Follow a run to its end; its rows."""
    rows = _Rows(directory / "metrics.csv", observer)
    try:
        status = operator.follow(run_id, rows.look, alive=alive)
    except KeyboardInterrupt:
        operator.stop(run_id)
        raise
    if status != "finished:completed":
        reason = _reason(operator, run_id)
        raise RunFailedError(f"Flower reports '{status}' for run {run_id}: {reason}")
    return rows.rows


class _Rows:
    """The rows of a metrics.csv, as they are written."""

    def __init__(self, path: Path, observer: Observer | None) -> None:
        self.rows: list[Row] = []
        self._path = path
        self._observer = observer
        self._size = 0

    def look(self) -> None:
        try:
            size = self._path.stat().st_size
            if size == self._size:
                return
            with self._path.open(newline="", encoding="utf-8") as file:
                rows = [_row(raw) for raw in csv.DictReader(file)]
        except OSError:
            return
        self._size = size
        new, self.rows = rows[len(self.rows) :], rows
        for row in new:
            if self._observer is not None:
                self._observer(row)


def _row(raw: dict[str, str]) -> Row:
    """A row of metrics.csv as `drive` made it: a column that a round lacks is empty."""
    return {
        key: int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        for key, text in raw.items()
        if text
    }


def _read(build: Build, path: Path, rows: list[Row]) -> RunResult:
    directory = RunDirectory(path)
    delta = build.config.noise.delta
    written = directory.ledger.exists()
    ledger = Ledger.read(directory.ledger, delta=delta) if written else Ledger(delta=delta)
    saved = load_file(directory.model)
    early = not rows or int(rows[-1]["round"]) < build.config.rounds
    privacy, examples = build.statements(ledger.statement(delta))
    return RunResult(
        metrics=rows,
        # In the model's order, which the file does not keep.
        arrays=array_record({name: saved[name] for name in build.initial_arrays}),
        privacy=privacy,
        example_privacy=examples,
        ended="budget" if early else "finished",
        why="Stopped before the budget was exceeded." if early else "",
        directory=directory,
    )


def _reason(operator: Operator, run_id: int) -> str:
    """The error that ended a run, from its log."""
    try:
        log = operator.log(run_id)
    except FedsimError:
        return "its log cannot be had."
    errors = re.findall(r"^[\w.]*(?:Error|Exception)\b.*$", log, flags=re.MULTILINE)
    return str(errors[-1]) if errors else "\n".join(log.splitlines()[-5:])


def _where(log: str) -> str:
    places = re.findall(r"the artefacts of run \d+ are in (.*)$", log, flags=re.MULTILINE)
    return str(places[-1]).strip() if places else "its log"


@contextmanager
def _directory(out: Path | None) -> Iterator[Path]:
    """``out``, or a directory that lasts as long as the run."""
    if out is not None:
        yield out.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="fedsim-run-") as temporary:
        yield Path(temporary)
