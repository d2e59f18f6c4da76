"""Cohorts: who takes part in a round. They are samplers of clients, by their public names."""

from __future__ import annotations

from fedsim.privacy.laws import FixedSize as FixedCohort
from fedsim.privacy.laws import Full as FullCohort
from fedsim.privacy.laws import InclusionSampler
from fedsim.privacy.laws import Poisson as PoissonCohort
from fedsim.privacy.laws import Sampler as Cohort

__all__ = [
    "Cohort",
    "FixedCohort",
    "FullCohort",
    "InclusionSampler",
    "PoissonCohort",
]
