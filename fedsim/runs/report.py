"""What a run leaves to look at: summary.json, and report.html made from all of its files."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from fedsim import regular_files
from fedsim.config import RunConfig
from fedsim.engines.arrays import tensors
from fedsim.errors import FedsimError
from fedsim.privacy.verification import model_metadata
from fedsim.reports.record import SUMMARY_FORMAT, RunRecord
from fedsim.reports.run_page import run_page
from fedsim.runs.artefacts import Ended, RunDirectory
from fedsim.runs.build import Build
from fedsim.runs.result import RunResult
from fedsim.runs.sealing import seal
from fedsim.runs.summary import measured, summarise

__all__ = ["leave_report", "tell_ending", "whole_record"]

_log = logging.getLogger("fedsim")


def leave_report(build: Build, result: RunResult, failure: str = "") -> None:
    """Write a run's summary and its page, if it has a directory.

    The run is whole without them: what goes wrong here is logged.

    Parameters
    ----------
    build : Build
    result : RunResult
        What the run has reached.
    failure : str
        What ended it, if it failed.
    """
    directory = result.directory
    if directory is None:
        return
    try:
        ended: str = result.ended
        why = result.why
        if failure:
            ended, why = "failed", f"It failed: {failure}"
        summary = summarise(build, tensors(result.arrays), ended=ended, why=why)
        directory.save_summary(summary)
        seal(directory)
        statements = [result.privacy]
        if result.example_privacy not in (None, result.privacy):
            statements.append(result.example_privacy)
        record = RunRecord(
            path=directory.path,
            config=build.resolved.to_run_config(),
            rows=result.metrics,
            statements=statements,
            summary=summary,
        )
        directory.save_report(run_page(record))
    except (OSError, FedsimError) as error:
        _log.error("the run is whole, but its report could not be written: %s", error)
    except Exception:
        _log.exception("the run is whole, but its report could not be made")


def tell_ending(directory: RunDirectory, ended: Ended, why: str) -> None:
    """Say in what a run has left how it ended, where that was decided after it had paused.

    Parameters
    ----------
    directory : RunDirectory
    ended, why : str
        As in `RunResult`.
    """
    try:
        record = RunRecord.read(directory.path)
        told = {"format": SUMMARY_FORMAT, **record.summary, "ended": ended, "why": why}
        if told != record.summary:
            directory.save_summary(told)
            seal(directory)
            directory.save_report(run_page(replace(record, summary=told)))
    except (OSError, FedsimError) as error:
        _log.error("%s is whole, but its report could not be written: %s", directory.path, error)


def whole_record(path: Path) -> RunRecord:
    """A run as its files tell it; of one that was interrupted the model is measured now.

    Raises
    ------
    FedsimError
        As `RunRecord.read` does.
    """
    record = RunRecord.read(path)
    model = RunDirectory(path).model
    if record.summary or not model.is_file():
        return record
    try:
        if model_metadata(model).get("round") != record.rounds:
            return record  # what an earlier model got wrong is not what the last row is about
        build = Build(RunConfig.load(path / "config.toml"))
        saved = load_file(regular_files.require(model))
        summary = measured(build, {name: saved[name] for name in build.initial_arrays})
    except Exception as error:  # of data that is gone, or of the user's own code
        _log.warning("what the model gets wrong cannot be measured: %s", error)
        return record
    why = "It was interrupted; the model is the one of the last whole round."
    return replace(record, summary=summary | {"ended": "interrupted", "why": why})
