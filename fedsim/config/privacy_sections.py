"""Config tables on privacy: bounds, noise, secure aggregation, statement, evaluation."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from fedsim import registry
from fedsim.config.tables import OUTSIDE_RELEASE, Choice, ConfigTable, Needs
from fedsim.config.values import split_top_level
from fedsim.settings import Constraint, Doc, Ge, Gt, Le, Lt, NotAllowedError, Text

Multiplier: TypeAlias = Annotated[
    float | None, Constraint(lambda z: z == 0 or 1e-3 <= z <= 1e9, "0.0, or from 0.001 to 1e9")
]
"""Type of a noise multiplier: 0 for no noise, or unset."""

TargetEpsilon: TypeAlias = Annotated[
    float | None, Constraint(lambda epsilon: 1e-6 <= epsilon <= 1e6, "from 1e-6 to 1e6")
]
"""Type of the epsilon that noise is calibrated to, or unset."""


@dataclass(frozen=True, init=False)
class BoundingSection(Choice):
    """How rows are bounded before they are summed, at client or example level."""

    name: Annotated[str, Doc("The bound; 'none' for no privacy.")] = "none"
    per_layer: Annotated[
        bool, Doc("Whether every layer is bounded, summed and noised on its own.")
    ] = False

    @property
    def gives_none(self) -> bool:
        """Whether it gives no privacy, with any noise."""
        return self.is_robust or bool(getattr(self, "unsafe_non_private_raw_statistics", False))

    @property
    def is_robust(self) -> bool:
        """Whether it is a robust mean, which needs all rows, rather than a bound of single rows."""
        if self.name not in registry.names(self.kind):
            return False
        thing = registry.find(self.kind, self.name, self.key("name"))
        return bool(getattr(thing, "protects_nobody", False))


@dataclass(frozen=True, init=False)
class MechanismSection(BoundingSection, table="mechanism"):
    """How a client's update is bounded before it is added to the noisy sum."""

    private_scalar: Annotated[
        str,
        Doc("A number that clients report, such as 'loss', whose noisy mean is released beside."),
    ] = ""
    private_scalar_high: Annotated[
        float,
        Needs("private-scalar"),
        Gt(0),
        Doc("The largest value of that number; larger ones are clamped to it."),
    ] = 1.0
    private_scalar_fraction: Annotated[
        float,
        Needs("private-scalar"),
        Ge(0),
        Lt(1),
        Doc("What it takes of the privacy budget; the update has the rest."),
    ] = 0.1


@dataclass(frozen=True, init=False)
class NoiseSection(Choice, table="noise"):
    """Kind and amount of a release's noise, and the privacy that it must give."""

    filled: ClassVar[tuple[str, ...]] = ("multiplier", "hardened", "participation")
    name: Annotated[str, Doc("What is added to the sum.")] = "independent"
    multiplier: Annotated[
        Multiplier, Doc("Standard deviation of the noise on the sum, over C; 0.0 for no noise.")
    ] = None
    target_epsilon: Annotated[
        TargetEpsilon, Doc("In its place: the epsilon that all rounds together may cost.")
    ] = None
    max_epsilon: Annotated[
        float | None,
        OUTSIDE_RELEASE,
        Doc("A budget: the run ends before its epsilon exceeds it, and keeps the model."),
    ] = None
    cohort_size: Annotated[
        int,
        Ge(0),
        Doc(
            "A larger cohort, whose noise on the mean a simulation adds in place of its own "
            "cohort's: the multiplier is of that; less noise is added here, and charged. 0 for no."
        ),
    ] = 0
    cohort_population: Annotated[
        int,
        Ge(0),
        Doc("The clients that such a cohort would be drawn from; 0 for partition.clients."),
    ] = 0
    delta: Annotated[
        float, Ge(1e-100), Lt(1), Doc("Of every epsilon; below one over the population.")
    ] = 1e-5
    entropy: Annotated[
        Literal["", "config", "system"],
        Doc(
            "Where noise, cohorts and batches come from: the seed, so that runs repeat, or the "
            "operating system, as real clients need; empty for system in a deployment that draws "
            "noise, and config elsewhere."
        ),
    ] = ""
    placement: Annotated[
        Literal["server", "client"],
        Doc("Who adds the noise: the server to the sum, or every client its share of it."),
    ] = "server"
    hardened: Annotated[
        bool, Doc("Draw noise so that its last bits tell nothing; slower, and right for real data.")
    ] = True
    ledger_key: Annotated[
        str,
        OUTSIDE_RELEASE,
        Doc("A file with the private key that signs the ledger; empty for no signature."),
    ] = ""

    @property
    def adds_noise(self) -> bool:
        """Whether the config asks for any noise."""
        return self.target_epsilon is not None or bool(self.multiplier)


@dataclass(frozen=True, init=False)
class SecAggSection(ConfigTable, table="secagg"):
    """Secure aggregation: the server learns only the sum of clients' noisy shares."""

    threshold: Annotated[
        int,
        Ge(0),
        Doc(
            "The fewest clients in a sum; with fewer a round is lost, and charged nevertheless. 0 "
            "for no secure aggregation."
        ),
    ] = 0
    colluders: Annotated[
        int,
        Ge(0),
        Doc(
            "The most clients that give the server all they know: only the noise of threshold "
            "minus colluders clients is counted on."
        ),
    ] = 0
    observer: Annotated[
        Literal["server", "outsider"],
        Doc(
            "The adversary: the server, which knows the sampled clients, so that sampling "
            "amplifies nothing, or an outsider, who sees the models only."
        ),
    ] = "server"
    simulate: Annotated[
        bool,
        OUTSIDE_RELEASE,
        Doc("Whether engine 'local' sends masked messages too, not the same shares without masks."),
    ] = False


@dataclass(frozen=True, init=False)
class PrivacySection(ConfigTable, table="privacy"):
    """What the privacy statement reports in addition to the guarantee of one client."""

    group: Annotated[
        int,
        OUTSIDE_RELEASE,
        Ge(1),
        Le(1000),
        Doc(
            "The most clients that one person owns: the statement says what that person is "
            "promised too. Budgets and targets stay those of one client."
        ),
    ] = 1
    selection: Annotated[
        Literal["", "logarithmic", "geometric", "poisson"],
        OUTSIDE_RELEASE,
        Doc(
            "For the best of a random number of runs, the others of which stay secret: the "
            "distribution of that number. `fedsim sweep --select` sets it; empty for other runs."
        ),
    ] = ""
    selection_mean: Annotated[
        float, OUTSIDE_RELEASE, Gt(1), Le(1e6), Doc("The mean of that number.")
    ] = 2.0


@dataclass(frozen=True, init=False)
class ClientMechanismSection(BoundingSection, table="client.mechanism"):
    """How an example's gradient is bounded, in a client with example-level privacy."""

    filled: ClassVar[tuple[str, ...]] = ("weighting",)


@dataclass(frozen=True, init=False)
class ClientNoiseSection(Choice, table="client.noise"):
    """The noise on a client's sums of per-example gradients."""

    filled: ClassVar[tuple[str, ...]] = ("multiplier", "hardened", "participation")
    name: Annotated[
        str,
        Doc(
            "What is added to each sum: 'independent', or 'lambda-cgd', 'bisr' or 'tree', which "
            "are correlated over the steps of a client's round and need shuffled passes."
        ),
    ] = "independent"
    multiplier: Annotated[
        Multiplier, Doc("Standard deviation of the noise on a sum of gradients, over C.")
    ] = None
    target_epsilon: Annotated[
        TargetEpsilon,
        Doc("In its place: the epsilon of the client that pays most, over all rounds."),
    ] = None
    max_epsilon: Annotated[
        float | None,
        OUTSIDE_RELEASE,
        Doc("A budget: the run ends before any client's epsilon exceeds it."),
    ] = None
    delta: Annotated[
        float, Ge(1e-100), Lt(1), Doc("Of epsilon; below one over a client's examples.")
    ] = 1e-5
    sampling: Annotated[
        Literal["poisson", "shuffle"],
        Doc("An independent Poisson batch for each step, or shuffled passes over the examples."),
    ] = "poisson"
    hardened: Annotated[
        bool, Doc("Draw noise so that its last bits tell nothing; slower, and right for real data.")
    ] = True
    chunk: Annotated[
        int,
        OUTSIDE_RELEASE,
        Ge(0),
        Doc(
            "Rows of a batch that are bounded at a time; 0 to choose. It changes last digits only."
        ),
    ] = 0


Ends = tuple[float, float]

_RANGE = re.compile(r"([^()\s]+) *\(([^(),]+),([^(),]+)\)")


def read_ranges(text: str) -> dict[str, Ends]:
    """Parse ranges such as ``"loss(0,5), rmse(0,10)"``: lower and upper ends by name.

    Raises
    ------
    NotAllowedError
        If the text has another form, or a range is empty.
    """
    return dict(map(_read_range, filter(None, split_top_level(text))))


def _read_range(part: str) -> tuple[str, Ends]:
    written = _RANGE.fullmatch(part)
    name, *ends = written.groups() if written else ("", "nan", "nan")
    try:
        low, high = map(float, ends)
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise NotAllowedError(
            "names with their ranges, the smaller number first, such as 'loss(0,5), rmse(0,10)'"
        )
    return name, (low, high)


def _evenly(value: object) -> str:
    """Ranges in a canonical form, so that equal ranges are equal strings."""
    if not isinstance(value, str):
        raise NotAllowedError("a string")
    return ", ".join(
        f"{name}({low:g},{high:g})" for name, (low, high) in read_ranges(value).items()
    )


@dataclass(frozen=True, init=False)
class EvaluateSection(ConfigTable, table="evaluate"):
    """How often and by whom the model is evaluated, and which metrics are released."""

    every: Annotated[
        int, Ge(0), Doc("The model is tested every so many rounds, and in the last; 0 for never.")
    ] = 1
    clients_every: Annotated[
        int,
        Ge(0),
        Doc("Clients test it on their own examples every so many rounds; 0 for never."),
    ] = 0
    fraction: Annotated[
        float, Needs("clients-every"), Gt(0), Le(1), Doc("The share of clients that test it.")
    ] = 1.0
    private: Annotated[
        bool,
        Doc(
            "Whether their metrics are released as noisy means over clients: an evaluation is one "
            "more release of a run with client-level privacy, charged to its ledger and budget."
        ),
    ] = False
    multiplier: Annotated[
        Multiplier,
        Needs("private"),
        Doc(
            "Noise multiplier of such a release, whose metrics are bounded together; if unset, "
            "with noise.target-epsilon, it follows from target-share."
        ),
    ] = None
    target_share: Annotated[
        float,
        Needs("private"),
        Gt(0),
        Lt(1),
        Doc(
            "The share of noise.target-epsilon that all these releases would cost alone; the rest "
            "is for the rounds."
        ),
    ] = 0.1
    ranges: Annotated[
        str,
        Needs("private"),
        Text(_evenly, str),
        Doc(
            "Ranges to which metrics are clamped, such as 'loss(0,5)'. Metrics between 0 and 1 "
            "have that range; a metric without a range is not released."
        ),
    ] = ""
    quantiles: Annotated[
        bool,
        Needs("private"),
        Doc("Whether quantiles over clients are released too: p10, median and p90."),
    ] = False
    unprotected: Annotated[
        bool, Doc("Allow metrics of clients' data, without noise, in a private run.")
    ] = False
