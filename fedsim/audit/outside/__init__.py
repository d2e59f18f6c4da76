"""Audits of other packages' private federated learning: attack a target's claim."""

from __future__ import annotations

from fedsim.audit.outside.audit import audit_target, open_target
from fedsim.audit.outside.claims import TargetClaim
from fedsim.audit.outside.federation import SyntheticFederation, TargetRelease

__all__ = ["SyntheticFederation", "TargetClaim", "TargetRelease", "audit_target", "open_target"]
