"""Config tables on privacy: mechanisms, noise, ledger, evaluation."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from fedsim import registry
from fedsim.config.tables import (
    OUTSIDE_DIGEST,
    OUTSIDE_RELEASE,
    ConfigTable,
    Needs,
    ObjectTable,
    Refusals,
)
from fedsim.config.values import split_top_level
from fedsim.privacy.exclusions import check_budget, check_private_metrics, refuse_bare_metrics
from fedsim.privacy.plan import refuse_noise
from fedsim.settings import (
    Constraint,
    Ge,
    Gt,
    Le,
    Lt,
    NamesPath,
    NotAllowedError,
    Text,
    read_weights,
    write_weights,
)

Multiplier: TypeAlias = Annotated[
    float | None, Constraint(lambda z: z == 0 or 1e-3 <= z <= 1e9, "0.0, or from 0.001 to 1e9")
]
"""Type of a noise multiplier: 0 for no noise, or unset."""

TargetEpsilon: TypeAlias = Annotated[
    float | None, Constraint(lambda epsilon: 1e-6 <= epsilon <= 1e6, "from 1e-6 to 1e6")
]
"""Type of the epsilon that noise is calibrated to, or unset."""


@dataclass(frozen=True, init=False)
class BoundingSection(ObjectTable):
    """How rows are bounded before they are summed, at client or example level."""

    name: str = "none"
    """The mechanism that bounds updates; 'none' for no privacy."""
    per_layer: bool = False
    """Whether each layer is bounded, summed and noised separately."""

    @property
    def gives_no_privacy(self) -> bool:
        """Whether it gives no privacy, with any noise."""
        return self.is_robust or bool(getattr(self, "unsafe_non_private_raw_statistics", False))

    @property
    def is_robust(self) -> bool:
        """Whether it is a robust mean, which needs all rows, rather than one for single rows."""
        if self.name not in registry.names(self.kind):
            return False
        mechanism = registry.find(self.kind, self.name, self.key("name"))
        return bool(getattr(mechanism, "protects_nobody", False))


@dataclass(frozen=True, init=False)
class MechanismSection(BoundingSection, table="mechanism"):
    """How a client's update is bounded before it is added to the noisy sum."""

    private_scalar: str = ""
    """A number that clients report, such as 'loss', whose noisy mean is released with the
    update."""
    private_scalar_high: Annotated[float, Needs("private-scalar"), Gt(0)] = 1.0
    """The largest value of that number; larger ones are clamped to it."""
    private_scalar_fraction: Annotated[float, Needs("private-scalar"), Ge(0), Lt(1)] = 0.1
    """The share of the privacy budget for that number; the update has the rest."""
    weights: Annotated[tuple[float, ...], Text(read_weights, write_weights)] = ()
    """Declared weights of the clients in the mean of their updates, in the clients' order, such as
    '3,1,2'; empty for none. They multiply bounded updates, the largest by 1, and are public."""


@dataclass(frozen=True, init=False)
class NoiseSection(ObjectTable, table="noise"):
    """Kind and amount of a release's noise, and the privacy that it must give."""

    derived_fields: ClassVar[tuple[str, ...]] = ("multiplier", "hardened", "participation")
    name: str = "independent"
    """The kind of noise that is added to the sum."""
    multiplier: Multiplier = None
    """Noise multiplier: standard deviation of the noise on the sum, divided by the clip norm C; 0.0
    for no noise."""
    target_epsilon: TargetEpsilon = None
    """In place of multiplier: the epsilon of all rounds together, from which the multiplier is
    found."""
    max_epsilon: Annotated[float | None, OUTSIDE_RELEASE, Gt(0)] = None
    """Privacy budget: the run ends before its epsilon exceeds this, and keeps the model."""
    cohort_size: Annotated[int, Ge(0)] = 0
    """Simulate the noise of a larger cohort: the multiplier and every epsilon are those of a cohort
    of this size, and the mean gets as much noise as there. Epsilon is marked as simulated for that
    cohort: it is no guarantee of this run. 0 for the run's own cohort."""
    cohort_population: Annotated[int, Needs("cohort-size"), Ge(0)] = 0
    """The population from which the cohort of noise.cohort-size would be sampled; 0 for
    partition.clients."""
    delta: Annotated[float, OUTSIDE_DIGEST, Ge(1e-100), Lt(1)] = 1e-5
    """The delta of every epsilon; it should be below 1 / population."""
    entropy: Annotated[Literal["", "config", "system"], OUTSIDE_DIGEST] = ""
    """The source of noise, cohorts and batches: 'config' is the seed, so that runs repeat; 'system'
    is the operating system, which real clients need. Empty for 'system' in a deployment that adds
    noise, else 'config'."""
    placement: Literal["server", "client"] = "server"
    """Who adds the noise: the server adds it to the sum, or every client adds a share to its
    update."""
    hardened: bool = True
    """Draw noise so that its lowest bits reveal nothing of the data: slower, and needed for real
    data."""
    ledger_key: Annotated[str, OUTSIDE_RELEASE, NamesPath("operator")] = ""
    """A file with the private key that signs the ledger; empty for no signature."""

    @property
    def adds_noise(self) -> bool:
        """Whether the config asks for any noise."""
        return self.target_epsilon is not None or bool(self.multiplier)

    def check(self, config: Any) -> None:
        """Compare it with the mechanism, unless that is a user's, and a budget with the run."""
        mechanism = config.mechanism
        if not mechanism.has_options(mechanism.name):
            made = mechanism.make()
            for key in ("multiplier", "target-epsilon"):
                if amount := getattr(self, key.replace("-", "_")):
                    refuse_noise(made, f"noise.{key}", amount)
        check_budget(self.max_epsilon, private=config.private)

    def refusals(self, config: Any) -> Refusals:
        """Two amounts of noise; none for a bound that gives a guarantee."""
        amounts, bound = (self.multiplier, self.target_epsilon), config.mechanism
        if None not in amounts:
            yield (
                "noise.multiplier",
                f"unset while noise.target-epsilon = {self.target_epsilon}, which determines it",
            )
        if bound.name != "none" and not bound.is_robust and amounts == (None, None):
            yield (
                "noise.multiplier",
                "a number (0.0 for no noise), or noise.target-epsilon set, while mechanism.name = "
                f"'{bound.name}'",
            )


@dataclass(frozen=True, init=False)
class PrivacySection(ConfigTable, table="privacy"):
    """Where releases are recorded."""

    ledger: Annotated[str, OUTSIDE_RELEASE, NamesPath("operator")] = ""
    """A ledger that several runs of the same clients share, so that their costs add up and one
    budget holds for all of them; examples have another beside it. Empty for the run's own."""


@dataclass(frozen=True, init=False)
class ClientMechanismSection(BoundingSection, table="client.mechanism"):
    """How an example's gradient is bounded, in a client with example-level privacy."""

    derived_fields: ClassVar[tuple[str, ...]] = ("weighting",)


@dataclass(frozen=True, init=False)
class ClientNoiseSection(ConfigTable, table="client.noise"):
    """The noise on a client's sums of per-example gradients."""

    multiplier: Multiplier = None
    """Noise multiplier: standard deviation of the noise on a sum of gradients, divided by the clip
    norm C."""
    target_epsilon: TargetEpsilon = None
    """In place of multiplier: the largest epsilon of any client over all rounds, from which the
    multiplier is found."""
    max_epsilon: Annotated[float | None, OUTSIDE_RELEASE, Gt(0)] = None
    """Privacy budget: the run ends before any client's epsilon exceeds this."""
    delta: Annotated[float, OUTSIDE_DIGEST, Ge(1e-100), Lt(1)] = 1e-5
    """The delta of epsilon; it should be below 1 / (a client's examples)."""
    sampling: Literal["poisson", "shuffle"] = "poisson"
    """An independent Poisson batch for each step, or shuffled passes over the examples."""
    hardened: bool = True
    """Draw noise so that its lowest bits reveal nothing of the data: slower, and needed for real
    data."""
    chunk: Annotated[int, OUTSIDE_RELEASE, Ge(0)] = 0
    """How many examples of a batch go through the model at a time; 0 to choose. It changes last
    digits only."""


ValueRange = tuple[float, float]

_RANGE = re.compile(r"([^()\s]+) *\(([^(),]+),([^(),]+)\)")


def read_ranges(text: str) -> dict[str, ValueRange]:
    """Parse ranges such as ``"loss(0,5), rmse(0,10)"``: lower and upper ends by name.

    Raises
    ------
    NotAllowedError
        If the text has another form, or a range is empty.
    """
    return dict(map(_read_range, filter(None, split_top_level(text))))


def _read_range(part: str) -> tuple[str, ValueRange]:
    match = _RANGE.fullmatch(part)
    name, *ends = match.groups() if match else ("", "nan", "nan")
    try:
        low, high = map(float, ends)
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise NotAllowedError(
            "names with their ranges, the smaller number first, such as 'loss(0,5), rmse(0,10)'"
        )
    return name, (low, high)


def _canonical_ranges(value: object) -> str:
    """Ranges in a canonical form, so that equal ranges are equal strings."""
    if not isinstance(value, str):
        raise NotAllowedError("a string")
    return ", ".join(
        f"{name}({low:g},{high:g})" for name, (low, high) in read_ranges(value).items()
    )


@dataclass(frozen=True, init=False)
class EvaluateSection(ConfigTable, table="evaluate"):
    """How often and by whom the model is evaluated, and which metrics are released."""

    every: Annotated[int, Ge(0)] = 1
    """Rounds between two evaluations of the global model on test examples; the last round is always
    evaluated. 0 for never."""
    clients_every: Annotated[int, Ge(0)] = 0
    """Rounds between two evaluations by clients, on their own examples; 0 for never."""
    fraction: Annotated[float, Needs("clients-every"), Gt(0), Le(1)] = 1.0
    """The share of clients that take part in such an evaluation."""
    private: bool = False
    """Whether the clients' metrics are released as noisy means over clients. In a run with
    client-level privacy each evaluation is one more release, charged to its ledger and budget."""
    multiplier: Annotated[Multiplier, Needs("private")] = None
    """Noise multiplier of a private evaluation, whose metrics are bounded together; unset, with
    noise.target-epsilon, it follows from target-share."""
    target_share: Annotated[float, Needs("private"), Gt(0), Lt(1)] = 0.1
    """The share of noise.target-epsilon for all private evaluations together; the rest is for the
    rounds."""
    ranges: Annotated[str, Needs("private"), Text(_canonical_ranges, str)] = ""
    """Ranges to which metrics are clamped, such as 'loss(0,5)'. Metrics between 0 and 1 have that
    range; a metric without a range is not released."""
    quantiles: Annotated[bool, Needs("private")] = False
    """Whether quantiles over clients are released too: p10, median and p90."""
    unprotected: bool = False
    """Allow metrics of clients' data, without noise, in a private run."""

    def check(self, config: Any) -> None:
        """Check which metrics of clients are shown."""
        if self.private:
            check_private_metrics(private=config.private, private_examples=config.client.private)
        elif config.protects and self.clients_every and not self.unprotected:
            refuse_bare_metrics(f"evaluate.clients-every = {self.clients_every}")

    def refusals(self, config: Any) -> Refusals:
        """What private evaluations exclude."""
        if not self.private:
            return
        if not 0 < self.clients_every <= config.rounds:
            yield (
                "evaluate.private",
                f"false unless evaluate.clients-every is from 1 to rounds = {config.rounds}",
            )
        if self.unprotected:
            yield "evaluate.private", "false while evaluate.unprotected = true"
        calibrated = self.multiplier is None and config.noise.target_epsilon is not None
        if not (self.multiplier or calibrated):
            yield (
                "evaluate.multiplier",
                "above 0 with evaluate.private = true, unless it follows from noise.target-epsilon "
                "and evaluate.target-share",
            )
