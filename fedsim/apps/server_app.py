"""The ServerApp that Flower's runtimes load, which executes a run over their grid."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsim import allowed_code, regular_files
from fedsim.config import RunConfig
from fedsim.deploy.flower_replacements import replace_dead_actors
from fedsim.deploy.party_files import read_roster
from fedsim.deploy.services import CLIENTS, SuperLink
from fedsim.errors import FedsimError, printable
from fedsim.federation.engines.process import use_one_thread
from fedsim.federation.engines.streaming import StreamingGrid
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.channel import remote_callback
from fedsim.runs.directory import OUT, RUNS, RunDirectory, latest_run
from fedsim.runs.preflight import check
from fedsim.runs.resolve import resolve
from fedsim.runs.resume import resumed_config
from fedsim.runs.runner import drive
from fedsim.runs.session import CALLERS_CALLBACKS

_log = logging.getLogger("fedsim")

LOG_FORMAT = "fedsim: %(levelname)s: %(message)s"
"""Format of a ServerApp's lines in its run's log, from which the operator is shown warnings."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Execute the run-config, and write the run's artefacts to this machine."""
    _show_our_log()
    use_one_thread()
    with allowed_code.use(SuperLink.process_allowed_code()):
        _run(grid, context)


def _run(grid: Grid, context: Context) -> None:
    config = RunConfig.from_run_config(context.run_config)
    if config.engine.name == "simulation":
        replace_dead_actors()
    # If OUT is set, the process that set it has claimed the directory and reads the results there.
    claimed = OUT in os.environ
    earlier = None
    if config.checkpoint.resume and not claimed:
        earlier = latest_run(_runs(), config.name)
    if earlier is not None:
        config = resumed_config(config, earlier)
    resolved = resolve(config)
    check(resolved)
    directory = earlier or RunDirectory(run_directory(config.name, context.run_id))
    _log.info("the artefacts of run %s are in %s", context.run_id, directory.path.absolute())
    streaming = StreamingGrid(
        grid,
        clients=config.partition.clients,
        patience=config.engine.node_timeout,
        roster=roster_for(config),
        times_each_client=config.engine.name == "deployment",
        packs=config.engine.name == "deployment",
    )
    text = resolved.config.to_toml()
    holding = directory.claim(text) if earlier is None else directory.lock_for_resume(text)
    request = directory.stop_request(context.run_id)
    callbacks: dict[str, Callback] = {"log": _Log(), "submitter": _StopRequest(request)}
    distant = remote_callback()
    if distant is not None:
        callbacks[CALLERS_CALLBACKS] = distant
    with nullcontext() if claimed else holding:
        result = drive(
            resolved,
            streaming,
            directory,
            callbacks,
            end_request=lambda: distant is not None and distant.asked_to_end,
        )
    _log.info("%s %s", result.ended, result.why)


def run_directory(name: str, run_id: int) -> Path:
    """The directory of a run's artefacts on the server's machine."""
    if OUT in os.environ:
        return Path(os.environ[OUT])
    return _runs() / f"{name}-{run_id}"


def _runs() -> Path:
    return Path(os.environ.get(RUNS, "runs"))


def roster_for(config: RunConfig) -> dict[str, int] | None:
    """Client id of each registered key; None without a roster, where nodes are queried for ids.

    Raises
    ------
    FedsimError
        In a deployment without a roster.
    """
    path = os.environ.get(CLIENTS)
    if path is None and config.engine.name == "deployment":
        raise FedsimError(
            f"{CLIENTS} is not set on the SuperLink's machine; start the SuperLink with `fedsim "
            "deploy superlink`, which knows the client of each key."
        )
    return read_roster(Path(path)) if path else None


class _Log(Callback):
    """Writes each round's metrics to the log."""

    def on_round(self, status: RunStatus) -> None:
        row = status.row
        shown = {key: value for key, value in row.items() if value or not key.startswith("failed-")}
        _log.info("%s", "  ".join(f"{key} {value:.6g}" for key, value in shown.items()))


class _StopRequest(Callback):
    """Stops the run once ``request``, a file that the submitting process may write, exists."""

    def __init__(self, request: Path) -> None:
        self._request = request

    def on_start(self, status: RunStatus) -> str | None:
        """The reason to stop, if there is a request."""
        return self.on_round(status)

    def on_round(self, status: RunStatus) -> str | None:
        """The reason to stop, if there is a request."""
        if not self._request.is_file():
            return None
        return printable(regular_files.read_text(self._request, errors="replace"))


def _show_our_log() -> None:
    # Only fedsim's logger: a root handler would show every HTTP request, even the log's uploads.
    if not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False
