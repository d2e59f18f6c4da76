"""Config tables on data, model, task, clients and server, and on a run's execution.

Settings of the thing that a table names (a model's widths, an algorithm's rates) are declared in
that thing's file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from fedsim import registry
from fedsim.config.devices import Work
from fedsim.config.privacy_sections import ClientMechanismSection, ClientNoiseSection
from fedsim.config.tables import (
    OUTSIDE_RELEASE,
    ConfigTable,
    NamesOf,
    Needs,
    ObjectTable,
    Refusals,
    WithNames,
)
from fedsim.config.values import read_named, split_top_level
from fedsim.keywords import arguments_of
from fedsim.models.hugging_face import PREFIX, kind_of
from fedsim.privacy.exclusions import check_bounds_rows, check_private_work
from fedsim.privacy.local_work import LocalWork
from fedsim.settings import Constraint, Ge, Gt, Le, NamesPath, NotAllowedError, Text

Range: TypeAlias = Annotated[
    str,
    Constraint(
        lambda text: re.fullmatch(r"([0-9]{0,18}:[0-9]{0,18})?", text, re.ASCII) is not None,
        "a range such as '10000:' or ':10000', or ''",
    ),
]
"""Type of a range of examples: ``10000:``, ``:500``, or empty for all."""


def _read_metrics(value: Any) -> str:
    """Read metric names, from a list or separated by commas, and return them in canonical form.

    Raises
    ------
    FedsimError
        If a name is unknown, or has options that it does not take. A user's own metrics are
        checked later, when they are made.
    """
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        value = ", ".join(value)
    if not isinstance(value, str):
        raise NotAllowedError("a string")
    for name, options in read_named(value, "task.metrics"):
        if ":" in name:
            continue
        if name not in registry.names("metric"):
            raise registry.unknown_name_error("metric", name, "task.metrics")
        metric = registry.find("metric", name, "task.metrics")
        if isinstance(metric, type):
            arguments_of(metric, name, options, f"task.metrics.{name}")
    return ", ".join(filter(None, split_top_level(value)))


@dataclass(frozen=True, init=False)
class DataSection(ObjectTable, table="data"):
    """The data set, and which of its examples are used."""

    derived_fields: ClassVar[tuple[str, ...]] = ("path", "directory", "download", "normalize")
    wrong_key_hint: ClassVar[str] = (
        " In Python it is part of data= itself: an entry 'classes': 10, or from_table(columns=)."
    )
    name: Annotated[
        str,
        NamesPath(
            is_name=lambda name: name.startswith(PREFIX) or DataSection.registered(name) != "files"
        ),
    ] = "digits"
    """The data set: `digits`, which is part of fedsim, another that `fedsim config list data`
    names (`mnist`, `cifar10`, `femnist`), 'hf:owner/name' of the Hugging Face Hub in data.dir, or a
    path of your own: an .npz, a .csv, or a folder with .npy files (which are memory-mapped), with
    train.csv and test.csv, with parquet files, or with what `datasets` has saved."""
    dir: Annotated[str, OUTSIDE_RELEASE, NamesPath("location")] = "data"
    """The folder that holds data sets."""
    download: Annotated[bool, OUTSIDE_RELEASE] = False
    """Whether a data set that is missing from data.dir may be downloaded."""
    normalize: bool = False
    """Whether inputs are normalised by the data set's published mean and standard deviation, or by
    those that its files or a Python object, data=, have. A table's numbers without a declared
    range are normalised by those of its training rows, which a private run refuses."""
    train: Range = ""
    """A range of the training examples to use, as start:stop; '10000:' leaves out the first
    10,000."""
    test: Annotated[Range, OUTSIDE_RELEASE] = ""
    """A range of the test examples to use, as in data.train."""
    validation: Annotated[
        float,
        Constraint(
            lambda n: 0 <= n < 1 or n == int(n) > 0, "0, a share below 1, or a whole number"
        ),
    ] = 0.0
    """Training examples held out for validation, to choose settings and rounds by: a share below 1,
    or a number; 0 for none."""

    @classmethod
    def registered(cls, name: str) -> str:
        """A name that is not a data set's is of files: a path, or a name of the Hub."""
        own = ":" in name and not name.startswith(PREFIX)
        return name if own or name in registry.names("data") else "files"


@dataclass(frozen=True, init=False)
class PartitionSection(ObjectTable, table="partition"):
    """How examples are divided among clients."""

    derived_fields: ClassVar[tuple[str, ...]] = ("clients", "seed")
    name: str = "iid"
    """How the training examples are split among clients."""
    clients: Annotated[int, Ge(1), Le(10_000_000)] = 100
    """How many clients there are: the population, a declared public number."""
    max_examples: Annotated[int, Ge(0)] = 0
    """The most examples that a client keeps; 0 for all."""


@dataclass(frozen=True, init=False)
class ModelSection(ObjectTable, table="model"):
    """The model that is trained."""

    derived_fields: ClassVar[tuple[str, ...]] = ("name",)
    name: Annotated[
        str, NamesPath(is_name=lambda name: not name.startswith(PREFIX), prefix=PREFIX)
    ] = "softmax"
    """The model; 'hf:FOLDER' for one of Hugging Face's transformers from a local folder."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """The number format of the model's parameters; float64 is for exact comparisons. 'bfloat16' is
    for a frozen model under an adapter, which stays in float32."""
    fix: bool = False
    """Whether each BatchNorm, which mixes examples, is replaced by GroupNorm, as Opacus does; the
    summary lists the layers."""
    trainable: str = ""
    """Shell patterns of the parameters that are trained, such as 'fc*'; empty for all, or for none
    besides an adapter's."""
    weights: Annotated[str, NamesPath("training")] = ""
    """A .safetensors file whose parameters the model starts from."""
    weights_for: Annotated[str, Needs("weights")] = ""
    """Shell patterns of the parameters to load from model.weights; empty for all."""
    example: Annotated[str, NamesPath("training")] = ""
    """A file of two or more public inputs on which the model and the loss are tried in place of
    made-up ones: .npy, .npz for several inputs by name, .csv for a table."""
    personal: str = ""
    """Shell patterns of the parameters that each client keeps to itself and evaluates with, such as
    'head.*'; empty for none."""

    @classmethod
    def registered(cls, name: str) -> str:
        """A name of a folder is that of its kind."""
        return kind_of(name)

    def refusals(self, config: Any) -> Refusals:
        """Personal parameters without clients' evaluations, and trained weights in bfloat16."""
        if self.dtype == "bfloat16" and (config.adapter.name == "none" or self.trainable):
            yield (
                "model.dtype",
                "float32 or float64 unless adapter.name is set and model.trainable is not: weights "
                "that are trained are not kept in bfloat16, in which small updates are lost",
            )
        if self.personal and config.evaluate.every:
            yield (
                "model.personal",
                "unset, or evaluate.every = 0: only clients have the whole model, and evaluate it "
                "with evaluate.clients-every",
            )


@dataclass(frozen=True, init=False)
class AdapterSection(ObjectTable, table="adapter"):
    """An adapter: a few added weights that are trained instead of the model's own."""

    name: str = "none"
    """The adapter. Only its weights, and parameters that model.trainable names, are trained, sent,
    bounded and noised."""
    weights: Annotated[str, NamesPath("training")] = ""
    """A folder in peft's format whose adapter the run starts from; empty for a new one."""

    def refusals(self, config: Any) -> Refusals:
        """Weights of no adapter."""
        if self.weights and self.name == "none":
            yield (
                "adapter.weights",
                "unset while adapter.name = 'none': there is no adapter that would start from it",
            )


@dataclass(frozen=True, init=False)
class TaskSection(ObjectTable, table="task"):
    """The loss, and the metrics of evaluations."""

    kind: ClassVar[str] = "loss"
    selector: ClassVar[str] = "loss"
    loss: str = "cross-entropy"
    """The loss of an example."""
    metrics: Annotated[str, Text(_read_metrics, str), NamesOf("metric")] = "accuracy"
    """The metrics in addition to the loss, separated by commas, with options in brackets:
    'accuracy, top-k(k=3)'."""

    def named_metrics(self) -> list[tuple[str, dict[str, Any]]]:
        """Names of the metrics, each with its options."""
        return read_named(self.metrics, "task.metrics")


@dataclass(frozen=True, init=False, kw_only=True)
class ClientSection(ObjectTable, table="client"):
    """How a client trains on its examples."""

    name: str = "sgd"
    """The local algorithm."""
    batch_size: Annotated[int, Ge(0)] = 10
    """Examples in a local step; 0 for all examples of the client."""
    epochs: Annotated[int, Ge(0), Le(10_000)] = 1
    """Passes over a client's examples in a round."""
    steps: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """In place of epochs: the number of local steps in a round, the same for every client."""
    work: Annotated[Work, NamesPath("training", is_name=lambda text: "(" in text)] = ""
    """A number of epochs (or steps, if those are set) for each client: 'whole(1,5)' draws whole
    numbers by the seed, a file has one a line. Empty for the same number for all."""
    proximal: Annotated[float, Ge(0)] = 0.0
    """FedProx's mu: how strongly a client is pulled towards the global model; where it is above 0,
    a value from the server (Flower's FedProx) replaces it."""
    max_grad_norm: Annotated[float, Ge(0)] = 0.0
    """Gradient clipping: a batch's gradient with a larger L2 norm is scaled down to it; 0 for none.
    This gives no privacy: mechanism and client.mechanism do."""
    state: Literal["reset", "client"] = "reset"
    """The algorithm's state (a momentum, an adaptive rate) between rounds: it is reset, or each
    client keeps its own."""
    # A node's own policy says where its clients' state is.
    state_dir: Annotated[str, OUTSIDE_RELEASE, NamesPath("operator")] = ""
    """The folder for clients' state and ledgers; empty for the run's own directory."""
    path: Literal["auto", "plain", "func", "layered"] = "auto"
    """How gradients of a block of clients are computed. All paths agree up to rounding."""
    kernel: Literal["auto", "eager", "compiled"] = "auto"
    """What the path 'layered' computes with on a CPU: torch's operations, or C kernels that are
    compiled at their first use. Both agree up to rounding."""
    matmul: Literal["float32", "tf32"] = "float32"
    """How a GPU multiplies float32 numbers in local steps: in full, or faster with factors rounded
    to TF32. Bounds, sums and noise are as exact with either."""
    block_size: Annotated[int, OUTSIDE_RELEASE, Ge(0)] = 0
    """How many clients are trained at a time; 0 to choose. It changes no result on a CPU, and only
    the last bits on a GPU."""
    mechanism: ClientMechanismSection
    noise: ClientNoiseSection

    @property
    def private(self) -> bool:
        """Whether clients claim example-level privacy."""
        return self.mechanism.name != "none" and not self.mechanism.gives_no_privacy

    def make_work(self) -> LocalWork:
        """Batch size, and epochs or steps, of a client's round.

        Raises
        ------
        FedsimError
            If it has both, or none.
        """
        epochs = None if self.steps and self.epochs <= 1 else self.epochs
        return LocalWork(self.batch_size, epochs, self.steps or None)

    def check(self, config: Any) -> None:
        """Make clients' work and the mechanism for their examples, unless it is a user's."""
        self.make_work()
        mechanism = self.mechanism
        if not mechanism.has_options(mechanism.name):
            check_bounds_rows(mechanism.make(), "client.mechanism")
        if mechanism.name != "none":
            check_private_work(self.work or None, self.max_grad_norm)

    def refusals(self, config: Any) -> Refusals:
        """Noise on examples without a bound, or the reverse; a rate that would not be kept."""
        bound, noise = self.mechanism.name, self.noise
        if noise.max_epsilon is not None and not self.private:
            yield "client.noise.max-epsilon", "unset where clients do not protect their examples"
        if bound == "none" and (noise.multiplier, noise.target_epsilon) != (None, None):
            yield (
                "client.mechanism.name",
                "set, to 'clipping' for one, while client.noise says how much noise there is",
            )
        if bound != "none" and (noise.multiplier is None) == (noise.target_epsilon is None):
            yield (
                "client.noise.multiplier",
                "set, or client.noise.target-epsilon, and not both, while client.mechanism.name = "
                f"'{bound}'",
            )
        if config.private and noise.target_epsilon is not None:
            yield (
                "client.noise.target-epsilon",
                "unset, with client.noise.multiplier in its place, in a run that protects whole "
                "clients too: the multiplier that meets it would reveal how many examples clients "
                "have",
            )
        if getattr(self, "adapt_rounds", 0) and self.state == "reset":
            yield (
                "client.adapt-rounds",
                "0 while client.state = 'reset', since the plain steps after so many rounds take "
                "the rate that was reached; with client.state = 'client' they can",
            )


@dataclass(frozen=True, init=False)
class CohortSection(ObjectTable, table="cohort"):
    """How the clients of a round are sampled."""

    derived_fields: ClassVar[tuple[str, ...]] = ("population", "adjacency", "rounds")
    name: str = "full"
    """How the clients of a round are sampled."""

    def check(self, config: Any) -> None:
        """Make the sampler, unless it is a user's."""
        if not self.has_options(self.name):
            self.make(population=config.partition.clients, rounds=config.rounds)


@dataclass(frozen=True, init=False)
class ServerSection(ObjectTable, table="server"):
    """How the server applies the noisy mean update."""

    selector: ClassVar[str] = "optimizer"
    optimizer: str = "sgd"
    """The server's optimiser, which steps along the mean update; 'sgd' with lr = 1 just adds it
    (FedAvg). One of Flower's strategies that refine the mean also works, such as
    'flwr.serverapp.strategy:FedProx', if that module is allowed."""
    schedule: str = ""
    """A schedule that multiplies lr, release by release, such as 'warm-up(length=10)' or
    'cosine(length=100)'; empty for a constant lr."""
    max_failed_rounds: Annotated[int, OUTSIDE_RELEASE, Ge(1)] = 3
    """Rounds in a row without a usable reply after which a run without privacy fails."""


@dataclass(frozen=True, init=False)
class CheckpointSection(ConfigTable, table="checkpoint"):
    """When a run writes a checkpoint, from which it can be resumed."""

    every: Annotated[int, Ge(0)] = 10
    """Rounds between two checkpoints; 0 for no checkpoints."""
    seconds: Annotated[float, Ge(0)] = 600.0
    """Seconds after which the next round writes a checkpoint, whatever checkpoint.every says; 0 to
    count rounds only."""
    best: Annotated[str, Needs("every")] = ""
    """A column of metrics.csv; the model of its best round is saved too."""
    resume: bool = False
    """Resume the last run of this name on the machine of a federation's SuperLink."""


@dataclass(frozen=True, init=False)
class StopSection(ConfigTable, table="stop"):
    """When a run stops before its last round."""

    metric: str = ""
    """Early stopping: the column of metrics.csv that must improve, or the run ends; empty for
    none."""
    callbacks: bool = False
    """Whether Python callbacks may end the run depending on what it has released. With this or
    stop.metric all rounds of a private run are charged before the first. If a callback ends it
    without this, the rest is charged then."""
    patience: Annotated[int, Needs("metric"), Ge(1)] = 10
    """Rounds without an improvement of stop.metric after which the run ends."""


@dataclass(frozen=True, init=False)
class LogSection(ConfigTable, table="log"):
    """Where a run's rows are sent, in addition to its directory."""

    to: str = ""
    """Experiment trackers that also receive the metrics: tensorboard, mlflow, wandb, trackio, or
    several with commas. Each needs the extra of its name."""


@dataclass(frozen=True, init=False)
class EngineSection(ConfigTable, table="engine"):
    """Where the clients run."""

    name: Literal["local", "ray", "simulation", "deployment"] = "local"
    """This machine's processes, Ray workers, Flower's virtual clients, or real SuperNodes; the
    numbers are the same."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of models and data; auto takes a GPU if there is one."""
    workers: Annotated[int, WithNames(("local", "ray")), Ge(0), Le(10_000)] = 0
    """How many processes train, and how many threads evaluate the global model: at most one a core.
    0 for one thread a core and as many processes as help: with 'ray' one a core or GPU, with
    'local' by a fixed rule of model, cohort and cores."""
    cpus_per_worker: Annotated[float, WithNames(("ray", "simulation")), Gt(0)] = 1.0
    """CPU cores that Ray reserves for a worker or client."""
    gpus_per_worker: Annotated[float, WithNames(("ray", "simulation")), Ge(0)] = 0.0
    """GPUs, or the share of one, that Ray reserves for a worker or client; 0 for none, or, with
    'ray' where engine.device is a GPU, for one each."""
    federation: Annotated[str, WithNames(("deployment",)), NamesPath("operator")] = ""
    """The folder of a running federation; empty to start one on this machine for this run."""
    timeout: Annotated[float, Gt(0), Le(1e8)] = 3600.0
    """Time limit of each client in a round, in seconds."""
    # Starting ten virtual clients on two busy cores took more than a minute.
    node_timeout: Annotated[float, Gt(0), Le(1e8)] = 180.0
    """How many seconds to wait for nodes to connect."""

    def refusals(self, config: Any) -> Refusals:
        """Parts of cores where there are none."""
        cores = self.cpus_per_worker
        if self.name == "simulation" and cores != max(1, int(cores)):
            yield (
                "engine.cpus-per-worker",
                "a whole number with engine.name = 'simulation': Flower's keeps whole cores",
            )
