"""Rules of a config that involve several keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

from fedsim.arguments import shown
from fedsim.config.tables import ConfigTable
from fedsim.errors import FedsimError
from fedsim.privacy.exclusions import (
    check_bounds_rows,
    check_budget,
    check_private_metrics,
    check_private_work,
    refuse_bare_metrics,
)
from fedsim.privacy.plan import refuse_noise

# Stands for `fedsim.config.RunConfig`, whose module imports this one.
RunConfig: TypeAlias = Any

Refusals: TypeAlias = Iterator[tuple[str, str]]
"""Keys that break a rule, each with what it must be."""


def check_rules(config: RunConfig) -> None:
    """Refuse a config whose keys contradict each other.

    Raises
    ------
    FedsimError
        For the first broken rule: ``key = value; it must be ...``.
    """
    tables = [value for value in vars(config).values() if isinstance(value, ConfigTable)]
    of_tables = (table.refusals(config) for table in tables)
    for key, allowed in chain(*(rules(config) for rules in RULES), *of_tables):
        value = attrgetter(key.replace("-", "_"))(config)
        value = "" if value is None else value
        raise FedsimError(f"{key} = {shown(value)}; it must be {allowed}.")
    # Objects that need no torch refuse themselves what they cannot be. A user's own are made when
    # the run is resolved, since reading a config imports no code.
    for check in (_check_clients, _check_release, _check_evaluation):
        check(config)
    for table in tables:
        table.check(config)


def _check_clients(c: RunConfig) -> None:
    """Make clients' work and the mechanism for their examples."""
    mechanism = c.client.mechanism
    c.client.make_work()
    if not mechanism.has_options(mechanism.name):
        check_bounds_rows(mechanism.make(), "client.mechanism")
    if mechanism.name != "none":
        check_private_work(c.client.work or None, c.client.max_grad_norm)


def _check_release(c: RunConfig) -> None:
    """Make the cohort's sampler and the mechanism."""
    noise = c.noise
    if not c.cohort.has_options(c.cohort.name):
        c.cohort.make(population=c.partition.clients, rounds=c.rounds)
    if not c.mechanism.has_options(c.mechanism.name):
        mechanism = c.mechanism.make()
        for key in ("multiplier", "target-epsilon"):
            if amount := getattr(noise, key.replace("-", "_")):
                refuse_noise(mechanism, f"noise.{key}", amount)
    check_budget(noise.max_epsilon, private=c.private)


def _check_evaluation(c: RunConfig) -> None:
    """Check which metrics of clients are shown."""
    evaluate, every = c.evaluate, c.evaluate.clients_every
    if evaluate.private:
        check_private_metrics(private=c.private, private_examples=c.client.private)
    elif c.protects and every and not evaluate.unprotected:
        refuse_bare_metrics(f"evaluate.clients-every = {every}")


def _model(c: RunConfig) -> Refusals:
    """Initial model."""
    if c.model.weights_for and not c.model.weights:
        yield (
            "model.weights-for",
            "unset without model.weights, the file that these parameters would come from",
        )
    if c.adapter.weights and c.adapter.name == "none":
        yield (
            "adapter.weights",
            "unset while adapter.name = 'none': there is no adapter that would start from it",
        )


def _clients(c: RunConfig) -> Refusals:
    """Clients' training."""
    client = c.client
    if client.noise.max_epsilon is not None and not client.private:
        yield "client.noise.max-epsilon", "unset where clients do not protect their examples"


def _examples(c: RunConfig) -> Refusals:
    """Clients' protection of their examples."""
    mechanism, noise = c.client.mechanism.name, c.client.noise
    if mechanism == "none" and (noise.multiplier, noise.target_epsilon) != (None, None):
        yield (
            "client.mechanism.name",
            "set, to 'clipping' for one, while client.noise says how much noise there is",
        )
    if mechanism != "none" and (noise.multiplier is None) == (noise.target_epsilon is None):
        yield (
            "client.noise.multiplier",
            "set, or client.noise.target-epsilon, and not both, while client.mechanism.name = "
            f"'{mechanism}'",
        )


def _noise(c: RunConfig) -> Refusals:
    """Amount of a release's noise."""
    noise = c.noise
    if noise.multiplier is not None and noise.target_epsilon is not None:
        yield (
            "noise.multiplier",
            f"unset while noise.target-epsilon = {noise.target_epsilon}, which determines it",
        )


def _engines(c: RunConfig) -> Refusals:
    """Engines."""
    cores = c.engine.cpus_per_worker
    if c.engine.name == "simulation" and cores != max(1, int(cores)):
        yield (
            "engine.cpus-per-worker",
            "a whole number with engine.name = 'simulation': Flower's keeps whole cores",
        )


def _bounds(c: RunConfig) -> Refusals:
    """A mechanism that gives a guarantee needs noise."""
    mechanism, noise = c.mechanism, c.noise
    amounts = (noise.multiplier, noise.target_epsilon)
    if mechanism.name != "none" and not mechanism.is_robust and amounts == (None, None):
        yield (
            "noise.multiplier",
            "a number (0.0 for no noise), or noise.target-epsilon set, while mechanism.name = "
            f"'{mechanism.name}'",
        )


def _guarantee(c: RunConfig) -> Refusals:
    """What a guarantee, or the lack of one, excludes."""
    if c.private and c.client.noise.target_epsilon is not None:
        yield (
            "client.noise.target-epsilon",
            "unset, with client.noise.multiplier in its place, in a run that protects whole "
            "clients too: the multiplier that meets it would reveal how many examples clients have",
        )


def _evaluation(c: RunConfig) -> Refusals:
    """Who evaluates, and which metrics may be shown."""
    evaluate = c.evaluate
    if c.model.personal and evaluate.every:
        yield (
            "model.personal",
            "unset, or evaluate.every = 0: only clients have the whole model, and evaluate it with "
            "evaluate.clients-every",
        )


def _private_evaluation(c: RunConfig) -> Refusals:
    """What private evaluations exclude."""
    evaluate = c.evaluate
    if not evaluate.private:
        return
    for refused, words in (
        (
            not 0 < evaluate.clients_every <= c.rounds,
            f"unless evaluate.clients-every is from 1 to rounds = {c.rounds}",
        ),
        (evaluate.unprotected, "while evaluate.unprotected = true"),
    ):
        if refused:
            yield "evaluate.private", f"false {words}"
    calibrated = evaluate.multiplier is None and c.noise.target_epsilon is not None
    if not (evaluate.multiplier or calibrated):
        yield (
            "evaluate.multiplier",
            "above 0 with evaluate.private = true, unless it follows from noise.target-epsilon and "
            "evaluate.target-share",
        )


def _client_state(c: RunConfig) -> Refusals:
    """Clients' state."""
    if getattr(c.client, "adapt_rounds", 0) and c.client.state == "reset":
        yield (
            "client.adapt-rounds",
            "0 while client.state = 'reset', since the plain steps after so many rounds take the "
            "rate that was reached; with client.state = 'client' they can",
        )


RULES = (
    *(_model, _clients, _examples, _noise, _engines, _bounds),
    *(_guarantee, _evaluation, _private_evaluation, _client_state),
)
"""All rules, in the order in which they are checked."""
