"""The cohort `FixedCohort`; see `fedsim.privacy.samplers`."""

from __future__ import annotations

from fedsim.privacy.samplers import FixedSize as FixedCohort
from fedsim.registry import register

__all__ = ["FixedCohort"]

register("cohort", "fixed")(FixedCohort)
