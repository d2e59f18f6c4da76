"""Many runs in one go: a grid or random points of a config's keys, trained side by side."""

from fedsim.runs.sweep.halving import Halving, outcomes
from fedsim.runs.sweep.members import Member, Span, drawn, measure_of, members, parse_axes
from fedsim.runs.sweep.running import MemberOutcome, is_done, run_sweep

__all__ = [
    "Halving",
    "Member",
    "MemberOutcome",
    "Span",
    "drawn",
    "is_done",
    "measure_of",
    "members",
    "outcomes",
    "parse_axes",
    "run_sweep",
]
