"""What an experiment is, how it is run, and how its figures are judged."""

from __future__ import annotations

from experiments.framework.base import (
    Experiment,
    ExperimentMember,
    PaperClaim,
    Report,
    Settings,
    Table,
)
from experiments.framework.pages import NOT_MEASURED
from experiments.framework.run import Checked, Outcome, check, find, keep, names, run_experiment

__all__ = [
    "NOT_MEASURED",
    "Checked",
    "Experiment",
    "ExperimentMember",
    "Outcome",
    "PaperClaim",
    "Report",
    "Settings",
    "Table",
    "check",
    "find",
    "keep",
    "names",
    "run_experiment",
]
