"""The tables of a run's config, and what each key means."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    model_validator,
)

from fedsim.config.keys import (
    Maybe,
    MaybeBool,
    Multiplier,
    Range,
    Section,
    TargetEpsilon,
    one_of,
    only,
    setting,
)

__all__ = [
    "CheckpointSection",
    "ClientMechanismSection",
    "ClientNoiseSection",
    "ClientSection",
    "CohortSection",
    "DataSection",
    "EngineSection",
    "EvaluateSection",
    "MechanismSection",
    "ModelSection",
    "NoiseSection",
    "PartitionSection",
    "ServerSection",
    "StopSection",
]


class DataSection(Section):
    """Which examples there are."""

    table: ClassVar[str] = "data"
    name: str = "digits"
    dir: str = setting("data", affects_release=False)
    download: bool = setting(False, affects_release=False)
    normalize: bool = False
    train: Range = ""


class PartitionSection(Section):
    """Whose examples they are."""

    table: ClassVar[str] = "partition"
    name: Literal["iid", "interpolated-pathological", "dirichlet", "shards"] = "iid"
    clients: int = Field(100, ge=1, le=10_000_000)
    randomness: float = only("interpolated-pathological", default=0.0, ge=0, le=1)
    groups: str = only("interpolated-pathological", default="")
    alpha: float = only("dirichlet", default=0.5, gt=0)
    shards: int = only("shards", default=2, ge=1)
    max_examples: int = Field(0, ge=0)


class ModelSection(Section):
    """What is trained."""

    table: ClassVar[str] = "model"
    name: Annotated[str, one_of("softmax", "mlp", "adadp-mnist", "adadp-cifar")] = "softmax"
    widths: str = only("mlp", default="")
    bias: MaybeBool = None
    dtype: Literal["float32", "float64"] = "float32"
    trainable: str = ""
    weights: str = ""
    weights_for: str = ""
    loss: str = "cross-entropy"
    metrics: str = "accuracy"

    @model_validator(mode="after")
    def _weights_come_from_a_file(self) -> ModelSection:
        self.require(
            bool(self.weights) or not self.weights_for,
            "model.weights-for",
            self.weights_for,
            "unset without model.weights, the file that these parameters would come from",
        )
        return self


class _Bounding(Section):
    """How rows are bounded before they enter one noisy sum, at either level."""

    name: Literal[
        "none",
        "clipping",
        "normalization",
        "quantile-clipping",
        "adaclip",
        "adaptive-noise",
        "norm-bound",
        "coordinate-clipping",
    ] = "none"
    clip_norm: float = only(
        "clipping", "normalization", "adaclip", "adaptive-noise", "norm-bound", default=1.0, gt=0
    )
    per_layer: bool = False
    smoothing: float = only("normalization", default=0.0, ge=0)
    target_quantile: float = only("quantile-clipping", default=0.5, ge=0, le=1)
    learning_rate: float = only("quantile-clipping", default=0.2, ge=0)
    initial_clip_norm: float = only("quantile-clipping", default=0.1, gt=0)
    bit_noise: float = only("quantile-clipping", default=0.05, gt=0)
    clip_value: float = only("coordinate-clipping", default=0.01, gt=0)
    h1: float = only("adaclip", default=1e-12, gt=0)
    h2: Maybe = only("adaclip", default=None)
    beta1: float = only("adaclip", default=0.99, ge=0, le=1)
    beta2: float = only("adaclip", default=0.9, ge=0, le=1)
    gamma: float = only("adaclip", default=1.0, gt=0)
    center: bool = only("adaclip", default=True)
    variance: Literal["per-example", "literal"] = only("adaclip", default="per-example")
    clamp: Literal["pre", "post"] = only("adaclip", default="pre")
    literal: bool = only("adaclip", default=False)
    threshold: Maybe = only("adaptive-noise", default=None)
    beta: float = only("adaptive-noise", default=1.0, gt=0)
    decay: float = only("adaptive-noise", default=0.9, ge=0, le=1)
    floor: float = only("adaptive-noise", default=1e-12, gt=0)
    noise_shape: Literal["proportional", "optimal"] = only("adaptive-noise", default="proportional")
    unsafe_non_private_raw_statistics: bool = only("adaptive-noise", default=False)


class MechanismSection(_Bounding):
    """How an update is bounded before it enters the one noisy sum."""

    table: ClassVar[str] = "mechanism"
    weighting: Literal["uniform", "num-examples"] = only("none", default="num-examples")
    private_scalar: str = ""
    private_scalar_high: float = Field(1.0, gt=0)
    private_scalar_fraction: float = Field(0.1, ge=0, lt=1)


class ClientMechanismSection(_Bounding):
    """How an example's gradient is bounded, in a client with example-level privacy."""

    table: ClassVar[str] = "client.mechanism"


class ClientNoiseSection(Section):
    """The noise on a client's sums of per-example gradients."""

    table: ClassVar[str] = "client.noise"
    multiplier: Multiplier = None
    target_epsilon: TargetEpsilon = None
    max_epsilon: Maybe = setting(None, affects_release=False)
    delta: float = Field(1e-5, ge=1e-100, lt=1)
    sampling: Literal["poisson", "shuffle"] = "poisson"
    hardened: bool = True
    chunk: int = setting(0, affects_release=False, ge=0)


class ClientSection(Section):
    """What a client does with its examples."""

    table: ClassVar[str] = "client"
    name: Annotated[str, one_of("sgd", "adam", "rmsprop", "adadp-lr", "adadp-noise")] = "sgd"
    lr: float = Field(0.1, gt=0)
    batch_size: int = Field(10, ge=0)
    epochs: int = Field(1, ge=0, le=10_000)
    steps: int = Field(0, ge=0, le=1_000_000)
    momentum: float = only("sgd", default=0.0, ge=0, lt=1)
    weight_decay: float = only("sgd", "adam", "rmsprop", "adadp-noise", default=0.0, ge=0)
    schedule: str = only("sgd", "adam", "rmsprop", "adadp-noise", default="")
    proximal: float = Field(0.0, ge=0)
    beta1: float = only("adam", default=0.9, ge=0, lt=1)
    beta2: float = only("adam", default=0.999, ge=0, lt=1)
    decay: Maybe = only("rmsprop", "adadp-noise", default=None)
    eps: float = only("adam", "rmsprop", "adadp-noise", default=1e-8, gt=0)
    tol: Maybe = only("adadp-lr", default=None)
    exponent: float = only("adadp-lr", default=1.0, gt=0)
    keep: Literal["half", "full"] = only("adadp-lr", default="half")
    discard: MaybeBool = only("adadp-lr", default=None)
    alpha_min: float = only("adadp-lr", default=0.9, gt=0, le=1)
    alpha_max: float = only("adadp-lr", default=1.1, ge=1)
    eta_min: float = only("adadp-lr", default=1e-8, ge=0)
    eta_max: float = only("adadp-lr", default=0.0, ge=0)
    adapt_rounds: int = only("adadp-lr", default=0, ge=0)
    post_scale: float = only("adadp-lr", default=1.0, gt=0)
    post_decay: float = only("adadp-lr", default=0.1, ge=0)
    options: str = ""
    state: Literal["reset", "client", "server"] = "reset"
    state_dir: str = setting("", affects_release=False)
    path: Literal["auto", "plain", "func", "stacked"] = setting("auto", affects_release=False)
    block_size: int = setting(0, affects_release=False, ge=0)
    mechanism: ClientMechanismSection = ClientMechanismSection()
    noise: ClientNoiseSection = ClientNoiseSection()

    @property
    def private(self) -> bool:
        """Whether clients claim privacy for their examples."""
        return self.mechanism.name != "none" and not (
            self.mechanism.unsafe_non_private_raw_statistics
        )

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


class CohortSection(Section):
    """Who takes part in a round."""

    table: ClassVar[str] = "cohort"
    name: Literal["poisson", "fixed", "full"] = "full"
    rate: float = only("poisson", default=0.1, ge=1e-9, le=1)
    size: int = only("fixed", default=10, ge=1)


class NoiseSection(Section):
    """How much noise a release carries, and what privacy it must give."""

    table: ClassVar[str] = "noise"
    multiplier: Multiplier = None
    target_epsilon: TargetEpsilon = None
    max_epsilon: Maybe = setting(None, affects_release=False)
    delta: float = Field(1e-5, ge=1e-100, lt=1)
    entropy: Literal["", "config", "system"] = ""
    placement: Literal["server", "client"] = "server"
    hardened: bool = True
    ledger_key: str = setting("", affects_release=False)

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

    @property
    def adds_noise(self) -> bool:
        """Whether any noise is asked for."""
        return self.target_epsilon is not None or bool(self.multiplier)


class ServerSection(Section):
    """What the server does with the noisy mean update."""

    table: ClassVar[str] = "server"
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = Field(1.0, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    max_failed_rounds: int = setting(3, affects_release=False, ge=1)


class EvaluateSection(Section):
    """How often the model is looked at."""

    table: ClassVar[str] = "evaluate"
    every: int = Field(1, ge=0)
    clients_every: int = Field(0, ge=0)
    fraction: float = Field(1.0, gt=0, le=1)
    unprotected: bool = False


class CheckpointSection(Section):
    """When a run keeps what it has reached, to go on from there."""

    table: ClassVar[str] = "checkpoint"
    every: int = Field(10, ge=0)
    seconds: float = Field(600.0, ge=0)
    best: str = ""


class StopSection(Section):
    """When a run ends before its last round."""

    table: ClassVar[str] = "stop"
    metric: str = ""
    patience: int = Field(10, ge=1)


class EngineSection(Section):
    """Where the clients run."""

    table: ClassVar[str] = "engine"
    name: Literal["local", "ray", "simulation", "deployment"] = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: int = only("ray", default=0, ge=0, le=10_000)
    address: str = only("ray", default="")
    cpus_per_worker: float = only("ray", "simulation", default=1.0, gt=0)
    gpus_per_worker: float = only("ray", "simulation", default=0.0, ge=0)
    federation: str = only("deployment", default="")
    timeout: float = Field(3600.0, gt=0, le=1e8)
    node_timeout: float = Field(60.0, gt=0, le=1e8)
