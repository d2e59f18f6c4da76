"""Flower's privacy-accounting records, from ours and to ours."""

from __future__ import annotations

from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    PrivacySpent,
    SamplingMethod,
)

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Cost
from fedsim.privacy.events import Event
from fedsim.privacy.laws import FixedSizeLaw, FullLaw


def our_event(event: GaussianPrivacyEvent, declared: Event | None) -> Event:
    """What a Flower event costs.

    The law is the declared one. Without a declaration a partial sample is what Flower's
    own strategies draw: a fixed size without replacement.
    """
    size, population = event.sample_size, event.population_size
    if declared is not None:
        law = declared.law.sampled(size, population)
    elif size == population:
        law = FullLaw(population=population)
    else:
        law = FixedSizeLaw(size=size, population=population)
    return Event(noise_multiplier=event.noise_multiplier, law=law)


def privacy_config(
    declared: Event | None, delta: float | None, max_epsilon: float | None
) -> PrivacyConfig:
    """Flower's configuration of a ledger.

    Raises
    ------
    FedsimError
        If the ledger has no delta, or no declared event with a population.
    """
    if declared is None or declared.law.population is None or delta is None:
        raise FedsimError(
            "Flower asks a ledger for delta and population: "
            "give it delta=... and declared=Event.of(cohort, ...), with a population."
        )
    replaced = declared.adjacency == "replace-one"
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    return PrivacyConfig(
        target_delta=delta,
        population_size=declared.law.population,
        neighboring_relation=NeighboringRelation.REPLACE_ONE if replaced else relation,
        sampling_method=SamplingMethod[declared.law.flower],
        max_epsilon=max_epsilon,
    )


def privacy_spent(cost: Cost) -> PrivacySpent:
    """Flower's record of a cost."""
    return PrivacySpent(
        epsilon=cost.epsilon,
        delta=cost.delta,
        num_releases=cost.releases,
        accounting_method=f"fedsim {cost.method}, {cost.adjacency}",
    )
