"""Config tables on data, model, task, clients and server.

Settings of the thing that a table names (a model's widths, an algorithm's rates) are declared in
that thing's file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from fedsim import registry
from fedsim.config.privacy_sections import ClientMechanismSection, ClientNoiseSection
from fedsim.config.tables import (
    OUTSIDE_RELEASE,
    Choice,
    ConfigTable,
    NamesOf,
)
from fedsim.config.values import read_named, read_options_of, split_top_level
from fedsim.settings import Constraint, Doc, Ge, Gt, Le, Lt, NotAllowedError, Text

Range: TypeAlias = Annotated[
    str,
    Constraint(
        lambda text: re.fullmatch(r"([0-9]{0,18}:[0-9]{0,18})?", text, re.ASCII) is not None,
        "a range such as '10000:' or ':10000', or ''",
    ),
]
"""Type of a range of examples: ``10000:``, ``:500``, or empty for all."""


WORK_RANGE = re.compile(r"whole\((\d{1,7}), *(\d{1,7})\)")


def _is_work(text: str) -> bool:
    drawn = WORK_RANGE.fullmatch(text)
    return "(" not in text or (drawn is not None and 1 <= int(drawn[1]) <= int(drawn[2]))


Work: TypeAlias = Annotated[
    str,
    Constraint(_is_work, "whole(low,high) with whole numbers from 1 on, the path of a file, or ''"),
]
"""Type of clients' amounts of work: ``whole(1,5)``, a file, or empty for equal work."""


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
            raise registry.unknown_name("metric", name, "task.metrics")
        thing = registry.find("metric", name, "task.metrics")
        if isinstance(thing, type):
            read_options_of(thing, name, options, f"task.metrics.{name}")
    return ", ".join(filter(None, split_top_level(value)))


@dataclass(frozen=True, init=False)
class DataSection(Choice, table="data"):
    """The data set, and which of its examples are used."""

    filled: ClassVar[tuple[str, ...]] = ("path", "directory", "download", "normalize")
    note: ClassVar[str] = (
        " In Python it is part of data= itself: an entry 'classes': 10, or from_table(columns=)."
    )
    name: Annotated[
        str,
        Doc(
            "The data set: `digits`, which is part of fedsim, `mnist`, `fashion-mnist`, `cifar10`, "
            "`cifar100`, or a path of your own: an .npz, or a folder of .npy files (which stays in "
            "its files) or one that `datasets` has saved."
        ),
    ] = "digits"
    dir: Annotated[str, OUTSIDE_RELEASE, Doc("The folder that holds data sets.")] = "data"
    download: Annotated[
        bool, OUTSIDE_RELEASE, Doc("Whether a data set that is missing there may be fetched.")
    ] = False
    normalize: Annotated[
        bool,
        Doc(
            "Whether inputs are normalised by the data set's published mean and deviation; those "
            "of an object, data=, are used if it has them."
        ),
    ] = False
    train: Annotated[
        Range,
        Doc("Which training examples there are, as start:stop; '10000:' leaves out 10,000."),
    ] = ""
    test: Annotated[
        Range, OUTSIDE_RELEASE, Doc("Which test examples there are, in the same way.")
    ] = ""
    validation: Annotated[
        float,
        Ge(0),
        Doc(
            "Training examples that nobody trains on, to choose settings and rounds by: a share "
            "below 1, or their number; 0 for none."
        ),
    ] = 0.0

    @classmethod
    def registered(cls, name: str) -> str:
        """A name that is not a data set's is a path to files."""
        return name if ":" in name or name in registry.names("data") else "files"


@dataclass(frozen=True, init=False)
class PartitionSection(Choice, table="partition"):
    """How examples are divided among clients."""

    filled: ClassVar[tuple[str, ...]] = ("clients", "seed")
    name: Annotated[str, Doc("How the training examples are divided among clients.")] = "iid"
    clients: Annotated[
        int,
        Ge(1),
        Le(10_000_000),
        Doc("How many clients there are: the population, a declared public number."),
    ] = 100
    max_examples: Annotated[
        int, Ge(0), Doc("The most examples that a client keeps; 0 for all.")
    ] = 0


@dataclass(frozen=True, init=False)
class ModelSection(Choice, table="model"):
    """The model that is trained."""

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
        str,
        Doc(
            "Shell patterns of the parameters that are trained, such as 'fc*'; empty for all, or "
            "for none besides an adapter's."
        ),
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


@dataclass(frozen=True, init=False)
class AdapterSection(Choice, table="adapter"):
    """An adapter: a few added weights that are trained instead of the model's own."""

    name: Annotated[
        str,
        Doc(
            "The adapter: its weights, and what model.trainable names besides, are all that is "
            "trained, sent, bounded and noised."
        ),
    ] = "none"
    weights: Annotated[
        str,
        Doc("A folder in peft's format whose adapter the run starts from; empty for a new one."),
    ] = ""


@dataclass(frozen=True, init=False)
class TaskSection(Choice, table="task"):
    """The loss, and the metrics of evaluations."""

    kind: ClassVar[str] = "loss"
    selector: ClassVar[str] = "loss"
    loss: Annotated[str, Doc("The loss of an example.")] = "cross-entropy"
    metrics: Annotated[
        str,
        Text(_read_metrics, str),
        NamesOf("metric"),
        Doc(
            "What is measured besides the loss, with commas between and options in brackets, such "
            "as 'accuracy, top-k(k=3)'."
        ),
    ] = "accuracy"

    def named_metrics(self) -> list[tuple[str, dict[str, Any]]]:
        """Names of the metrics, each with its options."""
        return read_named(self.metrics, "task.metrics")


@dataclass(frozen=True, init=False, kw_only=True)
class ClientSection(Choice, table="client"):
    """How a client trains on its examples."""

    name: Annotated[str, Doc("The local algorithm.")] = "sgd"
    batch_size: Annotated[
        int, Ge(0), Doc("Examples of a local step; 0 for all that the client has.")
    ] = 10
    epochs: Annotated[
        int, Ge(0), Le(10_000), Doc("Passes over the client's examples in a round.")
    ] = 1
    steps: Annotated[
        int,
        Ge(0),
        Le(1_000_000),
        Doc("In place of epochs: local steps in a round, the same for every client."),
    ] = 0
    work: Annotated[
        Work,
        Doc(
            "Each client's own number of epochs, or of steps where those are set, in its place: "
            "whole(1,5) draws it from the seed, a file has one a line; empty for the same for all."
        ),
    ] = ""
    proximal: Annotated[
        float,
        Ge(0),
        Doc(
            "FedProx's mu: how strongly a client is pulled towards the global model; where it is "
            "above 0, a value from the server (Flower's FedProx) replaces it."
        ),
    ] = 0.0
    max_grad_norm: Annotated[
        float,
        Ge(0),
        Doc(
            "The largest L2 norm of a batch's gradient, longer ones are shortened to it; 0 for "
            "any. It protects nobody: mechanism and client.mechanism do."
        ),
    ] = 0.0
    compression: Annotated[
        str,
        Doc(
            "What of an update is sent: 'top-k(0.01)', the largest of its coordinates, or "
            "'bits(8)' a coordinate; clients add the rest to their next update. Empty for "
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
        str,
        OUTSIDE_RELEASE,
        Doc("The folder in which clients keep that, and their ledgers; empty for the run's."),
    ] = ""
    path: Annotated[
        Literal["auto", "plain", "func", "layered"],
        Doc("How gradients of a block of clients are computed; all agree to rounding."),
    ] = "auto"
    kernel: Annotated[
        Literal["auto", "eager", "compiled"],
        Doc(
            "What the path 'layered' computes with on a CPU: torch's operations, or "
            "kernels that are compiled at their first use; both agree to rounding."
        ),
    ] = "auto"
    block_size: Annotated[
        int,
        OUTSIDE_RELEASE,
        Ge(0),
        Doc(
            "Clients that are trained at a time; 0 to choose. It changes no result on a CPU, and "
            "on a GPU last bits."
        ),
    ] = 0
    mechanism: ClientMechanismSection
    noise: ClientNoiseSection

    @property
    def private(self) -> bool:
        """Whether clients claim example-level privacy."""
        return self.mechanism.name != "none" and not self.mechanism.gives_none


@dataclass(frozen=True, init=False)
class CohortSection(Choice, table="cohort"):
    """How the clients of a round are sampled."""

    filled: ClassVar[tuple[str, ...]] = ("population", "adjacency", "rounds")
    name: Annotated[str, Doc("How the clients of a round are sampled.")] = "full"


@dataclass(frozen=True, init=False)
class ServerSection(Choice, table="server"):
    """How the server applies the noisy mean update."""

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
        OUTSIDE_RELEASE,
        Ge(1),
        Doc("Rounds in a row without a usable reply after which a run without privacy gives up."),
    ] = 3


@dataclass(frozen=True, init=False)
class DevicesSection(ConfigTable, table="devices"):
    """Simulated devices of clients, drawn from the seed, never from data."""

    availability: Annotated[
        float,
        Gt(0),
        Le(1),
        Doc("The probability that a device is available, independently in each round."),
    ] = 1.0
    trace: Annotated[
        str,
        Doc(
            "In its place an .npy file of truth values [rounds, clients], repeated as often as "
            "needed; a sampled client that is not available counts as missing."
        ),
    ] = ""
    dropout: Annotated[
        float,
        Ge(0),
        Lt(1),
        Doc("The probability that an available device does not reply, each round by itself."),
    ] = 0.0
    seconds_per_example: Annotated[
        float, Ge(0), Doc("Of the median device's training; 0 for none.")
    ] = 0.0
    bandwidth: Annotated[
        float, Ge(0), Doc("Of the median device, in megabits a second each way; 0 for no limit.")
    ] = 0.0
    spread: Annotated[
        float,
        Ge(0),
        Le(10),
        Doc("Standard deviation, over devices, of the logarithms of these two."),
    ] = 0.0
    deadline: Annotated[
        float,
        Ge(0),
        Doc("Seconds of a device's clock after which its reply does not count; 0 for none."),
    ] = 0.0
