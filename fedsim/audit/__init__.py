"""Privacy audits: attack a strategy's claim, through the real strategy and engine."""

from __future__ import annotations

from fedsim.audit.checks import Check, Finding
from fedsim.audit.claim import Claim
from fedsim.audit.clients import ALONE, OPPOSED, RARE, WORLDS, World
from fedsim.audit.one_run import OneRun
from fedsim.audit.target import StrategyTarget, Target
from fedsim.audit.two_world import TwoWorlds
from fedsim.audit.verdict import Verdict, audit

__all__ = [
    "ALONE",
    "OPPOSED",
    "RARE",
    "WORLDS",
    "Check",
    "Claim",
    "Finding",
    "OneRun",
    "StrategyTarget",
    "Target",
    "TwoWorlds",
    "Verdict",
    "World",
    "audit",
]
