"""Loggers: callbacks that send a run's config and rows to TensorBoard, MLflow, W&B or Trackio."""

from __future__ import annotations

import contextlib
import contextvars
import secrets
import sys
from typing import Any

from fedsim import optional_packages
from fedsim.errors import FedsimError
from fedsim.federation.state_tree import Tree
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.synonyms import closest


class TensorBoard(Callback):
    """Writes event files in the run's directory: a scalar for each column, the config as text.

    A resumed run starts a new file, which makes TensorBoard drop earlier points of later rounds.
    """

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, status: RunStatus) -> None:
        """Open the event file, and write the config."""
        if status.directory is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        step = status.round + 1 if status.round else 0
        self._writer = SummaryWriter(str(status.directory.tensorboard), purge_step=step)
        self._writer.add_text("config", f"```toml\n{status.config.to_toml()}```", status.round)

    def on_round(self, status: RunStatus) -> None:
        """Write a round's numbers."""
        if self._writer is not None:
            for name, value in status.row.items():
                if name != "round":
                    self._writer.add_scalar(name, value, status.round)
            self._writer.flush()

    def on_end(self, status: RunStatus) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class _Continued(Callback):
    """Logger whose remote run is found again by its id after a resume."""

    def __init__(self) -> None:
        self._id: str | None = None

    def state(self) -> Tree:
        """State: the remote run's id."""
        return {"id": self._id}

    def restore(self, state: Tree) -> None:
        """Restore the remote run's id."""
        self._id = state["id"]


class MLflow(_Continued):
    """Logs parameters and metrics to a run of MLflow, configured by its environment variables.

    A resumed run continues the same run of MLflow.
    """

    def on_start(self, status: RunStatus) -> None:
        """Start the run of MLflow, or resume it."""
        import mlflow

        resumed, name = self._id is not None, status.config.title or status.config.name
        self._id = mlflow.start_run(run_id=self._id, run_name=name, nested=True).info.run_id
        # MLflow has one active run, and a sweep makes several runs at once: every call below names
        # its run, which continues without being the active one.
        mlflow.end_run("RUNNING")
        if not resumed:
            mlflow.log_params(status.config.to_run_config(), run_id=self._id)

    def on_round(self, status: RunStatus) -> None:
        """Log a round's numbers."""
        if self._id is not None:  # without an id they would go to the active run
            import mlflow

            numbers = {name: float(value) for name, value in status.row.items() if name != "round"}
            mlflow.log_metrics(numbers, step=status.round, run_id=self._id)

    def on_end(self, status: RunStatus) -> None:
        """End the run of MLflow."""
        if self._id is not None:
            import mlflow

            state = "FINISHED" if status.ended else "FAILED"
            mlflow.MlflowClient().set_terminated(self._id, state)


class WandB(_Continued):
    """Logs config and rows to a run of Weights & Biases, configured by its environment variables.

    A resumed run continues the same run there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None

    def on_start(self, status: RunStatus) -> None:
        """Start the run of Weights & Biases, or resume it."""
        import wandb

        self._run = wandb.init(
            project="fedsim",
            name=status.config.title or status.config.name,
            config=status.config.to_run_config(),
            dir=None if status.directory is None else str(status.directory.path),
            id=self._id,
            resume="allow",
            reinit="create_new",  # by default a sweep's second run would get the first one's
        )
        self._id = self._run.id

    def on_round(self, status: RunStatus) -> None:
        """Log a round's row."""
        self._run.log(dict(status.row), step=status.round)

    def on_end(self, status: RunStatus) -> None:
        """End the run of Weights & Biases."""
        self._run.finish(exit_code=0 if status.ended else 1)


class Trackio(_Continued):
    """Logs config and rows to a run of Trackio, on this machine or where its variables say.

    A resumed run continues the same run there. Its name ends in random digits, since Trackio finds
    a run by its name alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None

    def on_start(self, status: RunStatus) -> None:
        """Start the run of Trackio, or resume it."""
        import trackio

        title = status.config.title or status.config.name
        self._id = self._id or f"{title}-{secrets.token_hex(4)}"
        # `init` ends the run that is current in its context: in a sweep, that of another run.
        with contextlib.redirect_stdout(sys.stderr):  # stdout may be `--json`'s
            self._run = contextvars.Context().run(
                trackio.init,
                project="fedsim",
                name=self._id,
                config=status.config.to_run_config(),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def on_round(self, status: RunStatus) -> None:
        """Log a round's row."""
        if self._run is not None:
            row = {name: value for name, value in status.row.items() if name != "round"}
            self._run.log(row, step=status.round)

    def on_end(self, status: RunStatus) -> None:
        """Send what is left, and end the run of Trackio."""
        if self._run is not None:
            with contextlib.redirect_stdout(sys.stderr):
                self._run.finish()


LOGGERS: dict[str, type[Callback]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
    "trackio": Trackio,
}
"""Loggers by the name of the package that each needs, which is also fedsim's extra."""


def loggers(to: str) -> dict[str, Callback]:
    """Make the loggers that `log.to` names, separated by commas.

    Raises
    ------
    FedsimError
        If there is no such logger, or its package is not installed.
    """
    names = [name.strip() for name in to.split(",") if name.strip()]
    for name in names:
        if name not in LOGGERS:
            hint = closest("logger", name, LOGGERS)
            raise FedsimError(f"log.to = '{to}';{hint} must be of {', '.join(LOGGERS)}.")
        optional_packages.require(f"log.to = '{to}'", name)
    return {name: LOGGERS[name]() for name in names}
