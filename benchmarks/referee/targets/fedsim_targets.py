"""fedsim's own strategies, as Flower runs them."""

from fedsim.audit.adapters.flower import strategy_target
from fedsim.cohorts import FixedCohort, FullCohort, PoissonCohort
from fedsim.mechanisms import Clipping, Normalization
from fedsim.strategies import DPFedAvg


def _strategy(bound, cohort, **options):
    def make(f):
        return DPFedAvg(
            mechanism=bound(f.clip_norm),
            cohort=cohort(f),
            noise_multiplier=f.noise_multiplier,
            delta=1e-5,
            seed=f.seed % 2**31,
            **options,
        )

    return strategy_target(make)


def _full(f):
    return FullCohort(f.population, adjacency="zero-out")


def _poisson(f):
    return PoissonCohort(f.rate, 20)


def _fixed(f):
    return FixedCohort(round(f.rate * f.population), f.population)


clipping = _strategy(Clipping, _full)
clipping_poisson = _strategy(Clipping, _poisson)
clipping_fixed = _strategy(Clipping, _fixed)
normalization = _strategy(Normalization, _full)
