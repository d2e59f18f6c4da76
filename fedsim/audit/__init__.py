"""Privacy audits: attack what a config claims, or what code that is not fedsim's claims.

There is one attack engine, `target_audit`: a target is run on synthetic federations (`federation`),
with and without one row, and what it releases is compared with the trade-off curve of its `claim`
(`attacks`, `two_world`) and with what its noise and samples should be (`noise_checks`,
`sampling_checks`). `config_audit` makes a target of a config, and adds the checks of what a user
wrote: its mechanism, sampler, noise, rows and ledger. `adapters` has ready targets of other
packages.
"""

from __future__ import annotations

from fedsim.arguments import explain_calls
from fedsim.audit.claim import Claim
from fedsim.audit.federation import SyntheticFederation, TargetRelease
from fedsim.audit.findings import Check, Finding
from fedsim.audit.target_audit import audit_target, open_target
from fedsim.audit.target_claim import TargetClaim
from fedsim.audit.two_world import Attack
from fedsim.audit.verdict import Verdict

__all__ = [
    "Attack",
    "Check",
    "Claim",
    "Finding",
    "SyntheticFederation",
    "TargetClaim",
    "TargetRelease",
    "Verdict",
    "audit_target",
    "open_target",
]

explain_calls(__name__)
