"""Resuming a run: the config that it has then, and which keys may have changed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from fedsim.arguments import shown
from fedsim.config import RunConfig, Scalar
from fedsim.config.plan import affects_release, declares_stops, stopping
from fedsim.config.run_config import past_config
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.privacy.claims import FIXED
from fedsim.runs.checkpoints import Checkpoints, RunState
from fedsim.runs.directory import RunDirectory, ending
from fedsim.runs.factories import ledger_dir
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.runs.resolve import Resolved, calibrated

_log = logging.getLogger("fedsim")

Flat = dict[str, Scalar]

_LEFT_TO_A_RULE: dict[str, Scalar] = {
    "noise.entropy": "",
    "client.path": "auto",
    "client.kernel": "auto",
    "client.block-size": 0,
    "client.state-dir": "",
    "engine.device": "auto",
}
"""Keys with the values that leave them to a rule: a resumed run has the values it began with."""


def resumed_config(
    config: RunConfig, directory: RunDirectory, overrides: ObjectOverrides | None = None
) -> RunConfig:
    """The resolved config with which the run in ``directory`` is resumed, given ``config``.

    Raises
    ------
    FedsimError
        Naming the key, if the run has released, or would release, something else with it.
    """
    state = Checkpoints(directory.checkpoint).newest()
    if state is not None:
        # Damaged rows are refused before anything is changed.
        directory.metrics_file.rows_before(state.metrics_length, state.metrics_code)
    began = _began_with(directory, state)
    wanted = _resolved(config, began, overrides)
    keys = dict.fromkeys([*wanted, *began])
    changed = {key: wanted.get(key) for key in keys if wanted.get(key) != began.get(key)}
    for key, value in changed.items():
        if affects_release(key):
            raise FedsimError(
                f"{key} = {_text(value)}; it must be {_text(began.get(key))} as it was when the "
                f"run in {directory.path} began, since it changes what is released; give another "
                "--out to a run of its own."
            )
    resumed = RunConfig.from_run_config(wanted)
    if state is not None and resumed.rounds < state.round:
        raise FedsimError(
            f"rounds = {resumed.rounds}; it must be at least {state.round}, the last round of "
            f"the run in {directory.path}."
        )
    if state is not None and resumed.rounds == state.round:
        _log.warning(
            "the run in %s had finished all %s rounds: none is left to make; --set rounds=N with a "
            "larger N lets it continue.", directory.path, state.round,
        )  # fmt: skip
    if stopping(began, ended=ending(directory.path)[0]) != FIXED:
        _refuse_lowered(began, wanted, directory.path)
    _refuse_undeclared(began, wanted, resumed)
    has_state = resumed.client.private or resumed.client.state == "client"
    for key in ("name", "client.state-dir"):
        # Clients' state is there.
        if has_state and key in changed and began.get("client.state-dir"):
            raise FedsimError(
                f"{key} = {shown(changed[key])}; it must be {shown(began[key])} as it was when the "
                "run began: its clients' state is in client.state-dir under its name."
            )
    if has_state and resumed.engine.federation and "engine.federation" in changed:
        raise FedsimError(
            f"engine.federation = {shown(resumed.engine.federation)}; it must be "
            f"{shown(began['engine.federation'])} as it was when the run began: its clients' state "
            "is not on those nodes."
        )
    return resumed


def _refuse_undeclared(began: Flat, wanted: Flat, config: RunConfig) -> None:
    """Refuse to declare afterwards that releases do not end the run: delta is shared already."""
    if config.protects and declares_stops(began) and not declares_stops(wanted):
        key = "stop.metric" if began.get("stop.metric") else "stop.callbacks"
        raise FedsimError(
            f"{key} = {_text(wanted.get(key) or None)}; it must be {_text(began[key])} as it was "
            "when the run began: what is released might have ended it, and half of delta is for "
            "that; a larger stop.patience lets it continue."
        )


def _refuse_lowered(began: Flat, wanted: Flat, path: Path) -> None:
    """Refuse a lower limit for a run that releases have ended, or may have."""
    for key in ("rounds", "noise.max-epsilon"):
        before, now = (flat.get(key, "") for flat in (began, wanted))
        if float(now or "inf") < float(before or "inf"):
            allowed = f"at least {shown(before)}" if before else "unset"
            raise FedsimError(
                f"{key} = {_text(now)}; it must be {allowed}, as it was: what "
                f"the run in {path} has released may decide when it ends, and what that has cost "
                "follows from how long it might have continued."
            )


def _began_with(directory: RunDirectory, state: RunState | None) -> Flat:
    """The config of the checkpoint, or without one the directory's."""
    written = past_config(directory.config).to_run_config()
    if state is None:
        return written
    began = past_config(directory.config, dict(state.config)).to_run_config()
    if began.get("client.state-dir") and not written.get("client.state-dir"):
        # In the run's own directory, wherever that is by now.
        began["client.state-dir"] = str(directory.clients.absolute())
    return began


def _resolved(config: RunConfig, began: Flat, overrides: ObjectOverrides | None) -> Flat:
    """``config``, flat, with the run's own values where it leaves them to rules or calibration."""
    wanted = config.to_run_config()
    for key, unset in _LEFT_TO_A_RULE.items():
        if wanted.get(key, unset) == unset and key in began:
            wanted[key] = began[key]
    if config.noise.target_epsilon is None and config.client.noise.target_epsilon is None:
        return wanted
    # Calibrated to the rounds, and at the delta, with which the run began.
    as_then = {key: began[key] for key in ("rounds", "stop.metric", "stop.callbacks")}
    then = calibrated(RunConfig.from_run_config({**wanted, **as_then}), overrides)
    return {**then.to_run_config(), **{key: wanted[key] for key in as_then}}


def _text(value: Scalar | None) -> str:
    return "unset" if value is None else shown(value)


def refuse_other_objects(directory: RunDirectory, resolved: Resolved) -> None:
    """Refuse to resume a run with other objects from Python than it began with.

    Raises
    ------
    FedsimError
    """
    if not directory.ledger.exists():
        return
    made = {entry.release for entry in Ledger.read(directory.ledger).entries if entry.release}
    if made and resolved.release not in made:
        raise FedsimError(
            f"the run in {directory.path} has released something else than this one would; it must "
            "be resumed with the model=, data= and partition= that it began with."
        )


def move_client_ledgers(directory: RunDirectory, resolved: Resolved) -> None:
    """Move clients' ledgers where the engine needs them in another place of the directory."""
    place = ledger_dir(resolved.config, resolved.out)
    if place is None or place == directory.clients or not directory.clients.is_dir():
        return
    for path in sorted(directory.clients.iterdir()):
        if path.is_file() and not (place / path.name).exists():
            Path(place).mkdir(parents=True, exist_ok=True)
            os.replace(path, place / path.name)
