"""Public names of the client samplers, which draw the cohort of a round."""

from __future__ import annotations

from fedsim.arguments import explain_calls
from fedsim.privacy.laws import FixedSize as FixedCohort
from fedsim.privacy.laws import Full as FullCohort
from fedsim.privacy.laws import InclusionSampler
from fedsim.privacy.laws import Poisson as PoissonCohort
from fedsim.privacy.laws import Sampler as Cohort
from fedsim.privacy.laws.allocation import Allocation as AllocationCohort
from fedsim.privacy.laws.buffered import Buffered as BufferedCohort
from fedsim.privacy.laws.cyclic import Cyclic as CyclicCohort
from fedsim.privacy.laws.separated import Separated as SeparatedCohort

__all__ = [
    "AllocationCohort",
    "BufferedCohort",
    "Cohort",
    "CyclicCohort",
    "FixedCohort",
    "FullCohort",
    "InclusionSampler",
    "PoissonCohort",
    "SeparatedCohort",
]

explain_calls(__name__)
