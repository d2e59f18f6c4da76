"""Config tables on a run's execution: checkpoints, early stopping, logs, engine, devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fedsim.config.tables import ConfigTable, Needs, WithNames
from fedsim.settings import Ge, Gt, Le, Lt, NamesPath


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
    """Whether Python callbacks may end the run depending on what it has released. This and
    stop.metric take half of delta. A run that a callback ends undeclared is charged all planned
    rounds."""
    patience: Annotated[int, Needs("metric"), Ge(1)] = 10
    """Rounds without an improvement of stop.metric after which the run ends."""


@dataclass(frozen=True, init=False)
class LogSection(ConfigTable, table="log"):
    """Where a run's rows are sent, in addition to its directory."""

    to: str = ""
    """Experiment trackers that also receive the metrics: tensorboard, mlflow, wandb, or several
    with commas. Each needs the extra of its name."""


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
    address: Annotated[str, WithNames(("ray",))] = ""
    """The address of a Ray cluster; empty to start Ray on this machine."""
    cpus_per_worker: Annotated[float, WithNames(("ray", "simulation")), Gt(0)] = 1.0
    """CPU cores that Ray reserves for a worker or client."""
    gpus_per_worker: Annotated[float, WithNames(("ray", "simulation")), Ge(0)] = 0.0
    """GPUs, or the share of one, that Ray reserves for a worker or client."""
    federation: Annotated[str, WithNames(("deployment",)), NamesPath("operator")] = ""
    """The folder of a running federation; empty to start one on this machine for this run."""
    timeout: Annotated[float, Gt(0), Le(1e8)] = 3600.0
    """Time limit of each client in a round, in seconds."""
    # Starting ten virtual clients on two busy cores took more than a minute.
    node_timeout: Annotated[float, Gt(0), Le(1e8)] = 180.0
    """How many seconds to wait for nodes to connect."""


@dataclass(frozen=True, init=False)
class DevicesSection(ConfigTable, table="devices"):
    """Simulated devices of clients, drawn from the seed, never from data."""

    availability: Annotated[float, Gt(0), Le(1)] = 1.0
    """The probability that a device is available, independently in each round."""
    trace: Annotated[str, NamesPath("training")] = ""
    """In place of availability: an .npy file of truth values [rounds, clients], repeated as often
    as needed. A sampled client that is not available counts as missing."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """The probability that an available device does not reply, independently in each round."""
    seconds_per_example: Annotated[float, Ge(0)] = 0.0
    """Training time of the median device, in seconds an example; 0 for none."""
    bandwidth: Annotated[float, Ge(0)] = 0.0
    """Bandwidth of the median device, in megabits a second each way; 0 for no limit."""
    spread: Annotated[float, Ge(0), Le(10)] = 0.0
    """How much devices differ: standard deviation of the logarithms of seconds-per-example and
    bandwidth."""
    deadline: Annotated[float, Ge(0)] = 0.0
    """Deadline of a round on the device's simulated clock, in seconds: later replies do not count;
    0 for none."""
