"""Privacy audits: attack a strategy's claim, through the real strategy and engine."""

from __future__ import annotations

from fedsim.audit.checks import Check
from fedsim.audit.claim import Claim
from fedsim.audit.observation import Target
from fedsim.audit.one_run import OneRun
from fedsim.audit.two_world import TwoWorlds
from fedsim.audit.verdict import Verdict, audit
from fedsim.audit.worlds import ALONE, OPPOSED, RARE, WORLDS, World

__all__ = [
    "ALONE",
    "OPPOSED",
    "RARE",
    "WORLDS",
    "Check",
    "Claim",
    "OneRun",
    "Target",
    "TwoWorlds",
    "Verdict",
    "World",
    "audit",
]
