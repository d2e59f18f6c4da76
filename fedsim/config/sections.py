"""The tables of a run's config: what each key of theirs is, and what it means.

What a table's own thing brings along (a model its widths, an algorithm its rates) stands in that
thing's file.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from fedsim import registry
from fedsim.config.choices import Choice
from fedsim.config.keys import (
    Maybe,
    Multiplier,
    Range,
    Section,
    TargetEpsilon,
    Work,
    only,
    setting,
)
from fedsim.settings import Doc

__all__ = [
    "CheckpointSection",
    "ClientMechanismSection",
    "ClientNoiseSection",
    "ClientSection",
    "CohortSection",
    "DataSection",
    "DevicesSection",
    "EngineSection",
    "EvaluateSection",
    "LogSection",
    "MechanismSection",
    "ModelSection",
    "NoiseSection",
    "PartitionSection",
    "ServerSection",
    "StopSection",
]


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
    loss: Annotated[
        str, Doc("The loss of an example: of `fedsim config list loss`, or module:name.")
    ] = "cross-entropy"
    metrics: Annotated[
        str,
        Doc(
            "What is measured besides the loss, with commas between: of `fedsim config list "
            "metric`, or module:name."
        ),
    ] = "accuracy"

    @model_validator(mode="after")
    def _weights_come_from_a_file(self) -> ModelSection:
        self.require(
            bool(self.weights) or not self.weights_for,
            "model.weights-for",
            self.weights_for,
            "unset without model.weights, the file that these parameters would come from",
        )
        return self


class _Bounding(Choice):
    """How rows are bounded before they enter one noisy sum, at either level."""

    kind: ClassVar[str] = "mechanism"
    name: Annotated[str, Doc("The bound; 'none' for no privacy.")] = "none"
    per_layer: Annotated[
        bool, Doc("Whether every layer is bounded, summed and noised on its own.")
    ] = False

    @property
    def gives_none(self) -> bool:
        """Whether it is a bound that protects nobody, whatever the noise."""
        return self.is_robust or bool(getattr(self, "unsafe_non_private_raw_statistics", False))

    @property
    def is_robust(self) -> bool:
        """Whether it is no bound of rows in a sum, but a mean that needs them all."""
        if self.name not in registry.names(self.kind):
            return False
        thing = registry.find(self.kind, self.name, f"{self.table}.name")
        return bool(getattr(thing, "protects_nobody", False))


class MechanismSection(_Bounding):
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


class ClientMechanismSection(_Bounding):
    """How an example's gradient is bounded, in a client with example-level privacy."""

    table: ClassVar[str] = "client.mechanism"
    filled: ClassVar[tuple[str, ...]] = ("weighting",)


class ClientNoiseSection(Section):
    """The noise on a client's sums of per-example gradients."""

    table: ClassVar[str] = "client.noise"
    multiplier: Annotated[
        Multiplier, Doc("Standard deviation of the noise on a sum of gradients, over C.")
    ] = None
    target_epsilon: Annotated[
        TargetEpsilon,
        Doc("In its place: the epsilon of the client that pays most, over all rounds."),
    ] = None
    max_epsilon: Annotated[
        Maybe, Doc("A budget: the run ends before any client's epsilon exceeds it.")
    ] = setting(None, affects_release=False)
    delta: Annotated[float, Doc("Of epsilon; below one over a client's examples.")] = Field(
        1e-5, ge=1e-100, lt=1
    )
    sampling: Annotated[
        Literal["poisson", "shuffle"],
        Doc("Batches drawn anew for each step, or a shuffled pass over the examples."),
    ] = "poisson"
    hardened: Annotated[
        bool, Doc("Draw noise so that its last bits tell nothing; slower, and right for real data.")
    ] = True
    chunk: Annotated[
        int, Doc("Rows of a batch that are bounded at a time; 0 to choose. It changes no result.")
    ] = setting(0, affects_release=False, ge=0)


class ClientSection(Choice):
    """What a client does with its examples."""

    table: ClassVar[str] = "client"
    kind: ClassVar[str] = "client"
    name: Annotated[str, Doc("The local algorithm.")] = "sgd"
    batch_size: Annotated[int, Doc("Examples of a local step; 0 for all that the client has.")] = (
        Field(10, ge=0)
    )
    epochs: Annotated[int, Doc("Passes over the client's examples in a round.")] = Field(
        1, ge=0, le=10_000
    )
    steps: Annotated[
        int, Doc("In place of epochs: local steps in a round, the same for every client.")
    ] = Field(0, ge=0, le=1_000_000)
    work: Annotated[
        Work,
        Doc(
            "Each client's own number of epochs, or of steps where those are set, in its place: "
            "whole(1,5) draws it from the seed, a file has one a line; empty for the same for all."
        ),
    ] = ""
    proximal: Annotated[
        float, Doc("FedProx's mu: how strongly a client is pulled towards the global model.")
    ] = Field(0.0, ge=0)
    max_grad_norm: Annotated[
        float,
        Doc(
            "The largest L2 norm of a batch's gradient, longer ones are shortened to it; 0 for "
            "any. It protects nobody: mechanism and client.mechanism do."
        ),
    ] = Field(0.0, ge=0)
    compression: Annotated[
        str,
        Doc(
            "What of an update is sent: 'top-k(0.01)', the largest of its coordinates, or "
            "'bits(8)' a coordinate; clients keep what is left out for the next round. Empty for "
            "all."
        ),
    ] = ""
    state: Annotated[
        Literal["reset", "client", "server"],
        Doc(
            "What outlives a round of an algorithm's state: nothing, what each client keeps, or "
            "the mean that the server sends."
        ),
    ] = "reset"
    state_dir: Annotated[
        str, Doc("The folder in which clients keep that, and their ledgers; empty for the run's.")
    ] = setting("", affects_release=False)
    path: Annotated[
        Literal["auto", "plain", "func", "stacked", "layered"],
        Doc("How gradients of a block of clients are computed; all agree to rounding."),
    ] = setting("auto", affects_release=False)
    block_size: Annotated[
        int, Doc("Clients that are trained at a time; 0 to choose. It changes no result.")
    ] = setting(0, affects_release=False, ge=0)
    mechanism: ClientMechanismSection = ClientMechanismSection()
    noise: ClientNoiseSection = ClientNoiseSection()

    @property
    def private(self) -> bool:
        """Whether clients claim privacy for their examples."""
        return self.mechanism.name != "none" and not self.mechanism.gives_none

    @model_validator(mode="after")
    def _epochs_or_steps(self) -> ClientSection:
        self.require(
            bool(self.epochs or self.steps),
            "client.epochs",
            self.epochs,
            "at least 1 unless client.steps is set",
        )
        self.require(
            not self.steps or self.epochs <= 1,
            "client.epochs",
            self.epochs,
            f"unset while client.steps = {self.steps}",
        )
        return self

    @model_validator(mode="after")
    def _example_level(self) -> ClientSection:
        noise, bounded = self.noise, self.mechanism.name != "none"
        self.require(
            noise.max_epsilon is None or (self.private and noise.max_epsilon > 0),
            "client.noise.max-epsilon",
            noise.max_epsilon,
            "greater than 0, and unset where clients do not protect their examples",
        )
        self.require(
            not (bounded and self.work),
            "client.work",
            self.work,
            f"empty while client.mechanism.name = '{self.mechanism.name}': a client's number of "
            "noisy steps is a declared constant of the plan, the same for all",
        )
        self.require(
            not (bounded and self.max_grad_norm),
            "client.max-grad-norm",
            self.max_grad_norm,
            f"0 while client.mechanism.name = '{self.mechanism.name}', which bounds the "
            "gradient of each example",
        )
        self.require(
            not self.mechanism.is_robust,
            "client.mechanism.name",
            self.mechanism.name,
            "a bound of an example's gradient, such as 'clipping': a robust mean of gradients "
            "protects nobody",
        )
        amounts = (noise.multiplier, noise.target_epsilon)
        self.require(
            bounded or amounts == (None, None),
            "client.mechanism.name",
            "none",
            "set, to 'clipping' for one, while client.noise says how much noise there is",
        )
        self.require(
            not bounded or amounts.count(None) == 1,
            "client.noise.multiplier",
            "" if noise.multiplier is None else noise.multiplier,
            "set, or client.noise.target-epsilon, and not both, while client.mechanism.name = "
            f"'{self.mechanism.name}'",
        )
        return self


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
            "Where noise and cohorts come from: the seed, so that runs repeat, or the operating "
            "system, as real clients need; empty for system in deployment and config elsewhere."
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


class ServerSection(Choice):
    """What the server does with the noisy mean update."""

    table: ClassVar[str] = "server"
    kind: ClassVar[str] = "server"
    selector: ClassVar[str] = "optimizer"
    optimizer: Annotated[
        str, Doc("What steps along the mean update; 'sgd' at lr = 1 just adds it (FedAvg).")
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


class EvaluateSection(Section):
    """How often the model is looked at."""

    table: ClassVar[str] = "evaluate"
    every: Annotated[
        int, Doc("The model is tested every so many rounds, and in the last; 0 for never.")
    ] = Field(1, ge=0)
    clients_every: Annotated[
        int, Doc("Clients test it on their own examples every so many rounds; 0 for never.")
    ] = Field(0, ge=0)
    fraction: Annotated[float, Doc("The share of clients that do.")] = Field(1.0, gt=0, le=1)
    unprotected: Annotated[
        bool, Doc("Allow what clients report of their data in a private run: it has no noise.")
    ] = False


class CheckpointSection(Section):
    """When a run keeps what it has reached, to go on from there."""

    table: ClassVar[str] = "checkpoint"
    every: Annotated[int, Doc("Rounds between two checkpoints; 0 for none at all.")] = Field(
        10, ge=0
    )
    seconds: Annotated[
        float, Doc("Seconds after which one is due in any round; 0 to count rounds only.")
    ] = Field(600.0, ge=0)
    best: Annotated[
        str, Doc("A column of the metrics whose best round's model is kept as well.")
    ] = ""
    resume: Annotated[
        bool,
        Doc("Go on with the last run of this name on the machine of a federation's SuperLink."),
    ] = False


class StopSection(Section):
    """When a run ends before its last round."""

    table: ClassVar[str] = "stop"
    metric: Annotated[
        str, Doc("The column of the metrics that must improve for a run to go on; empty for none.")
    ] = ""
    patience: Annotated[int, Doc("Rounds without an improvement after which the run ends.")] = (
        Field(10, ge=1)
    )


class LogSection(Section):
    """Where a run's rows go as they come, beside its directory."""

    table: ClassVar[str] = "log"
    to: Annotated[
        str,
        Doc("tensorboard, mlflow, wandb, or several with commas: extras of fedsim."),
    ] = ""


class EngineSection(Section):
    """Where the clients run."""

    table: ClassVar[str] = "engine"
    name: Annotated[
        Literal["local", "ray", "simulation", "deployment"],
        Doc(
            "This machine's processes, Ray workers, Flower's virtual clients, or real SuperNodes; "
            "the numbers are the same."
        ),
    ] = "local"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Doc("Where tensors are; auto takes a GPU if there is one.")
    ] = "auto"
    workers: Annotated[
        int,
        Doc(
            "Processes that train; 0 for as many as help: on 'ray' one a core or GPU, on 'local' "
            "what a fixed rule of model, cohort and cores says."
        ),
    ] = only("local", "ray", default=0, ge=0, le=10_000)
    address: Annotated[str, Doc("Of a Ray cluster; empty starts one here.")] = only(
        "ray", default=""
    )
    cpus_per_worker: Annotated[float, Doc("Cores that Ray keeps for a worker or client.")] = only(
        "ray", "simulation", default=1.0, gt=0
    )
    gpus_per_worker: Annotated[
        float, Doc("GPUs, or shares of one, that Ray keeps for a worker or client.")
    ] = only("ray", "simulation", default=0.0, ge=0)
    federation: Annotated[
        str, Doc("The folder of a federation that is up; empty brings one up for this run.")
    ] = only("deployment", default="")
    timeout: Annotated[float, Doc("Seconds that a round may take.")] = Field(3600.0, gt=0, le=1e8)
    node_timeout: Annotated[float, Doc("Seconds to wait for nodes to be there.")] = Field(
        60.0, gt=0, le=1e8
    )
