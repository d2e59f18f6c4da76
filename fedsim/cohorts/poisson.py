"""The cohort `PoissonCohort`; see `fedsim.privacy.samplers`."""

from __future__ import annotations

from fedsim.privacy.samplers import Poisson as PoissonCohort
from fedsim.registry import register

__all__ = ["PoissonCohort"]

register("cohort", "poisson")(PoissonCohort)
