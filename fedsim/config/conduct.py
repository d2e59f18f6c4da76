"""The tables of a config about how a run is conducted: watched, kept, ended, logged, and where."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from fedsim.config.keys import Section, only
from fedsim.settings import Doc

__all__ = ["CheckpointSection", "EngineSection", "EvaluateSection", "LogSection", "StopSection"]


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
    callbacks: Annotated[
        bool,
        Doc(
            "Whether callbacks from Python may end the run by what it has released: with either, "
            "half of delta is for that. Undeclared, such an end costs all planned rounds."
        ),
    ] = False
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

    @model_validator(mode="after")
    def _whole_cores(self) -> EngineSection:
        self.require(
            self.name != "simulation" or self.cpus_per_worker == max(1, int(self.cpus_per_worker)),
            "engine.cpus-per-worker",
            self.cpus_per_worker,
            "a whole number with engine.name = 'simulation': Flower's keeps whole cores",
        )
        return self
