"""Cohorts: who takes part in a round. They are samplers of clients, by their public names."""

from __future__ import annotations

from fedsim.privacy.inclusion import InclusionSampler
from fedsim.privacy.samplers import FixedSize as FixedCohort
from fedsim.privacy.samplers import Full as FullCohort
from fedsim.privacy.samplers import Poisson as PoissonCohort
from fedsim.privacy.sampling import Sampler as Cohort
from fedsim.privacy.sampling import SamplerDefaults

__all__ = [
    "Cohort",
    "FixedCohort",
    "FullCohort",
    "InclusionSampler",
    "PoissonCohort",
    "SamplerDefaults",
]
