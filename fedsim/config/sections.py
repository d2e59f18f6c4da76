"""The tables of a config about data, model and server: what each key is, and what it means.

What a table's own thing brings along (a model its widths, an algorithm its rates) stands in that
thing's file.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fedsim import registry
from fedsim.config.bounding import BoundingSection
from fedsim.config.choices import Choice, unknown
from fedsim.config.keys import (
    Maybe,
    Multiplier,
    NamesOf,
    Range,
    Section,
    TargetEpsilon,
    setting,
)
from fedsim.config.options import checked
from fedsim.config.values import apart, read_named
from fedsim.settings import Doc

__all__ = [
    "CohortSection",
    "DataSection",
    "DevicesSection",
    "MechanismSection",
    "ModelSection",
    "NoiseSection",
    "PartitionSection",
    "ServerSection",
    "TaskSection",
]


def _evenly(words: str) -> str:
    """As one writes them, so that equal ones are equal."""
    return ", ".join(filter(None, apart(words)))


def _joined(value: Any) -> Any:
    """A list of words as a config writes it: with commas between."""
    is_words = isinstance(value, list) and all(isinstance(word, str) for word in value)
    return ", ".join(value) if is_words else value


class DataSection(Choice):
    """Which examples there are."""

    table: ClassVar[str] = "data"
    kind: ClassVar[str] = "data"
    filled: ClassVar[tuple[str, ...]] = ("path", "directory", "download", "normalize")
    name: Annotated[
        str,
        Doc(
            "The data set: `digits`, which comes along, `mnist`, `fashion-mnist`, `cifar10`, "
            "`cifar100`, or a path of your own: an .npz, or a folder of .npy files (which stays in "
            "its files) or one that `datasets` has saved."
        ),
    ] = "digits"
    dir: Annotated[str, Doc("The folder in which data sets lie.")] = setting(
        "data", affects_release=False
    )
    download: Annotated[bool, Doc("Whether a data set that is missing there may be fetched.")] = (
        setting(False, affects_release=False)
    )
    normalize: Annotated[
        bool,
        Doc("Whether inputs are normalised by the data set's published mean and deviation."),
    ] = False
    train: Annotated[
        Range,
        Doc("Which training examples there are, as start:stop; '10000:' leaves out 10,000."),
    ] = ""
    test: Annotated[Range, Doc("Which test examples there are, in the same way.")] = setting(
        "", affects_release=False
    )
    validation: Annotated[
        float,
        Doc(
            "Training examples that nobody trains on, to choose settings and rounds by: a share "
            "below 1, or their number; 0 for none."
        ),
    ] = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _count_is_whole(self) -> DataSection:
        self.require(
            self.validation < 1 or self.validation == int(self.validation),
            "data.validation",
            self.validation,
            "a share below 1, or a whole number of examples",
        )
        return self

    @classmethod
    def registered(cls, name: str) -> str:
        """A name that is no data set's is a path to files."""
        return name if ":" in name or name in registry.names("data") else "files"


class PartitionSection(Choice):
    """Whose examples they are."""

    table: ClassVar[str] = "partition"
    kind: ClassVar[str] = "partition"
    filled: ClassVar[tuple[str, ...]] = ("clients", "seed")
    name: Annotated[str, Doc("How the training examples are dealt to clients.")] = "iid"
    clients: Annotated[
        int, Doc("How many clients there are: the population, a declared public number.")
    ] = Field(100, ge=1, le=10_000_000)
    max_examples: Annotated[
        int, Doc("How many examples a client keeps of those dealt to it; 0 for all.")
    ] = Field(0, ge=0)


class ModelSection(Choice):
    """What is trained."""

    table: ClassVar[str] = "model"
    kind: ClassVar[str] = "model"
    name: Annotated[str, Doc("The model.")] = "softmax"
    dtype: Annotated[
        Literal["float32", "float64"], Doc("Of its parameters; float64 is for exact comparisons.")
    ] = "float32"
    fix: Annotated[
        bool,
        Doc(
            "Whether GroupNorm takes the place of BatchNorm, which mixes examples: Opacus's cure, "
            "named layer by layer in the summary."
        ),
    ] = False
    trainable: Annotated[
        str, Doc("Shell patterns of the parameters that are trained, such as 'fc*'; empty for all.")
    ] = ""
    weights: Annotated[str, Doc("A .safetensors file whose parameters the model starts from.")] = ""
    weights_for: Annotated[
        str, Doc("Shell patterns of the parameters that come from there; empty for all.")
    ] = ""
    personal: Annotated[
        str,
        Doc(
            "Shell patterns of the parameters that each client keeps to itself and evaluates with, "
            "such as 'head.*'; empty for none."
        ),
    ] = ""

    @model_validator(mode="after")
    def _weights_come_from_a_file(self) -> ModelSection:
        self.require(
            bool(self.weights) or not self.weights_for,
            "model.weights-for",
            self.weights_for,
            "unset without model.weights, the file that these parameters would come from",
        )
        return self


class TaskSection(Choice):
    """What is learnt: the loss, and what is measured."""

    table: ClassVar[str] = "task"
    kind: ClassVar[str] = "loss"
    selector: ClassVar[str] = "loss"
    loss: Annotated[str, Doc("The loss of an example.")] = "cross-entropy"
    metrics: Annotated[
        str,
        BeforeValidator(_joined),
        AfterValidator(_evenly),
        NamesOf("metric"),
        Doc(
            "What is measured besides the loss, with commas between and options in brackets, such "
            "as 'accuracy, top-k(k=3)'."
        ),
    ] = "accuracy"

    def named_metrics(self) -> list[tuple[str, dict[str, Any]]]:
        """Names of the metrics, each with the options that it is given."""
        return read_named(self.metrics, "task.metrics")

    @model_validator(mode="after")
    def _metrics_are_known(self) -> TaskSection:
        for name, options in self.named_metrics():
            if ":" in name:
                continue  # the user's own is looked at where it is made
            if name not in registry.names("metric"):
                raise unknown("metric", name, "task.metrics")
            thing = registry.find("metric", name, "task.metrics")
            if isinstance(thing, type):
                checked(name, thing, options, f"task.metrics.{name}")
        return self


class MechanismSection(BoundingSection):
    """How an update is bounded before it enters the one noisy sum."""

    table: ClassVar[str] = "mechanism"
    private_scalar: Annotated[
        str,
        Doc("A number that clients report, such as 'loss', whose noisy mean is released beside."),
    ] = ""
    private_scalar_high: Annotated[
        float, Doc("The largest value of that number; larger ones are clamped to it.")
    ] = Field(1.0, gt=0)
    private_scalar_fraction: Annotated[
        float, Doc("What it takes of the privacy budget; the update has the rest.")
    ] = Field(0.1, ge=0, lt=1)


class CohortSection(Choice):
    """Who takes part in a round."""

    table: ClassVar[str] = "cohort"
    kind: ClassVar[str] = "cohort"
    filled: ClassVar[tuple[str, ...]] = ("population", "adjacency")
    name: Annotated[str, Doc("How the clients of a round are sampled.")] = "full"


class NoiseSection(Section):
    """How much noise a release carries, and what privacy it must give."""

    table: ClassVar[str] = "noise"
    multiplier: Annotated[
        Multiplier, Doc("Standard deviation of the noise on the sum, over C; 0.0 for no noise.")
    ] = None
    target_epsilon: Annotated[
        TargetEpsilon, Doc("In its place: the epsilon that all rounds together may cost.")
    ] = None
    max_epsilon: Annotated[
        Maybe, Doc("A budget: the run ends before its epsilon exceeds it, and keeps the model.")
    ] = setting(None, affects_release=False)
    cohort_size: Annotated[
        int,
        Doc(
            "A larger cohort, whose noise on the mean a simulation adds in place of its own "
            "cohort's: the multiplier is of that; less noise is added here, and charged. 0 for no."
        ),
    ] = Field(0, ge=0)
    cohort_population: Annotated[
        int,
        Doc("The clients that such a cohort would be drawn from; 0 for partition.clients."),
    ] = Field(0, ge=0)
    delta: Annotated[float, Doc("Of every epsilon; below one over the population.")] = Field(
        1e-5, ge=1e-100, lt=1
    )
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
        str, Doc("A file with the private key that signs the ledger; empty for no signature.")
    ] = setting("", affects_release=False)

    @model_validator(mode="after")
    def _one_amount(self) -> NoiseSection:
        self.require(
            self.multiplier is None or self.target_epsilon is None,
            "noise.multiplier",
            self.multiplier,
            f"unset while noise.target-epsilon = {self.target_epsilon}, which determines it",
        )
        self.require(
            self.max_epsilon is None or self.max_epsilon > 0,
            "noise.max-epsilon",
            self.max_epsilon,
            "greater than 0",
        )
        return self

    @model_validator(mode="after")
    def _larger_cohort(self) -> NoiseSection:
        self.require(
            not self.cohort_size or bool(self.multiplier),
            "noise.cohort-size",
            self.cohort_size,
            "0 unless noise.multiplier is above 0: a larger cohort's noise is that multiplier's, "
            "and a target epsilon is of the noise really added",
        )
        self.require(
            bool(self.cohort_size) or not self.cohort_population,
            "noise.cohort-population",
            self.cohort_population,
            "0 unless noise.cohort-size is set",
        )
        return self

    @property
    def adds_noise(self) -> bool:
        """Whether any noise is asked for."""
        return self.target_epsilon is not None or bool(self.multiplier)


class PrivacySection(Section):
    """What is said of privacy beside what one client is promised."""

    table: ClassVar[str] = "privacy"
    group: Annotated[
        int,
        Doc(
            "The most clients that one person owns: the statement says what that person is "
            "promised too. Budgets and targets stay those of one client."
        ),
    ] = setting(1, affects_release=False, ge=1, le=1000)


class ServerSection(Choice):
    """What the server does with the noisy mean update."""

    table: ClassVar[str] = "server"
    kind: ClassVar[str] = "server"
    selector: ClassVar[str] = "optimizer"
    optimizer: Annotated[
        str,
        Doc(
            "What steps along the mean update; 'sgd' at lr = 1 just adds it (FedAvg). A strategy "
            "of Flower's that refines the mean will do: 'flwr.serverapp.strategy:FedProx', "
            "where that module is allowed."
        ),
    ] = "sgd"
    schedule: Annotated[
        str,
        Doc(
            "What lr is multiplied by, release by release, such as 'warm-up(length=10)' or "
            "'cosine(length=100)'; empty for 1."
        ),
    ] = ""
    max_failed_rounds: Annotated[
        int,
        Doc("Rounds in a row without a usable reply after which a run without privacy gives up."),
    ] = setting(3, affects_release=False, ge=1)


class DevicesSection(Section):
    """What devices clients are, in a simulation: drawn from the seed, never from data."""

    table: ClassVar[str] = "devices"
    availability: Annotated[
        float, Doc("The probability that a device is there in a round, each round anew.")
    ] = Field(1.0, gt=0, le=1)
    trace: Annotated[
        str,
        Doc(
            "In its place an .npy file of truth values, rounds times clients, gone through again "
            "and again; who is drawn and not there counts as missing."
        ),
    ] = ""
    dropout: Annotated[
        float, Doc("The probability that a device that is there does not reply, each round anew.")
    ] = Field(0.0, ge=0, lt=1)
    seconds_per_example: Annotated[float, Doc("Of the median device's training; 0 for none.")] = (
        Field(0.0, ge=0)
    )
    bandwidth: Annotated[
        float, Doc("Of the median device, in megabits a second each way; 0 for no limit.")
    ] = Field(0.0, ge=0)
    spread: Annotated[
        float, Doc("Standard deviation, over devices, of the logarithms of these two.")
    ] = Field(0.0, ge=0, le=10)
    deadline: Annotated[
        float, Doc("Seconds of a device's clock after which its reply does not count; 0 for none.")
    ] = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _one_word_on_who_is_there(self) -> DevicesSection:
        self.require(
            not self.trace or self.availability == 1,
            "devices.availability",
            self.availability,
            f"unset while devices.trace = '{self.trace}' says who is there",
        )
        clocked = self.seconds_per_example or self.bandwidth
        for key, value in (("deadline", self.deadline), ("spread", self.spread)):
            self.require(
                bool(clocked) or not value,
                f"devices.{key}",
                value,
                "0 while devices take no time: devices.seconds-per-example and devices.bandwidth "
                "say how much",
            )
        return self
