"""Samplers and their laws (what a draw costs): one file each."""

from __future__ import annotations

from fedsim.privacy.laws.base import Adjacency, Inclusion, Law, Level, Participation
from fedsim.privacy.laws.declared import DeclaredLaw
from fedsim.privacy.laws.fixed import FixedSize, FixedSizeLaw
from fedsim.privacy.laws.full import Full, FullLaw
from fedsim.privacy.laws.poisson import InclusionSampler, Poisson, PoissonLaw
from fedsim.privacy.laws.sampler import Sampler, SamplerState, declared_population
from fedsim.privacy.laws.shuffle import ShuffledPasses, ShuffleLaw

__all__ = [
    "Adjacency",
    "DeclaredLaw",
    "FixedSize",
    "FixedSizeLaw",
    "Full",
    "FullLaw",
    "Inclusion",
    "InclusionSampler",
    "Law",
    "Level",
    "Participation",
    "Poisson",
    "PoissonLaw",
    "Sampler",
    "SamplerState",
    "ShuffleLaw",
    "ShuffledPasses",
    "declared_population",
]
