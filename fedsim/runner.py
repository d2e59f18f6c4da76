"""`fedsim.run`: one config, on the engine that it names."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch

from fedsim.artefacts import RunDirectory
from fedsim.build import Build
from fedsim.config import RunConfig
from fedsim.drive import Observer, RunResult, drive
from fedsim.engines import LocalGrid

__all__ = ["run"]


def run(
    config: RunConfig,
    *,
    engine: str | None = None,
    out: str | PathLike[str] | None = None,
    overwrite: bool = False,
    observer: Observer | None = None,
) -> RunResult:
    """Run a config from start to end.

    Parameters
    ----------
    engine : "local", "ray", "simulation" or "deployment", optional
        Instead of ``engine.name``.
    out : path, optional
        Directory for the artefacts; without one nothing is written.
    overwrite : bool
        Whether ``out`` may replace a run that is there.
    observer : callable, optional
        Called with each row of the metrics as soon as there is one.

    Raises
    ------
    FedsimError
        For anything in the config that cannot be, before anything is written.
    RunFailedError
        If too many rounds in a row had no usable reply.
    """
    changes: dict[str, Any] = {} if engine is None else {"engine.name": engine}
    config = config.replace(**changes)
    directory = None if out is None else RunDirectory(out)
    if directory is not None:
        directory.check_free(overwrite)
    torch.set_num_threads(1)
    build = Build(config)
    trainer = build.trainer
    build.strategy()
    if directory is not None:
        directory.claim(build.resolved.to_toml())
    return drive(build, LocalGrid(trainer), directory, observer)
