"""Privacy audits: attack a strategy's claim, through the real strategy and engine."""

from __future__ import annotations

from fedsim.audit.canaries import ALONE, OPPOSED, RARE, WORLDS, World
from fedsim.audit.claim import Claim
from fedsim.audit.one_run import OneRun
from fedsim.audit.runs import Plan
from fedsim.audit.two_world import TwoWorlds
from fedsim.audit.verdict import Verdict, audit

__all__ = [
    "ALONE",
    "OPPOSED",
    "RARE",
    "WORLDS",
    "Claim",
    "OneRun",
    "Plan",
    "TwoWorlds",
    "Verdict",
    "World",
    "audit",
]
