"""The rules of a config that are about several keys, each once and in the order of their tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields
from typing import Any, TypeAlias

from fedsim.arguments import shown
from fedsim.config.sections import DevicesSection
from fedsim.errors import FedsimError

# A `fedsim.config.RunConfig`: its module checks every config by these rules, and imports them.
RunConfig: TypeAlias = Any


@dataclass(frozen=True)
class KeyRule:
    """What must hold of a config, and the sentence where it does not.

    Attributes
    ----------
    key : str
        With dots: what is to be changed.
    holds : callable
        Of the config: a truth value.
    allowed : str, or callable of the config that gives one
        What the key may be; ``{other.key}`` in it is the value of another key.
    """

    key: str
    holds: Callable[[RunConfig], object]
    allowed: str | Callable[[RunConfig], str]

    def require(self, config: RunConfig) -> None:
        """Raise the sentence ``key = value; it must be allowed`` unless the rule holds."""
        if not self.holds(config):
            words = self.allowed if isinstance(self.allowed, str) else self.allowed(config)
            words = re.sub(r"\{([a-z.-]+)\}", lambda at: f"{_at(config, at[1])}", words)
            value = _at(config, self.key)
            value = "" if value is None else value
            raise FedsimError(f"{self.key} = {shown(value)}; it must be {words}.")


def check_rules(config: RunConfig) -> None:
    """Refuse a config whose keys do not go together.

    Raises
    ------
    FedsimError
        By the first rule that does not hold.
    """
    for rule in RULES:
        rule.require(config)


def _at(config: Any, key: str) -> Any:
    for part in key.replace("-", "_").split("."):
        config = getattr(config, part, None)
    return config


def _unset_unless(key: str, allows: Callable[[RunConfig], bool]) -> Callable[[RunConfig], bool]:
    return lambda config: allows(config) or not _at(config, key)


def _default_unless(
    field: Field[Any], allows: Callable[[RunConfig], bool]
) -> Callable[[RunConfig], bool]:
    """That a device is as it is without a model of devices, unless another rule allows one."""
    return lambda c: allows(c) or getattr(c.devices, field.name) == field.default


def _unless_private_evaluation(
    allows: Callable[[RunConfig], object],
) -> Callable[[RunConfig], object]:
    return lambda config: not config.evaluate.private or allows(config)


def _bounds_examples(config: RunConfig) -> bool:
    return bool(config.client.mechanism.name != "none")


def _no_noise_without_a_bound() -> Iterator[KeyRule]:
    """Rules for the key of the two that says how much noise there is."""
    for key in ("noise.multiplier", "noise.target-epsilon"):
        yield KeyRule(
            key,
            _unset_unless(key, lambda c: not c.mechanism.is_robust),
            "unset while mechanism.name = '{mechanism.name}': what one client moves a robust mean "
            "by depends on all others' updates, and is bounded by no sensitivity of the plan's",
        )
        yield KeyRule(
            key,
            _unset_unless(key, lambda c: c.mechanism.name != "none"),
            "unset while mechanism.name = 'none': noise protects only what a mechanism bounds, so "
            "choose one such as 'clipping'",
        )


def _least_larger_cohort(config: RunConfig) -> float:
    """The clients that are drawn here, on average."""
    if config.cohort.name == "poisson":
        return float(config.cohort.rate * config.partition.clients)
    return float(config.cohort.size)


def _larger_cohort_fits(config: RunConfig) -> bool:
    size, population = config.noise.cohort_size, config.noise.cohort_population
    clients = config.partition.clients
    return not size or _least_larger_cohort(config) <= size <= (population or clients)


def _alternates(config: RunConfig) -> bool:
    return bool(getattr(config.adapter, "factors", "") == "alternating")


def _takes_time(config: RunConfig) -> bool:
    return bool(config.devices.seconds_per_example or config.devices.bandwidth)


RULES: tuple[KeyRule, ...] = (
    KeyRule("seed", lambda c: 0 <= c.seed < 2**63, "an integer from 0 to 2^63 - 1"),
    KeyRule(
        "data.validation",
        lambda c: c.data.validation < 1 or c.data.validation == int(c.data.validation),
        "a share below 1, or a whole number of examples",
    ),
    KeyRule(
        "model.weights-for",
        lambda c: c.model.weights or not c.model.weights_for,
        "unset without model.weights, the file that these parameters would come from",
    ),
    KeyRule(
        "adapter.weights",
        lambda c: c.adapter.name != "none" or not c.adapter.weights,
        "unset while adapter.name = 'none': there is no adapter that would start from it",
    ),
    KeyRule(
        "client.state",
        lambda c: not (_alternates(c) and c.client.state != "reset"),
        "'reset' while adapter.factors = 'alternating': what a client keeps of one round is of the "
        "factor that rests in the next",
    ),
    KeyRule(
        "model.personal",
        lambda c: not (_alternates(c) and c.model.personal),
        "unset while adapter.factors = 'alternating', where clients keep nothing between rounds",
    ),
    KeyRule(
        "noise.name",
        lambda c: not _alternates(c) or c.noise.name == "independent",
        "'independent' while adapter.factors = 'alternating': noise that cancels over rounds does "
        "not where a factor is released in every other one",
    ),
    # What clients do, and how they protect their examples.
    KeyRule(
        "client.epochs",
        lambda c: c.client.epochs or c.client.steps,
        "at least 1 unless client.steps is set",
    ),
    KeyRule(
        "client.epochs",
        lambda c: not c.client.steps or c.client.epochs <= 1,
        "unset while client.steps = {client.steps}",
    ),
    KeyRule(
        "client.noise.max-epsilon",
        lambda c: (
            c.client.noise.max_epsilon is None
            or (c.client.private and c.client.noise.max_epsilon > 0)
        ),
        "greater than 0, and unset where clients do not protect their examples",
    ),
    KeyRule(
        "client.work",
        lambda c: not (_bounds_examples(c) and c.client.work),
        "empty while client.mechanism.name = '{client.mechanism.name}': a client's number of noisy "
        "steps is a declared constant of the plan, the same for all",
    ),
    KeyRule(
        "client.max-grad-norm",
        lambda c: not (_bounds_examples(c) and c.client.max_grad_norm),
        "0 while client.mechanism.name = '{client.mechanism.name}', which bounds the gradient of "
        "each example",
    ),
    KeyRule(
        "client.mechanism.name",
        lambda c: not c.client.mechanism.is_robust,
        "a bound of an example's gradient, such as 'clipping': a robust mean of gradients protects "
        "nobody",
    ),
    KeyRule(
        "client.mechanism.name",
        lambda c: (
            _bounds_examples(c)
            or (c.client.noise.multiplier, c.client.noise.target_epsilon) == (None, None)
        ),
        "set, to 'clipping' for one, while client.noise says how much noise there is",
    ),
    KeyRule(
        "client.noise.name",
        lambda c: c.client.noise.name in ("independent", "lambda-cgd", "bisr", "tree"),
        "'independent', 'lambda-cgd', 'bisr' or 'tree': clients have no place for the vectors that "
        "other noise keeps from step to step",
    ),
    KeyRule(
        "client.noise.name",
        lambda c: c.client.noise.name == "independent" or not c.private,
        "'independent' while mechanism.name = '{mechanism.name}' protects whole clients: the "
        "coefficients of other noise follow from how many examples clients have",
    ),
    KeyRule(
        "client.noise.sampling",
        lambda c: c.client.noise.name == "independent" or c.client.noise.sampling == "shuffle",
        "'shuffle' while client.noise.name = '{client.noise.name}', whose sensitivity depends on "
        "which batches an example is in",
    ),
    KeyRule(
        "client.noise.multiplier",
        lambda c: (
            not _bounds_examples(c)
            or (c.client.noise.multiplier is None) != (c.client.noise.target_epsilon is None)
        ),
        "set, or client.noise.target-epsilon, and not both, while client.mechanism.name = "
        "'{client.mechanism.name}'",
    ),
    # How much noise a release has.
    KeyRule(
        "noise.multiplier",
        lambda c: c.noise.multiplier is None or c.noise.target_epsilon is None,
        "unset while noise.target-epsilon = {noise.target-epsilon}, which determines it",
    ),
    KeyRule(
        "noise.max-epsilon",
        lambda c: c.noise.max_epsilon is None or c.noise.max_epsilon > 0,
        "greater than 0",
    ),
    KeyRule(
        "noise.cohort-size",
        lambda c: not c.noise.cohort_size or c.noise.multiplier,
        "0 unless noise.multiplier is above 0: a larger cohort's noise is that multiplier's, and a "
        "target epsilon is of the noise really added",
    ),
    KeyRule(
        "noise.cohort-population",
        lambda c: c.noise.cohort_size or not c.noise.cohort_population,
        "0 unless noise.cohort-size is set",
    ),
    KeyRule(
        "devices.availability",
        lambda c: not c.devices.trace or c.devices.availability == 1,
        "unset while devices.trace = '{devices.trace}' says which devices are available",
    ),
    *(
        KeyRule(
            f"devices.{key}",
            _unset_unless(f"devices.{key}", _takes_time),
            "0 while devices take no time: devices.seconds-per-example and devices.bandwidth say "
            "how much",
        )
        for key in ("deadline", "spread")
    ),
    KeyRule(
        "engine.cpus-per-worker",
        lambda c: (
            c.engine.name != "simulation"
            or c.engine.cpus_per_worker == max(1, int(c.engine.cpus_per_worker))
        ),
        "a whole number with engine.name = 'simulation': Flower's keeps whole cores",
    ),
    KeyRule(
        "cohort.size",
        lambda c: c.cohort.name != "fixed" or c.cohort.size <= c.partition.clients,
        "at most partition.clients = {partition.clients}, the population",
    ),
    *_no_noise_without_a_bound(),
    KeyRule(
        "noise.multiplier",
        lambda c: (
            c.mechanism.name == "none"
            or c.mechanism.is_robust
            or (c.noise.multiplier, c.noise.target_epsilon) != (None, None)
        ),
        "a number (0.0 for no noise), or noise.target-epsilon set, while mechanism.name = "
        "'{mechanism.name}'",
    ),
    KeyRule(
        "noise.target-epsilon",
        lambda c: c.noise.target_epsilon is None or not c.mechanism.gives_none,
        "unset while mechanism.unsafe-non-private-raw-statistics = true, for which no noise gives "
        "a finite epsilon",
    ),
    # Secure aggregation.
    KeyRule(
        "secagg.threshold",
        lambda c: not c.secagg.threshold or 2 <= c.secagg.threshold <= c.partition.clients,
        "0, or from 2 to partition.clients = {partition.clients}",
    ),
    KeyRule(
        "secagg.colluders",
        lambda c: c.secagg.colluders < max(c.secagg.threshold, 1),
        "below secagg.threshold = {secagg.threshold}: at least one client of a sum must be honest",
    ),
    KeyRule(
        "secagg.threshold",
        lambda c: not c.secagg.threshold or (c.private and c.noise.placement == "client"),
        "0, or noise.placement = 'client' with a mechanism and noise: the server sees the sum, "
        "which only clients' own noise protects from it",
    ),
    KeyRule(
        "secagg.threshold",
        lambda c: not (c.secagg.threshold and c.evaluate.unprotected),
        "0 while evaluate.unprotected = true, which shows what single clients report",
    ),
    KeyRule(
        "secagg.threshold",
        lambda c: c.cohort.name != "fixed" or c.secagg.threshold <= c.cohort.size,
        "at most cohort.size = {cohort.size}",
    ),
    KeyRule(
        "secagg.simulate",
        lambda c: not c.secagg.simulate or (c.secagg.threshold and c.engine.name == "local"),
        "false without secagg.threshold or on other engines: 'simulation' and 'deployment' mask "
        "always, and 'ray' never does",
    ),
    # What a guarantee does not go with.
    KeyRule(
        "privacy.group",
        lambda c: c.privacy.group == 1 or (c.private and c.privacy.group <= c.partition.clients),
        "at most partition.clients = {partition.clients}, and 1 in a run without client-level "
        "privacy, from which what an owner of several clients is promised would follow",
    ),
    KeyRule(
        "client.noise.target-epsilon",
        lambda c: not c.private or c.client.noise.target_epsilon is None,
        "unset, with client.noise.multiplier in its place, in a run that protects whole clients "
        "too: the multiplier found for it would tell how many examples clients have",
    ),
    KeyRule(
        "noise.max-epsilon",
        lambda c: c.noise.max_epsilon is None or c.private,
        "unset in a run without a mechanism and noise: it has no budget to keep",
    ),
    KeyRule(
        "noise.cohort-size",
        lambda c: not c.noise.cohort_size or c.engine.name != "deployment",
        "0 with engine.name = 'deployment': real clients have the noise of the cohort that they "
        "are in",
    ),
    KeyRule(
        "noise.cohort-size",
        lambda c: not c.noise.cohort_size or c.cohort.name in ("poisson", "fixed"),
        "0 with cohort.name = '{cohort.name}': what a larger cohort would cost is known for "
        "'poisson' and 'fixed'",
    ),
    KeyRule(
        "noise.cohort-population",
        lambda c: not c.noise.cohort_population or c.noise.cohort_population >= c.partition.clients,
        "0, or at least partition.clients = {partition.clients}",
    ),
    KeyRule(
        "noise.cohort-size",
        _larger_cohort_fits,
        lambda c: (
            f"from {_least_larger_cohort(c):g}, what is drawn here, to "
            f"{c.noise.cohort_population or c.partition.clients}, the clients that it would be "
            "drawn from"
        ),
    ),
    KeyRule(
        "model.personal",
        lambda c: not c.model.personal or not c.evaluate.every,
        "unset, or evaluate.every = 0: only clients have the whole model, and evaluate it with "
        "evaluate.clients-every",
    ),
    KeyRule(
        "evaluate.clients-every",
        lambda c: (
            not (
                c.protects
                and c.evaluate.clients_every
                and not (c.evaluate.unprotected or c.evaluate.private)
            )
        ),
        "0 in a run that is private at client or example level, since metrics of clients' data are "
        "released without noise; at client level set evaluate.private = true to have them with "
        "noise, or set evaluate.unprotected = true to allow them without",
    ),
    *(
        KeyRule("evaluate.private", _unless_private_evaluation(allowed), f"false {words}")
        for allowed, words in (
            (lambda c: c.private, "in a run without client-level privacy: it has no budget"),
            (
                lambda c: 0 < c.evaluate.clients_every <= c.rounds,
                "unless evaluate.clients-every is from 1 to rounds = {rounds}",
            ),
            (lambda c: not c.evaluate.unprotected, "while evaluate.unprotected = true"),
            (
                lambda c: not c.client.private,
                "where clients protect their examples (client.mechanism): the server would see "
                "metrics of them without noise",
            ),
            (
                lambda c: c.noise.placement == "server",
                "while noise.placement = 'client': clients send their shares and nothing else",
            ),
            (
                lambda c: not c.privacy.selection,
                "in a run of a selection (privacy.selection), which is charged as whole runs of "
                "rounds alone",
            ),
            (
                lambda c: not c.noise.cohort_size,
                "while noise.cohort-size simulates the noise of a larger cohort",
            ),
        )
    ),
    KeyRule(
        "evaluate.multiplier",
        _unless_private_evaluation(
            lambda c: (
                bool(c.evaluate.multiplier)
                or (c.evaluate.multiplier is None and c.noise.target_epsilon is not None)
            )
        ),
        "above 0 with evaluate.private = true, unless it follows from noise.target-epsilon and "
        "evaluate.target-share",
    ),
    *(
        KeyRule(
            f"evaluate.{key}",
            _unset_unless(f"evaluate.{key}", lambda c: c.evaluate.private),
            "unset unless evaluate.private = true",
        )
        for key in ("multiplier", "ranges", "quantiles")
    ),
    KeyRule(
        "privacy.selection",
        lambda c: not c.privacy.selection or (c.private and not c.client.private),
        "empty, unless the run is private at client level and at no other: a selection is charged "
        "to the server's ledger alone",
    ),
    KeyRule(
        "client.state",
        lambda c: not (c.private and c.client.state == "server"),
        "'reset' or 'client' in a run with client-level privacy: what clients report of their "
        "state would be a release of its own",
    ),
    KeyRule(
        "client.adapt-rounds",
        lambda c: not (getattr(c.client, "adapt_rounds", 0) and c.client.state == "reset"),
        "0 while client.state = 'reset', since the plain steps after so many rounds take the rate "
        "that was reached; with client.state = 'client' they can",
    ),
    KeyRule(
        "devices.deadline",
        lambda c: not (c.protects and c.devices.deadline),
        "0 in a run that is private at client or example level: how long a device takes depends on "
        "how many examples it has, which would decide whose update is in the sum",
    ),
    *(
        KeyRule(
            f"devices.{field.name.replace('_', '-')}",
            _default_unless(field, lambda c: c.engine.name != "deployment"),
            "unset with engine.name = 'deployment', whose devices are real",
        )
        for field in fields(DevicesSection)
    ),
)
