"""`fedsim.run`: one config, on the engine that it names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import TYPE_CHECKING, Any

from flwr.serverapp import Grid

from fedsim.config import RunConfig
from fedsim.datasets import dataset_of
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.engines.process import settled
from fedsim.federation.engines.schedule import helpful_workers
from fedsim.privacy.durable import archive
from fedsim.runs.callbacks import Callback, Callbacks
from fedsim.runs.directory import RunDirectory
from fedsim.runs.local_training import state_dir
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.runs.preflight import check, check_past, warnings
from fedsim.runs.resolve import Resolved, resolve
from fedsim.runs.result import RunResult
from fedsim.runs.resume import move_client_ledgers, refuse_other_objects, resumed_config
from fedsim.runs.session import YOURS, drive
from fedsim.runs.wings import wing
from fedsim.settings import shown
from fedsim.training.workload import local_multiplications

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy
    from torch import nn

    from fedsim.datasets import Dataset
    from fedsim.federation.engines.ray import RayGrid
    from fedsim.partitions import Partition


_log = logging.getLogger("fedsim")


@settled()
def run(
    config: RunConfig,
    *,
    engine: str | None = None,
    out: str | PathLike[str] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    callbacks: Iterable[Callback] = (),
    model: nn.Module | None = None,
    data: Dataset | Mapping[str, Any] | Sequence[Any] | None = None,
    partition: Partition | None = None,
    strategy: Strategy | None = None,
) -> RunResult:
    """Run a config from start to end.

    Parameters
    ----------
    engine : "local", "ray", "simulation" or "deployment", optional
        Where the clients run, instead of ``engine.name``.
    out : path, optional
        Directory for the artefacts; without one nothing is written.
    overwrite : bool
        Whether ``out`` may replace a run that is there.
    resume : bool
        Whether to go on with the run that is in ``out``, from its last checkpoint; without one
        there, or without a run, it starts anew. Only keys that cannot affect a release may differ
        from that run's.
    callbacks : iterable of Callback
        Called in this process, on every engine.
    model, data, partition : nn.Module, Dataset, Partition, optional
        In the place of what the config's tables name, on the engines 'local' and 'ray'. The run's
        config.toml then needs them to say the same run again. ``data`` may be a dict of arrays or a
        pair of (x, y) or torch data sets, too; see `fedsim.datasets.dataset_of`.
    strategy : Strategy, optional
        A strategy of Flower's that refines the mean (`FedAdam`, `FedAvgM`, ...), in the place of
        what [server] says; on the same engines. Who takes part, bounds and noise stay the config's.

    Raises
    ------
    FedsimError
        For anything in the config that cannot be, before anything is written.
    RunFailedError
        If too many rounds in a row of a run without privacy had no usable reply.
    RanElsewhere
        If the run succeeded on a federation whose SuperLink is on another host: the
        artefacts are there.

    Examples
    --------
    >>> config = RunConfig.of(["rounds=1", "partition.clients=20", "client.lr=0.2"])
    >>> result = run(config, engine="local")
    >>> result.ended, [row["round"] for row in result.metrics]
    ('finished', [0, 1])
    """
    if not isinstance(config, RunConfig):
        raise FedsimError(
            f"config is {shown(config)}; it must be a RunConfig, such as RunConfig.load(path) or "
            "RunConfig.parse(mapping)."
        )
    config = config if engine is None else config.replace(**{"engine.name": engine})
    callbacks = _checked(callbacks)
    made = None if data is None else dataset_of(data)
    overrides = ObjectOverrides(model, made, partition, strategy)
    directory = None if out is None else RunDirectory(out)
    if resume and config.engine.federation:
        config = config.replace(**{"checkpoint.resume": True})
    resume = resume and directory is not None and directory.holds_run()
    if directory is not None:
        if resume:
            config = resumed_config(config, directory, overrides)
        if _needs_state_dir(config):
            config = config.replace(**{"client.state-dir": str(directory.clients.absolute())})
    if overrides.digest() and config.engine.name not in ("local", "ray"):
        raise FedsimError(
            f"engine.name = '{config.engine.name}'; with model=, data=, partition= or strategy= "
            "it must be 'local' or 'ray': other processes know a run by its config alone."
        )
    resolved = resolve(config, overrides, None if directory is None else directory.path)
    check(resolved)
    if directory is not None and not resume:
        # After the config: a mistake in it is not hidden by a directory that is taken.
        directory.check_free(overwrite)
        check_past(resolved, directory)
    elif directory is not None:
        refuse_other_objects(directory, resolved)
    for warning in warnings(resolved, directory):
        _log.warning("%s", warning)
    with ExitStack() as stack:
        grid: Grid | None = None
        if config.engine.name == "local":
            grid = stack.enter_context(_local(resolved))
        elif config.engine.name == "ray":
            grid = stack.enter_context(_ray(resolved))
        if directory is not None:
            text = _written(resolved.config, directory).to_toml()
            if resume:
                stack.enter_context(directory.resumed(text))
                move_client_ledgers(directory, resolved)
            else:
                stack.enter_context(directory.claim(text, overwrite=overwrite))
        if not resume:
            _begin_anew(resolved.config)
        if grid is None:
            return _launch(resolved, directory, callbacks)
        return drive(resolved, grid, directory, {YOURS: Callbacks.numbered(callbacks)})


def _checked(callbacks: Iterable[Callback]) -> list[Callback]:
    callbacks = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise FedsimError(
                f"callbacks= has {shown(callback)}; each must be an object of a class that derives "
                "from fedsim.Callback."
            )
    return callbacks


def _begin_anew(config: RunConfig) -> None:
    """Put away what clients of an earlier run of this name keep: this run is not its sequel.

    Their ledgers stand beside, and count on. On nodes elsewhere only who runs them can do so.
    """
    kept = state_dir(config)
    if kept is None or config.engine.federation or not kept.is_dir():
        return
    put_away = archive(kept)
    _log.info("what clients of an earlier run '%s' kept is now in %s.", kept.name, put_away)


def _needs_state_dir(config: RunConfig) -> bool:
    """Whether clients on this machine must be told where to keep what outlives a message."""
    client, engine = config.client, config.engine
    on_this_machine = engine.name == "simulation" or (
        engine.name == "deployment" and not engine.federation
    )
    return on_this_machine and not client.state_dir and (client.private or client.state == "client")


def _written(config: RunConfig, directory: RunDirectory) -> RunConfig:
    """What config.toml says: not where in this very directory clients keep what is theirs.

    So that it says the same run in another place, and the directory can be moved.
    """
    if config.client.state_dir != str(directory.clients.absolute()):
        return config
    return config.replace(**{"client.state-dir": ""})


def _local(resolved: Resolved) -> LocalGrid:
    trainer = resolved.trainer
    workers = resolved.config.engine.workers or helpful_workers(
        local_multiplications(trainer.model, trainer.workload, trainer.layout.dtype),
        resolved.plan.sampler.expected_size,
        trainer.device,
    )
    return LocalGrid(trainer, workers=workers)


def _ray(resolved: Resolved) -> RayGrid:
    from fedsim.federation.engines.ray import RayGrid

    engine = resolved.config.engine
    return RayGrid(
        resolved.trainer,
        workers=engine.workers,
        address=engine.address or None,
        cpus_per_worker=engine.cpus_per_worker,
        gpus_per_worker=engine.gpus_per_worker,
    )


def _launch(
    resolved: Resolved, directory: RunDirectory | None, callbacks: Iterable[Callback]
) -> RunResult:
    """Run on one of Flower's runtimes, whose ServerApp drives and writes the artefacts."""
    out = None if directory is None else directory.path
    result: RunResult = wing(resolved.config.engine.name)(resolved, out, callbacks)
    return result
