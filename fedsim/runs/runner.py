"""`fedsim.run`: resolve and check a config, claim its directory, and drive its rounds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from os import PathLike
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import nn

from fedsim.arguments import as_text, check_arguments
from fedsim.config import RunConfig
from fedsim.datasets import dataset_of
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError, user_traceback
from fedsim.federation.engines.client_app import client_app
from fedsim.federation.engines.forked import can_train_forked, helpful_workers
from fedsim.federation.engines.process import torch_defaults
from fedsim.partitions import Partition
from fedsim.runs.callbacks import Callback, Callbacks
from fedsim.runs.checkpoints import Checkpoints
from fedsim.runs.directory import RunDirectory
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.runs.preflight import check, warnings, why_untrainable
from fedsim.runs.record import RunResult
from fedsim.runs.resolve import Resolved, resolve
from fedsim.runs.resume import refuse_other_run, resumed_config
from fedsim.runs.session import CALLERS_CALLBACKS, Session, running_sessions
from fedsim.strategies import RunFailedError
from fedsim.training.batches import local_multiplications

if TYPE_CHECKING:
    from fedsim.federation.engines.ray import RayGrid


_log = logging.getLogger("fedsim")


@user_traceback
@check_arguments
@torch_defaults()
def run(
    config: RunConfig,
    *,
    engine: str | None = None,
    out: str | PathLike[str] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    callbacks: Iterable[Callback] | Callback = (),
    model: nn.Module | None = None,
    data: Any = None,
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
        Whether to replace a run in ``out``; one with evidence of private releases is refused.
    resume : bool
        Whether to resume the run in ``out`` from its last checkpoint, or from its start if it has
        none; if there is no run, a new one starts. Only keys that cannot affect a release may
        differ from that run's. On a federation ``out`` may be omitted.
    callbacks : iterable of Callback
        Called in this process, on every engine. With ``engine.federation`` they get the rows of
        metrics if these are written on this machine, and no parameters; one that stops the run
        ends it after the round that is then in progress.
    model, data, partition : nn.Module, Dataset, Partition, optional
        Used instead of what the config's tables name, on the engines 'local' and 'ray'. The run's
        config.toml names them (``objects``), and cannot be run without them. ``data`` may also be
        a dict of arrays or a pair of (x, y) or torch data sets; `fedsim.datasets.dataset_of`
        converts them.
    strategy : Strategy, optional
        Flower strategy that post-processes the mean (`FedAdam`, `FedAvgM`, ...), used instead of
        [server], on the same engines. Cohorts, mechanism and noise remain the config's.

    Raises
    ------
    FedsimError
        If the config cannot be run, before anything is written.
    RunFailedError
        If too many rounds in a row of a run without privacy had no usable reply.
    ArtefactsElsewhere
        If the run succeeded on a federation whose SuperLink is on another host, where the
        artefacts are.

    Examples
    --------
    >>> config = RunConfig.from_overrides(["rounds=1", "partition.clients=20", "client.lr=0.2"])
    >>> result = run(config, engine="local")
    >>> result.ended, [row["round"] for row in result.metrics]
    ('finished', [0, 1])
    """
    config = config if engine is None else config.replace(**{"engine.name": engine})
    callbacks = _callback_list(callbacks)
    dataset = None if data is None else dataset_of(data, protected=config.protects)
    overrides = ObjectOverrides(model, dataset, partition, strategy)
    _refuse_flags(config, out, overwrite=overwrite, resume=resume)
    directory = None if out is None else RunDirectory(out)
    if resume and config.engine.federation:
        config = config.replace(**{"checkpoint.resume": True})
    resume = resume and directory is not None and directory.holds_run()
    resolved = _prepare(config, overrides, directory, overwrite=overwrite, resume=resume)
    with ExitStack() as stack:
        # Workers start before the directory is claimed: if they cannot, nothing is written.
        grid = _grid(resolved)
        if grid is not None:
            stack.enter_context(grid)
        if directory is not None:
            text = _config_to_write(resolved, directory).to_toml()
            if resume:
                stack.enter_context(directory.lock_for_resume(text))
            else:
                stack.enter_context(directory.claim(text, overwrite=overwrite))
        if grid is not None:
            return drive(
                resolved, grid, directory, {CALLERS_CALLBACKS: Callbacks.numbered(callbacks)}
            )
        launch = FLOWER_RUNTIMES[resolved.config.engine.name]
        result: RunResult = resolve_name(launch)(resolved, directory and directory.path, callbacks)
        return result


FLOWER_RUNTIMES = {
    "simulation": "fedsim.deploy.launch:run_simulation",
    "deployment": "fedsim.deploy.launch:run_deployment",
}
"""Functions that start a run on Flower's engines, where a ServerApp's process drives it."""


def _prepare(
    config: RunConfig,
    overrides: ObjectOverrides,
    directory: RunDirectory | None,
    *,
    overwrite: bool,
    resume: bool,
) -> Resolved:
    """Resolve a config and check it and its directory, without writing anything."""
    if directory is not None:
        if resume:
            config = resumed_config(config, directory, overrides)
        if _needs_state_dir(config):
            config = config.replace(**{"client.state-dir": str(directory.clients.absolute())})
    if overrides.names and config.engine.name in FLOWER_RUNTIMES:
        raise FedsimError(
            f"engine.name = '{config.engine.name}'; with model=, data=, partition= or strategy= "
            "it must be 'local' or 'ray': other processes know a run by its config alone."
        )
    resolved = resolve(config, overrides, None if directory is None else directory.path)
    check(resolved)
    # Checked after the config, so that a directory in use does not hide a mistake in the config.
    if directory is not None and resume:
        refuse_other_run(directory, resolved)
    elif directory is not None:
        directory.check_available(overwrite)
    for warning in warnings(resolved):
        _log.warning("%s", warning)
    return resolved


def drive(
    resolved: Resolved,
    grid: Grid,
    directory: RunDirectory | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    *,
    end_request: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Run all rounds of a config on ``grid``; parameters as for `Session`.

    Resumes from the last checkpoint in ``directory`` if there is one.

    Raises
    ------
    RunFailedError
        See `run`.
    """
    checkpoints = None if directory is None else Checkpoints(directory.checkpoint)
    state = None if checkpoints is None else checkpoints.newest()
    session = Session(resolved, directory, callbacks, resume=state, end_request=end_request)
    try:
        with running_sessions([session]) as failed:
            try:
                session.make_rounds(grid)
            except RunFailedError as error:
                failed[0] = _with_cause(resolved, error)
    except Exception as error:
        if directory is not None and checkpoints is not None:
            error.add_note(directory.remaining_files(checkpoints.rounds()))
        raise
    if failed:
        raise failed[0]
    return session.result()


def _with_cause(resolved: Resolved, error: RunFailedError) -> RunFailedError:
    """The error, and whether the loss is not finite already before any training."""
    if resolved.config.protects or not resolved.trainer.population:
        return error
    try:
        cause = why_untrainable(resolved.trainer)
    except Exception:  # a user's code, which clients called too: the error says that they failed
        return error
    return RunFailedError(f"{error} It is no learning rate: {cause}.") if cause else error


def _callback_list(callbacks: Iterable[Callback] | Callback) -> list[Callback]:
    callbacks = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise FedsimError(
                f"callbacks= has {as_text(callback)}; each must be an object of a class that "
                "derives from fedsim.Callback."
            )
    return callbacks


def _refuse_flags(
    config: RunConfig, out: str | PathLike[str] | None, *, overwrite: bool, resume: bool
) -> None:
    """Refuse flags that contradict each other or have no directory to act on."""
    if overwrite and resume:
        raise FedsimError(
            "resume=True (--resume) continues the run that overwrite=True (--overwrite) would "
            "replace; give one of them."
        )
    # On a federation the server finds the last run of this name itself.
    if out is None and (overwrite or (resume and not config.engine.federation)):
        flag, does = ("overwrite", "replaces") if overwrite else ("resume", "continues")
        raise FedsimError(
            f"{flag}=True {does} the run in a directory, and out= names none; the command's is "
            f"out='runs/{config.name}'."
        )


def _needs_state_dir(config: RunConfig) -> bool:
    """Whether clients on this machine need a directory for state that outlives a message."""
    client, engine = config.client, config.engine
    on_this_machine = engine.name == "simulation" or (
        engine.name == "deployment" and not engine.federation
    )
    keeps = client.state == "client" or (client.private and engine.name == "deployment")
    return on_this_machine and not client.state_dir and keeps


def _config_to_write(resolved: Resolved, directory: RunDirectory) -> RunConfig:
    """The config for config.toml: naming its Python objects, without a default state directory.

    A ``client.state-dir`` inside the run's own directory is left out, so that the directory can be
    moved and the config describes the same run elsewhere.
    """
    config = resolved.config
    if (mark := resolved.overrides.mark(resolved.data.dataset)) != config.objects:
        config = config.replace(objects=mark)
    if config.client.state_dir != str(directory.clients.absolute()):
        return config
    return config.replace(**{"client.state-dir": ""})


def _grid(resolved: Resolved) -> LocalGrid | RayGrid | None:
    """Grid of the clients if this process drives the run; None on Flower's engines."""
    engine, trainer = resolved.config.engine, resolved.trainer
    if engine.name == "ray":
        from fedsim.federation.engines.ray import RayGrid

        return RayGrid(
            trainer,
            workers=engine.workers,
            cpus_per_worker=engine.cpus_per_worker,
            gpus_per_worker=engine.gpus_per_worker,
        )
    if engine.name != "local":
        return None
    workers = engine.workers or helpful_workers(
        local_multiplications(trainer.model, trainer.workload, trainer.layout.dtype),
        resolved.plan.sampler.expected_size,
        trainer.device,
    )
    if not engine.workers and workers > 1 and not can_train_forked(trainer):
        workers = 1
    if resolved.config.secagg.simulate:
        return LocalGrid(secure_aggregation_app(resolved), num_nodes=trainer.population)
    return LocalGrid(trainer, workers=workers)


def secure_aggregation_app(resolved: Resolved) -> ClientApp:
    """The clients as a Flower app that takes part in secure aggregation."""
    mechanism, threshold = resolved.plan.mechanism, resolved.config.secagg.threshold
    return client_app(
        lambda _: resolved.trainer, lambda _: mechanism, threshold_for=lambda _: threshold
    )
