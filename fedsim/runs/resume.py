"""Checks the config and the data with which a run is resumed against those it began with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from fedsim.arguments import as_text
from fedsim.config import RunConfig, Scalar
from fedsim.config.plan import may_stop, resolve_bands
from fedsim.config.release_keys import keys_outside_release
from fedsim.config.run_config import earlier_config
from fedsim.errors import FedsimError
from fedsim.runs.checkpoints import Checkpoints, RunState
from fedsim.runs.data_split import data_shape
from fedsim.runs.directory import RunDirectory
from fedsim.runs.factories import release_plan
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.runs.resolve import Resolved, calibrated

_log = logging.getLogger("fedsim")

Flat = dict[str, Scalar]

LEFT_TO_A_RULE: dict[str, Scalar] = {
    "noise.entropy": "",
    "noise.coefficients": "",
    "client.path": "auto",
    "client.kernel": "auto",
    "client.block-size": 0,
    "client.state-dir": "",
    "engine.device": "auto",
}
"""Keys and the values that leave them to a rule; a resumed run keeps the values it began with."""


def resumed_config(
    config: RunConfig, directory: RunDirectory, overrides: ObjectOverrides | None = None
) -> RunConfig:
    """The resolved config for resuming the run in ``directory`` with the user's ``config``.

    Raises
    ------
    FedsimError
        If a key differs that changes what was or will be released; the message names it.
    """
    state = Checkpoints(directory.checkpoint).newest()
    if state is not None:
        # Refuse damaged rows before anything is changed.
        directory.metrics_file.rows_before(state.metrics_length, state.metrics_code)
    start = _config_at_checkpoint(directory, state)
    requested = resolved_settings(
        config, start, start if state is None else state.first_config, overrides
    )
    keys = dict.fromkeys([*requested, *start])
    changed = {key: requested.get(key) for key in keys if requested.get(key) != start.get(key)}
    outside = keys_outside_release()
    for key, value in changed.items():
        if key not in outside:
            raise FedsimError(
                f"{key} = {_text(value)}; it must be {_text(start.get(key))} as it was when the "
                f"run in {directory.path} began, since it changes what is released; a new run "
                "needs another --out."
            )
    resumed = RunConfig.from_run_config(requested)
    if state is not None and resumed.rounds < state.round:
        raise FedsimError(
            f"rounds = {resumed.rounds}; it must be at least {state.round}, the last round of "
            f"the run in {directory.path}."
        )
    if state is not None and resumed.rounds == state.round:
        _log.warning(
            "the run in %s has finished all %s rounds; --set rounds=N with a "
            "larger N lets it continue.",
            directory.path,
            state.round,
        )
    _refuse_other_plan(start, resumed, directory.path)
    _refuse_hidden_metrics(start, resumed, directory.path)
    has_state = resumed.client.private or resumed.client.state == "client"
    for key in ("name", "client.state-dir"):
        # The clients' state is in a directory of these names.
        if has_state and key in changed and start.get("client.state-dir"):
            raise FedsimError(
                f"{key} = {as_text(changed[key])}; it must be {as_text(start[key])} as it was when "
                "the run began: its clients' state is in client.state-dir under its name."
            )
    if has_state and resumed.engine.federation and "engine.federation" in changed:
        raise FedsimError(
            f"engine.federation = {as_text(resumed.engine.federation)}; it must be "
            f"{as_text(start['engine.federation'])} as it was when the run began: its clients' "
            "state is not on those nodes."
        )
    return resumed


def _refuse_other_plan(start: Flat, resumed: RunConfig, path: Path) -> None:
    """Refuse changes to a plan that was charged as a whole before its first round."""
    if not resumed.protects:
        return
    requested = resumed.to_run_config()
    if may_stop(start) != may_stop(requested):
        key = next(k for k in ("stop.metric", "stop.callbacks") if start.get(k) != requested[k])
        raise FedsimError(
            f"{key} = {_text(requested[key] or None)}; it must be {_text(start.get(key) or None)} "
            f"as it was when the run in {path} began: with it all rounds are charged before the "
            "first, and without it each before it is made."
        )
    is_closed = may_stop(start) or (resumed.private and release_plan(resumed).closed)
    if is_closed and resumed.rounds != start["rounds"]:
        raise FedsimError(
            f"rounds = {resumed.rounds}; it must be {start['rounds']} as it was when the run in "
            f"{path} began: its rounds were planned and charged together before the first "
            "(noise.name, cohort.name, stop.metric, stop.callbacks), and nothing extends them."
        )


def _refuse_hidden_metrics(start: Flat, resumed: RunConfig, path: Path) -> None:
    """Refuse to resume a run so that its statement would not tell of metrics without noise."""
    if resumed.protects and start.get("evaluate.unprotected") and not resumed.evaluate.unprotected:
        raise FedsimError(
            f"evaluate.unprotected = false; it must be true as it was when the run in {path} "
            "began: its metrics.csv has metrics of clients' data without noise, which its "
            "statement must name; evaluate.clients-every = 0 ends the evaluations by clients."
        )


def _config_at_checkpoint(directory: RunDirectory, state: RunState | None) -> Flat:
    """The config of the checkpoint; without a checkpoint, of config.toml."""
    saved_config = earlier_config(directory.config).to_run_config()
    if state is None:
        return saved_config
    start = earlier_config(directory.config, dict(state.config)).to_run_config()
    if start.get("client.state-dir") and not saved_config.get("client.state-dir"):
        # The state is in the run's own directory, which may have moved.
        start["client.state-dir"] = str(directory.clients.absolute())
    return start


def resolved_settings(
    config: RunConfig,
    start: Flat,
    first: Mapping[str, Scalar],
    overrides: ObjectOverrides | None = None,
) -> Flat:
    """``config``, flat, with the run's values for what it leaves to rules or calibration.

    ``start`` is the config of the run's last checkpoint, ``first`` that with which it began.
    """
    requested, keys = config.to_run_config(), ("rounds",)
    noises = (config.noise, config.client.noise)
    calibrates = any(noise.target_epsilon is not None for noise in noises)
    if calibrates:
        # Calibrate for the rounds and the delta with which the run began, to get the same noise.
        lengths = {key: first.get(key, start[key]) for key in keys}
        config = resolve_bands(RunConfig.from_run_config({**requested, **lengths}))
    settings = config.to_run_config()
    for key, unset in LEFT_TO_A_RULE.items():
        if settings.get(key) == unset and key in start:
            settings[key] = start[key]
    if not calibrates:
        return settings
    recalibrated = calibrated(RunConfig.from_run_config(settings), overrides)
    return {**recalibrated.to_run_config(), **{key: requested[key] for key in keys}}


def _text(value: Scalar | None) -> str:
    return "unset" if value is None else as_text(value)


def refuse_other_run(directory: RunDirectory, resolved: Resolved) -> None:
    """Refuse to resume a run with other Python objects, or data of another shape or split.

    What files and code contain is not compared.

    Raises
    ------
    FedsimError
    """
    state = Checkpoints(directory.checkpoint).newest()
    if state is None:
        return
    if state.release != resolved.release:
        raise FedsimError(
            f"the run in {directory.path} has released other values than this one would; it must "
            "be resumed with the model=, data=, partition= and strategy= that it began with, and, "
            "where examples are protected, on a CPU or a GPU as it began."
        )
    names = {"x": "inputs of another shape or type", "y": "targets of another shape or type"}
    for key, now in data_shape(resolved.data).items():
        if state.data[key] != now:
            raise FedsimError(
                f"data.name = {as_text(resolved.config.data.name)}: it has "
                f"{names.get(key, 'other numbers of examples for its clients')} than when the run "
                f"in {directory.path} began; it must be resumed with the data that it began with."
            )
