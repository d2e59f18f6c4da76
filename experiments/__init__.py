"""The papers' figures and tables, each an experiment with its settings and expected figures."""

from __future__ import annotations

from experiments.framework.base import Claim, Experiment, Member, Report, Settings, Table
from experiments.framework.run import Outcome, find, names, run_experiment

__all__ = [
    "Claim",
    "Experiment",
    "Member",
    "Outcome",
    "Report",
    "Settings",
    "Table",
    "find",
    "names",
    "run_experiment",
]
