"""Privacy audits: attack a strategy's claim, through the real strategy and engine.

To read it, begin with `verdict` (the order of an audit) and `catalogue` (the list of all checks).
`evidence` makes the runs that are checked. The checks are in `bound_checks`, `noise_checks`,
`sampling_checks`, `plan_checks` and `local_training`, each a function from a sample to a finding
(`checks`). The attacks `two_world` and `one_run` bound epsilon from below, and are compared with
the trade-off curve of a `claim`. `config_audit` applies everything to a config. `outside` audits
code of others with its own attacks and the same statistics; `adapters` has ready targets for it.
"""

from __future__ import annotations

from fedsim.arguments import explain_calls
from fedsim.audit.checks import Check, Finding
from fedsim.audit.claim import Claim
from fedsim.audit.clients import ALONE, OPPOSED, RARE, WORLDS, World
from fedsim.audit.target import StrategyTarget, Target
from fedsim.audit.two_world import Attack
from fedsim.audit.verdict import Verdict, audit

__all__ = [
    "ALONE",
    "OPPOSED",
    "RARE",
    "WORLDS",
    "Attack",
    "Check",
    "Claim",
    "Finding",
    "StrategyTarget",
    "Target",
    "Verdict",
    "World",
    "audit",
]

explain_calls(__name__)
