"""The papers' figures and tables, each an experiment with its settings and expected figures."""

from __future__ import annotations

from experiments.framework.base import (
    Experiment,
    ExperimentMember,
    PaperClaim,
    Report,
    Settings,
    Table,
)
from experiments.framework.run import Checked, Outcome, check, find, keep, names, run_experiment

__all__ = [
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
