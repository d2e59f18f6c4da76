"""Sweeps: runs for a grid of values of a config's keys, trained together."""

from fedsim.runs.sweep.execution import has_run_ended, run_sweep
from fedsim.runs.sweep.grid import (
    SweepRun,
    SweepVariant,
    changes_at,
    grid_runs,
    parse_axes,
    sweep_measure,
)

__all__ = [
    "SweepRun",
    "SweepVariant",
    "changes_at",
    "grid_runs",
    "has_run_ended",
    "parse_axes",
    "run_sweep",
    "sweep_measure",
]
