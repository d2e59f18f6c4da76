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
from experiments.framework.run import Outcome, find, names, run_experiment

__all__ = [
    "Experiment",
    "ExperimentMember",
    "Outcome",
    "PaperClaim",
    "Report",
    "Settings",
    "Table",
    "find",
    "names",
    "run_experiment",
]
