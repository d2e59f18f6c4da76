"""Config tables on a run's execution: checkpoints, early stopping, logs, engine, devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fedsim.config.tables import ConfigTable, Needs, WithNames
from fedsim.settings import Doc, Ge, Gt, Le, Lt, NamesPath


@dataclass(frozen=True, init=False)
class CheckpointSection(ConfigTable, table="checkpoint"):
    """When a run writes a checkpoint, from which it can be resumed."""

    every: Annotated[int, Ge(0), Doc("Rounds between two checkpoints; 0 for no checkpoints.")] = 10
    seconds: Annotated[
        float,
        Ge(0),
        Doc(
            "Seconds after which the next round writes a checkpoint, whatever checkpoint.every "
            "says; 0 to count rounds only."
        ),
    ] = 600.0
    best: Annotated[
        str,
        Needs("every"),
        Doc("A column of metrics.csv; the model of its best round is saved too."),
    ] = ""
    resume: Annotated[
        bool,
        Doc("Resume the last run of this name on the machine of a federation's SuperLink."),
    ] = False


@dataclass(frozen=True, init=False)
class StopSection(ConfigTable, table="stop"):
    """When a run stops before its last round."""

    metric: Annotated[
        str,
        Doc(
            "Early stopping: the column of metrics.csv that must improve, or the run ends; "
            "empty for none."
        ),
    ] = ""
    callbacks: Annotated[
        bool,
        Doc(
            "Whether Python callbacks may end the run depending on what it has released. "
            "This and stop.metric take half of delta. A run that a callback ends undeclared"
            " is charged all planned rounds."
        ),
    ] = False
    patience: Annotated[
        int,
        Needs("metric"),
        Ge(1),
        Doc("Rounds without an improvement of stop.metric after which the run ends."),
    ] = 10


@dataclass(frozen=True, init=False)
class LogSection(ConfigTable, table="log"):
    """Where a run's rows are sent, in addition to its directory."""

    to: Annotated[
        str,
        Doc(
            "Experiment trackers that also receive the metrics: tensorboard, mlflow, wandb, or "
            "several with commas. Each needs the extra of its name."
        ),
    ] = ""


@dataclass(frozen=True, init=False)
class EngineSection(ConfigTable, table="engine"):
    """Where the clients run."""

    name: Annotated[
        Literal["local", "ray", "simulation", "deployment"],
        Doc(
            "This machine's processes, Ray workers, Flower's virtual clients, or real SuperNodes; "
            "the numbers are the same."
        ),
    ] = "local"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Doc("The device of models and data; auto takes a GPU if there is one."),
    ] = "auto"
    workers: Annotated[
        int,
        WithNames(("local", "ray")),
        Ge(0),
        Le(10_000),
        Doc(
            "How many processes train, and how many threads evaluate the global model: at "
            "most one a core. 0 for one thread a core and as many processes as help: with "
            "'ray' one a core or GPU, with 'local' by a fixed rule of model, cohort and "
            "cores."
        ),
    ] = 0
    address: Annotated[
        str,
        WithNames(("ray",)),
        Doc("The address of a Ray cluster; empty to start Ray on this machine."),
    ] = ""
    cpus_per_worker: Annotated[
        float,
        WithNames(("ray", "simulation")),
        Gt(0),
        Doc("CPU cores that Ray reserves for a worker or client."),
    ] = 1.0
    gpus_per_worker: Annotated[
        float,
        WithNames(("ray", "simulation")),
        Ge(0),
        Doc("GPUs, or the share of one, that Ray reserves for a worker or client."),
    ] = 0.0
    federation: Annotated[
        str,
        WithNames(("deployment",)),
        NamesPath("operator"),
        Doc("The folder of a running federation; empty to start one on this machine for this run."),
    ] = ""
    timeout: Annotated[
        float, Gt(0), Le(1e8), Doc("Time limit of each client in a round, in seconds.")
    ] = 3600.0
    # Starting ten virtual clients on two busy cores took more than a minute.
    node_timeout: Annotated[
        float, Gt(0), Le(1e8), Doc("How many seconds to wait for nodes to connect.")
    ] = 180.0


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
        NamesPath("training"),
        Doc(
            "In place of availability: an .npy file of truth values [rounds, clients], "
            "repeated as often as needed. A sampled client that is not available counts as "
            "missing."
        ),
    ] = ""
    dropout: Annotated[
        float,
        Ge(0),
        Lt(1),
        Doc(
            "The probability that an available device does not reply, independently in each round."
        ),
    ] = 0.0
    seconds_per_example: Annotated[
        float, Ge(0), Doc("Training time of the median device, in seconds an example; 0 for none.")
    ] = 0.0
    bandwidth: Annotated[
        float,
        Ge(0),
        Doc("Bandwidth of the median device, in megabits a second each way; 0 for no limit."),
    ] = 0.0
    spread: Annotated[
        float,
        Ge(0),
        Le(10),
        Doc(
            "How much devices differ: standard deviation of the logarithms of "
            "seconds-per-example and bandwidth."
        ),
    ] = 0.0
    deadline: Annotated[
        float,
        Ge(0),
        Doc(
            "Deadline of a round on the device's simulated clock, in seconds: later replies do "
            "not count; 0 for none."
        ),
    ] = 0.0
