"""Config tables on a run's execution: engine, checkpoints, early stopping, logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fedsim.config.tables import Beside, ConfigTable, Needs
from fedsim.settings import Doc, Ge, Gt, Le


@dataclass(frozen=True, init=False)
class CheckpointSection(ConfigTable, table="checkpoint"):
    """When a run writes a checkpoint, from which it can be resumed."""

    every: Annotated[int, Ge(0), Doc("Rounds between two checkpoints; 0 for none at all.")] = 10
    seconds: Annotated[
        float, Ge(0), Doc("Seconds after which one is due in any round; 0 to count rounds only.")
    ] = 600.0
    best: Annotated[
        str, Doc("A column of the metrics whose best round's model is kept as well.")
    ] = ""
    resume: Annotated[
        bool,
        Doc("Resume the last run of this name on the machine of a federation's SuperLink."),
    ] = False


@dataclass(frozen=True, init=False)
class StopSection(ConfigTable, table="stop"):
    """When a run stops before its last round."""

    metric: Annotated[
        str, Doc("The column of the metrics that must improve, or the run stops; empty for none.")
    ] = ""
    callbacks: Annotated[
        bool,
        Doc(
            "Whether callbacks from Python may end the run by what it has released: with either, "
            "half of delta is for that. Undeclared, such an end costs all planned rounds."
        ),
    ] = False
    patience: Annotated[
        int, Needs("metric"), Ge(1), Doc("Rounds without an improvement after which the run ends.")
    ] = 10


@dataclass(frozen=True, init=False)
class LogSection(ConfigTable, table="log"):
    """Where a run's rows are sent, in addition to its directory."""

    to: Annotated[
        str,
        Doc("tensorboard, mlflow, wandb, or several with commas: extras of fedsim."),
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
        Literal["auto", "cpu", "cuda"], Doc("Where tensors are; auto takes a GPU if there is one.")
    ] = "auto"
    workers: Annotated[
        int,
        Beside(("local", "ray")),
        Ge(0),
        Le(10_000),
        Doc(
            "Processes that train, and threads that evaluate the global model, at most one a core. "
            "0 is one thread a core, and as many processes as help: on 'ray' one a core or GPU, on "
            "'local' what a fixed rule of model, cohort and cores says."
        ),
    ] = 0
    address: Annotated[str, Beside(("ray",)), Doc("Of a Ray cluster; empty starts one here.")] = ""
    cpus_per_worker: Annotated[
        float,
        Beside(("ray", "simulation")),
        Gt(0),
        Doc("Cores that Ray keeps for a worker or client."),
    ] = 1.0
    gpus_per_worker: Annotated[
        float,
        Beside(("ray", "simulation")),
        Ge(0),
        Doc("GPUs, or shares of one, that Ray keeps for a worker or client."),
    ] = 0.0
    federation: Annotated[
        str,
        Beside(("deployment",)),
        Doc("The folder of a federation that is up; empty brings one up for this run."),
    ] = ""
    timeout: Annotated[float, Gt(0), Le(1e8), Doc("Seconds that a round may take.")] = 3600.0
    # Starting ten virtual clients on two busy cores took more than a minute.
    node_timeout: Annotated[
        float, Gt(0), Le(1e8), Doc("Seconds to wait for nodes to be there.")
    ] = 180.0
