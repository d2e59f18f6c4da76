"""Sweeps: runs for a grid or for random points of a config's keys, trained together."""

from fedsim.runs.sweep.halving import Halving, outcomes
from fedsim.runs.sweep.running import is_done, run_sweep
from fedsim.runs.sweep.search import Span, SweepRun, grid_runs, measure_of, parse_axes, random_runs

__all__ = [
    "Halving",
    "Span",
    "SweepRun",
    "grid_runs",
    "is_done",
    "measure_of",
    "outcomes",
    "parse_axes",
    "random_runs",
    "run_sweep",
]
