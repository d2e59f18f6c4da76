"""Checks a run against earlier ones: the run that it resumes, and those in the same directory.

Whether clients have the same examples in them is checked in `fedsim.runs.split_record`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from fedsim import regular_files
from fedsim.arguments import shown
from fedsim.config import RunConfig, Scalar
from fedsim.config.plan import declares_stops, stopping, with_best_groups
from fedsim.config.release_keys import keys_outside_release, path_keys
from fedsim.config.run_config import past_config
from fedsim.errors import FedsimError
from fedsim.federation.strategy_state import resumed_plan
from fedsim.privacy import Entry, Ledger, durable
from fedsim.privacy.claims import FIXED, Stopping
from fedsim.runs.checkpoints import Checkpoints, RunState
from fedsim.runs.directory import NAMED_FILES, RunDirectory
from fedsim.runs.factories import ledger_dir, release_plan
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.runs.resolve import Resolved, calibrated
from fedsim.runs.run_ledgers import Ending
from fedsim.runs.split_record import holds_other_examples, refuse_other_split

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
    start = _start_config(directory, state)
    requested = kept_settings(
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
            "larger N lets it continue.", directory.path, state.round,
        )  # fmt: skip
    end = stopping(start, end_state=Ending.read(directory.path).ended)
    _refuse_other_plan(start, resumed, state, end, directory.path)
    if end != FIXED:
        _refuse_lowered(start, requested, directory.path)
    _refuse_undeclared(start, requested, resumed)
    has_state = resumed.client.private or resumed.client.state == "client"
    for key in ("name", "client.state-dir"):
        # The clients' state is in a directory of these names.
        if has_state and key in changed and start.get("client.state-dir"):
            raise FedsimError(
                f"{key} = {shown(changed[key])}; it must be {shown(start[key])} as it was when the "
                "run began: its clients' state is in client.state-dir under its name."
            )
    if has_state and resumed.engine.federation and "engine.federation" in changed:
        raise FedsimError(
            f"engine.federation = {shown(resumed.engine.federation)}; it must be "
            f"{shown(start['engine.federation'])} as it was when the run began: its clients' state "
            "is not on those nodes."
        )
    return resumed


def _refuse_other_plan(
    start: Flat, resumed: RunConfig, state: RunState | None, end: Stopping, path: Path
) -> None:
    """Refuse changes to a plan that was charged as a whole before its first round."""
    if not resumed.private or resumed.rounds == start["rounds"]:
        return
    plan = release_plan(resumed)
    if not plan.closed:
        return
    if state is None or end != FIXED:
        reason = (
            "before it had a checkpoint its rounds were planned and charged together"
            if state is None
            else "what it has released may decide when it ends, and its rounds were planned and "
            "charged together (stop.metric, stop.callbacks)"
        )
        raise FedsimError(
            f"rounds = {resumed.rounds}; it must be {start['rounds']} as it was when the run in "
            f"{path} began: {reason}."
        )
    longer = resumed_plan(plan, state.strategy)
    if longer.extension is not None:
        _log.warning(
            "the plan is extended to %s rounds, at epsilon %.4g in place of %.4g: this holds if no "
            "release has decided on it.", longer.rounds, plan.epsilon(resumed.noise.delta),
            replace(plan, rounds=longer.extension.rounds).epsilon(resumed.noise.delta),
        )  # fmt: skip


def _refuse_undeclared(start: Flat, requested: Flat, config: RunConfig) -> None:
    """Refuse to withdraw the declaration that releases may end the run: it has halved delta."""
    if config.protects and declares_stops(start) and not declares_stops(requested):
        key = "stop.metric" if start.get("stop.metric") else "stop.callbacks"
        raise FedsimError(
            f"{key} = {_text(requested.get(key) or None)}; it must be {_text(start[key])} as it "
            "was when the run began: what is released might have ended it, and half of delta is "
            "reserved for that; a larger stop.patience lets it continue."
        )


def _refuse_lowered(start: Flat, requested: Flat, path: Path) -> None:
    """Refuse a lower limit for a run whose end may have depended on releases."""
    for key in ("rounds", "noise.max-epsilon"):
        before, now = (flat.get(key, "") for flat in (start, requested))
        if float(now or "inf") < float(before or "inf"):
            allowed = f"at least {shown(before)}" if before else "unset"
            raise FedsimError(
                f"{key} = {_text(now)}; it must be {allowed}, as it was: what "
                f"the run in {path} has released may decide when it ends, and what that has cost "
                "follows from how long it might have continued."
            )


def _start_config(directory: RunDirectory, state: RunState | None) -> Flat:
    """The config of the checkpoint; without a checkpoint, of config.toml."""
    saved_config = past_config(directory.config).to_run_config()
    if state is None:
        return saved_config
    start = past_config(directory.config, dict(state.config)).to_run_config()
    if start.get("client.state-dir") and not saved_config.get("client.state-dir"):
        # The state is in the run's own directory, which may have moved.
        start["client.state-dir"] = str(directory.clients.absolute())
    return start


def kept_settings(
    config: RunConfig,
    start: Flat,
    first: Mapping[str, Scalar],
    overrides: ObjectOverrides | None = None,
) -> Flat:
    """``config``, flat, with the run's values for what it leaves to rules or calibration.

    ``start`` is the config of the run's last checkpoint, ``first`` that with which it began.
    """
    requested, keys = config.to_run_config(), ("rounds", "stop.metric", "stop.callbacks")
    noises = (config.noise, config.client.noise)
    calibrates = any(noise.target_epsilon is not None for noise in noises)
    if calibrates:
        # Calibrate for the rounds and the delta with which the run began, to get the same noise.
        lengths = {key: first.get(key, start[key]) for key in keys}
        config = with_best_groups(RunConfig.from_run_config({**requested, **lengths}))
    settings = config.to_run_config()
    for key, unset in LEFT_TO_A_RULE.items():
        if settings.get(key) == unset and key in start:
            settings[key] = start[key]
    if not calibrates:
        return settings
    recalibrated = calibrated(RunConfig.from_run_config(settings), overrides)
    return {**recalibrated.to_run_config(), **{key: requested[key] for key in keys}}


def _text(value: Scalar | None) -> str:
    return "unset" if value is None else shown(value)


def refuse_other_objects(directory: RunDirectory, resolved: Resolved) -> None:
    """Refuse to resume a run with other Python objects than it began with.

    They are compared by the digests of the run's releases, and by its examples.

    Raises
    ------
    FedsimError
    """
    entries = Ledger.read(directory.ledger).entries if directory.ledger.exists() else ()
    releases = {entry.release for entry in entries if entry.release}
    other_release = bool(releases) and resolved.release not in releases
    if other_release or holds_other_examples(resolved, directory.path):
        raise FedsimError(
            f"the run in {directory.path} has released other values than this one would; it must "
            "be resumed with the model=, data=, partition= and strategy= that it began with."
        )


def move_client_ledgers(directory: RunDirectory, resolved: Resolved) -> None:
    """Move the clients' ledgers if the engine of a resumed run needs them in another place."""
    place = ledger_dir(resolved.config, resolved.out)
    if place is None or place == directory.clients or not directory.clients.is_dir():
        return
    for path in sorted(directory.clients.iterdir()):
        if path.is_file() and not (place / path.name).exists():
            Path(place).mkdir(parents=True, exist_ok=True)
            os.replace(path, place / path.name)


def check_earlier_runs(resolved: Resolved, directory: RunDirectory) -> None:
    """Refuse a directory whose earlier runs' costs cannot be added to this run's.

    Raises
    ------
    FedsimError
        If the earlier ledgers cannot be read or composed; if clients protect their examples in
        one run and not in another, or their ledgers are in different places, since an
        example-level statement about only one of them would be false; or if clients had other
        examples in an earlier private run.
    """
    ledgers = durable.archived(directory.ledger)
    if directory.ledger.exists():
        ledgers.append(directory.ledger)
    if not ledgers:
        return
    history = Ledger.read(directory.ledger).history
    try:
        history.after(Entry(event=resolved.plan.event()))
    except FedsimError as error:
        raise FedsimError(
            f"cohort.name = {shown(resolved.config.cohort.name)}; it must be one whose cost can be "
            f"added to that of the earlier runs in {directory.path}, which count with this one: "
            f"{error} Set it to one of theirs, or choose another --out."
        ) from None
    for path in ledgers:
        config = path.with_name(directory.config.name)
        if config.exists():
            _check_earlier_clients(resolved, directory, past_config(config))
            refuse_other_split(resolved, path.parent, past_config(config))


def _check_earlier_clients(resolved: Resolved, directory: RunDirectory, earlier: RunConfig) -> None:
    config = resolved.config
    if earlier.client.private != config.client.private:
        now, before = ("protect", "did not") if config.client.private else ("do not", "did")
        raise FedsimError(
            f"{directory.path} holds a run whose clients {before} protect their examples; in "
            f"this one they {now} (client.mechanism.name), and what both released cannot be "
            "added up at example level; choose another --out."
        )
    if not config.client.private or config.engine.federation or earlier.engine.federation:
        return
    place = Path(earlier.client.state_dir) if earlier.client.state_dir else directory.clients
    place_now = ledger_dir(config, resolved.out)
    if place_now is not None and place.absolute() != place_now.absolute():
        raise FedsimError(
            f"{directory.path} holds a run whose clients' ledgers are in {place}; this run's would "
            f"be in {place_now} (client.state-dir), and all that was spent must be counted in one "
            "place; keep the directory, or choose another --out."
        )


def note_files(directory: Path, config: RunConfig) -> None:
    """Write to a run's directory where the files of its config's relative paths are.

    The absolute paths are noted there and not in config.toml, which is hashed and must be the same
    wherever the run is made. Contents are not noted: no digest of data may be written.
    """
    if files := _files(config):
        noted = {"directory": os.getcwd(), "files": {key: str(path) for key, path in files.items()}}
        durable.replace(directory / NAMED_FILES, json.dumps(noted, indent=1).encode() + b"\n")


def refuse_other_files(
    directory: Path, config: RunConfig, keys: Collection[str] | None = None
) -> None:
    """Refuse to resume a run if its config's relative paths (of ``keys``) now lead to other files.

    If a file that the run began with no longer exists, perhaps because everything was moved, the
    other one is used with a warning.

    Raises
    ------
    FedsimError
        If a path leads to another file (the message names its key), or the note is damaged.
    """
    path = directory / NAMED_FILES
    try:
        noted = json.loads(regular_files.read_text(path))
        origin, files = str(noted["directory"]), {k: Path(v) for k, v in noted["files"].items()}
    except (FileNotFoundError, NotADirectoryError):
        return  # no relative paths, or an earlier version's run
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FedsimError(f"{path} is damaged ({error}); restore what the run wrote.") from None
    flat, found = config.to_run_config(), _files(config)
    for key in sorted(files.keys() & set(flat if keys is None else keys)):
        if Path(str(flat.get(key, ""))).is_absolute():
            continue
        original, current = files[key], found.get(key)
        if not original.exists():
            if current is not None:
                _log.warning(
                    "%s = %s is %s here; %s, with which the run in %s began, is gone.",
                    key, shown(flat[key]), current, original, directory,
                )  # fmt: skip
        elif current is None or not current.samefile(original):
            actual = "no such file is" if current is None else f"{current}, another file, is"
            raise FedsimError(
                f"{key} = {shown(flat[key])}; {actual} here, and the run in {directory} began with "
                f"{original}; continue in {origin}."
            )


def _files(config: RunConfig) -> dict[str, Path]:
    """The files that relative paths of a config lead to from the current directory, by key."""
    flat, files = config.to_run_config(), {}
    for key, mark in path_keys(config, "always", "training").items():
        name = str(flat.get(key, ""))
        if not name or mark.is_name(name) or Path(name).is_absolute():
            continue
        folders = (".", config.data.dir) if key == "data.name" else (".",)
        paths = (Path(os.path.abspath(Path(folder) / name)) for folder in folders)
        if (path := next((path for path in paths if path.exists()), None)) is not None:
            files[key] = path
    return files
