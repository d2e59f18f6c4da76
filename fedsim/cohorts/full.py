"""The cohort `FullCohort`; see `fedsim.privacy.samplers`."""

from __future__ import annotations

from fedsim.privacy.samplers import Full as FullCohort
from fedsim.registry import register

__all__ = ["FullCohort"]

register("cohort", "full")(FullCohort)
