"""Conversion between Flower's privacy records and fedsim's events and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Cost
from fedsim.privacy.events import Event
from fedsim.privacy.laws import FixedSizeLaw, FullLaw, Law

if TYPE_CHECKING:
    from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, PrivacySpent


def event_of(event: Event | GaussianPrivacyEvent, declared_event: Event | None) -> Event:
    """The event of a Flower record; an `Event` is returned unchanged.

    The law is the declared one, for the record's sample size. Without a declaration, a sample of
    some clients is assumed to be what Flower's own strategies draw: a fixed size without
    replacement.

    Raises
    ------
    FedsimError
        If the declared law does not cover samples of that size.
    """
    if isinstance(event, Event):
        return event
    size, population = event.sample_size, event.population_size
    law: Law = FullLaw(population=population)
    if declared_event is not None:
        law = declared_event.law.with_sample_size(size, population)
    elif size != population:
        law = FixedSizeLaw(size=size, population=population)
    return Event(noise_multiplier=event.noise_multiplier, law=law)


def privacy_config(
    declared_event: Event | None, delta: float | None, max_epsilon: float | None
) -> PrivacyConfig:
    """Flower's record of a ledger's settings.

    Raises
    ------
    FedsimError
        If there is no delta, or no declared event with a population.
    """
    from flwr.serverapp import NeighboringRelation, PrivacyConfig, SamplingMethod

    if declared_event is None or declared_event.law.population is None or delta is None:
        raise FedsimError(
            "Flower asks a ledger for delta and population: "
            "give it delta=... and declared_event=Event.of(cohort, ...), with a population."
        )
    replaced = declared_event.adjacency == "replace-one"
    relation = "REPLACE_ONE" if replaced else "ADD_OR_REMOVE_ONE"
    return PrivacyConfig(
        target_delta=delta,
        population_size=declared_event.law.population,
        neighboring_relation=NeighboringRelation[relation],
        sampling_method=SamplingMethod[declared_event.law.flower_method],
        max_epsilon=max_epsilon,
    )


def privacy_spent(cost: Cost) -> PrivacySpent:
    """Flower's record of a cost."""
    from flwr.serverapp import PrivacySpent

    return PrivacySpent(
        epsilon=cost.epsilon,
        delta=cost.delta,
        num_releases=cost.releases,
        accounting_method=f"fedsim {cost.method}, {cost.adjacency}",
    )
