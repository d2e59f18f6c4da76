"""Sweeps: runs for a grid of values of a config's keys, trained together."""

from fedsim.runs.sweep.running import is_done, run_sweep
from fedsim.runs.sweep.search import SweepRun, grid_runs, measure_of, parse_axes

__all__ = [
    "SweepRun",
    "grid_runs",
    "is_done",
    "measure_of",
    "parse_axes",
    "run_sweep",
]
