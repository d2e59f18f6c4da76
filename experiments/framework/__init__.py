"""Framework of experiments: define them, run them, and judge their figures."""

from __future__ import annotations

from experiments.framework.base import (
    Experiment,
    ExperimentMember,
    PaperClaim,
    Report,
    Settings,
    Table,
)
from experiments.framework.checking import Checked, check, keep
from experiments.framework.directories import find, names
from experiments.framework.pages import NOT_MEASURED
from experiments.framework.run import Outcome, Portion, run_experiment

__all__ = [
    "NOT_MEASURED",
    "Checked",
    "Experiment",
    "ExperimentMember",
    "Outcome",
    "PaperClaim",
    "Portion",
    "Report",
    "Settings",
    "Table",
    "check",
    "find",
    "keep",
    "names",
    "run_experiment",
]
