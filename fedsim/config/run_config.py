"""RunConfig: the one description of a run.

A config is a TOML file of tables with kebab-case keys. Flattened with dots it is a Flower
run-config, which has neither lists nor nulls: lists are strings (``"256,256"``) and the
empty string means unset.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import tomli_w
from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo

from fedsim import regular_files
from fedsim.allowed_code import allow
from fedsim.config.choices import Choice, own_settings, prepared, switched
from fedsim.config.client_sections import ClientSection
from fedsim.config.conduct import (
    CheckpointSection,
    EngineSection,
    EvaluateSection,
    LogSection,
    StopSection,
)
from fedsim.config.keys import Name, Section, belongs_to, setting, shown
from fedsim.config.sections import (
    CohortSection,
    DataSection,
    DevicesSection,
    MechanismSection,
    ModelSection,
    NoiseSection,
    PartitionSection,
    PrivacySection,
    ServerSection,
    TaskSection,
)
from fedsim.config.sentences import sentence
from fedsim.config.values import Scalar, read_value, write_options
from fedsim.errors import FedsimError
from fedsim.settings import Doc

__all__ = ["RunConfig", "Scalar"]

LARGEST_FILE = 2**20


class RunConfig(Section):
    """Everything that determines a run. See the README for a commented example."""

    name: Annotated[Name, Doc("Names the run's directory: letters, digits, '.', '_' and '-'.")] = (
        setting("fedsim-run", affects_release=False)
    )
    title: Annotated[str, Doc("What reports call the run, in any words.")] = setting(
        "", affects_release=False
    )
    seed: Annotated[
        int, Doc("Of every draw: the same seed and config give the same model, byte for byte.")
    ] = 1
    # Schedules have lengths of their own, and a calibrated noise multiplier is resolved.
    rounds: Annotated[int, Doc("How many rounds the server runs.")] = setting(
        10, affects_release=False, ge=1, le=1_000_000_000
    )
    data: DataSection = DataSection()
    partition: PartitionSection = PartitionSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    client: ClientSection = ClientSection()
    cohort: CohortSection = CohortSection()
    mechanism: MechanismSection = MechanismSection()
    noise: NoiseSection = NoiseSection()
    privacy: PrivacySection = setting(PrivacySection(), affects_release=False)
    server: ServerSection = ServerSection()
    devices: DevicesSection = DevicesSection()
    evaluate: EvaluateSection = setting(EvaluateSection(), affects_release=False)
    checkpoint: CheckpointSection = setting(CheckpointSection(), affects_release=False)
    stop: StopSection = setting(StopSection(), affects_release=False)
    log: LogSection = setting(LogSection(), affects_release=False)
    engine: EngineSection = setting(EngineSection(), affects_release=False)

    def __new__(cls, **tree: Any) -> Self:
        """A config with the keys of what its tables name."""
        model = prepared(cls, tree)[0] if cls is RunConfig else cls
        return super().__new__(model)  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its values: its class is made of what it names."""
        return RunConfig.from_run_config, (self.to_run_config(),)

    @classmethod
    def load(
        cls, path: str | Path, overrides: Iterable[str] = (), *, allow_code: Iterable[str] = ()
    ) -> RunConfig:
        """Read and validate a TOML file, with ``key=value`` overrides applied to it.

        Parameters
        ----------
        path : path
        overrides : iterable of str
        allow_code : iterable of str
            Modules and packages that configs may name from now on in this process, besides those
            of `fedsim.allowed_code`. Nothing is imported here.

        Raises
        ------
        FedsimError
            If the file cannot be read or anything in it is wrong, in one sentence.
        """
        allow(allow_code)
        return cls._changed(_read(path), dict(_parse_override(text) for text in overrides))

    @classmethod
    def of(cls, overrides: Iterable[str]) -> RunConfig:
        """The defaults with ``key=value`` overrides applied to them."""
        return cls._changed({}, dict(_parse_override(text) for text in overrides))

    @classmethod
    def parse(cls, tree: Mapping[str, Any]) -> RunConfig:
        """Validate a nested mapping with kebab-case keys.

        Raises
        ------
        FedsimError
            Naming the key, its value and what is allowed.
        """
        model, tree = prepared(RunConfig, tree)
        try:
            return model.model_validate(tree)  # type: ignore[return-value]
        except ValidationError as error:
            raise FedsimError(sentence(model, error)) from None

    @classmethod
    def from_run_config(cls, flat: Mapping[str, Scalar]) -> RunConfig:
        """Read a Flower run-config: a flat mapping with dotted keys."""
        return cls._changed({}, flat)

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with dotted keys changed: ``config.replace(**{"client.lr": 0.1})``.

        Where a change names another thing, what the old one had at its defaults goes with it.
        """
        return self._changed(self.to_tree(), changes)

    @classmethod
    def _changed(cls, tree: dict[str, Any], changes: Mapping[str, Any]) -> RunConfig:
        switched(RunConfig, tree, changes)
        for key, value in changes.items():
            _assign(tree, key, value)
        return cls.parse(tree)

    def to_tree(self) -> dict[str, Any]:
        """Nested mapping with kebab-case keys, complete; unset is the empty string."""
        return _in_use(type(self), self.model_dump(by_alias=True))

    def to_run_config(self) -> dict[str, Scalar]:
        """Flat mapping with dotted keys, as Flower wants it; options of one's own are a string."""
        return _flatten(self.to_tree())

    def to_toml(self) -> str:
        """The complete config as TOML text."""
        return tomli_w.dumps(self.to_tree())

    @property
    def private(self) -> bool:
        """Whether the run claims client-level differential privacy."""
        bounded = self.mechanism.name != "none" and not self.mechanism.gives_none
        return bounded and self.noise.adds_noise

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        self.require(0 <= self.seed < 2**63, "seed", self.seed, "an integer from 0 to 2^63 - 1")
        _check_cohort(self)
        _check_noise(self)
        _check_larger_cohort(self)
        _check_evaluation(self)
        _check_state(self)
        _check_devices(self)
        return self


def _read(path: str | Path) -> dict[str, Any]:
    """The tree of a TOML file."""
    try:
        with open(path, "rb", opener=regular_files.opener) as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise FedsimError(f"cannot read the config {path}: {error.strerror}.") from None
    if len(content) > LARGEST_FILE:
        raise FedsimError(f"{path} is no config; one has at most {LARGEST_FILE:,} bytes.")
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise FedsimError(f"{path} is not valid TOML: it is nested too deeply.") from None
    except ValueError as error:  # of its syntax, of its encoding, of an endless number
        raise FedsimError(f"{path} is not valid TOML: {error}.") from None


def _check_cohort(config: RunConfig) -> None:
    cohort, clients = config.cohort, config.partition.clients
    if cohort.name == "fixed":
        config.require(
            cohort.size <= clients,
            "cohort.size",
            cohort.size,
            f"at most partition.clients = {clients}, the population",
        )


def _check_noise(config: RunConfig) -> None:
    noise, mechanism = config.noise, config.mechanism.name
    if config.mechanism.is_robust:
        config.require(
            not noise.adds_noise,
            "noise.target-epsilon" if noise.multiplier is None else "noise.multiplier",
            noise.target_epsilon if noise.multiplier is None else noise.multiplier,
            f"unset while mechanism.name = '{mechanism}': what one client moves a robust mean by "
            "depends on all others' updates, and is bounded by no sensitivity of the plan's",
        )
    elif mechanism == "none":
        config.require(
            not noise.adds_noise,
            "noise.target-epsilon" if noise.multiplier is None else "noise.multiplier",
            noise.target_epsilon if noise.multiplier is None else noise.multiplier,
            "unset while mechanism.name = 'none': noise protects only what a mechanism bounds, "
            "so choose one such as 'clipping'",
        )
    else:
        config.require(
            noise.multiplier is not None or noise.target_epsilon is not None,
            "noise.multiplier",
            "",
            f"a number (0.0 for no noise), or noise.target-epsilon set, while mechanism.name = "
            f"'{mechanism}'",
        )
    config.require(
        noise.target_epsilon is None or not config.mechanism.gives_none,
        "noise.target-epsilon",
        noise.target_epsilon,
        "unset while mechanism.unsafe-non-private-raw-statistics = true, for which no noise "
        "gives a finite epsilon",
    )
    group, clients = config.privacy.group, config.partition.clients
    config.require(
        group == 1 or (config.private and group <= clients),
        "privacy.group",
        group,
        f"at most partition.clients = {clients}, and 1 in a run without client-level privacy, from "
        "which what an owner of several clients is promised would follow",
    )
    config.require(
        not config.private or config.client.noise.target_epsilon is None,
        "client.noise.target-epsilon",
        config.client.noise.target_epsilon,
        "unset, with client.noise.multiplier in its place, in a run that protects whole clients "
        "too: the multiplier found for it would tell how many examples clients have",
    )
    config.require(
        noise.max_epsilon is None or config.private,
        "noise.max-epsilon",
        noise.max_epsilon,
        "unset in a run without a mechanism and noise: it has no budget to keep",
    )


def _check_larger_cohort(config: RunConfig) -> None:
    noise, clients = config.noise, config.partition.clients
    if not noise.cohort_size:
        return
    config.require(
        config.engine.name != "deployment",
        "noise.cohort-size",
        noise.cohort_size,
        "0 with engine.name = 'deployment': real clients have the noise of the cohort that they "
        "are in",
    )
    config.require(
        config.cohort.name in ("poisson", "fixed"),
        "noise.cohort-size",
        noise.cohort_size,
        f"0 with cohort.name = '{config.cohort.name}': what a larger cohort would cost is known "
        "for 'poisson' and 'fixed'",
    )
    least = config.cohort.rate * clients if config.cohort.name == "poisson" else config.cohort.size
    population = noise.cohort_population or clients
    config.require(
        population >= clients,
        "noise.cohort-population",
        noise.cohort_population,
        f"0, or at least partition.clients = {clients}",
    )
    config.require(
        least <= noise.cohort_size <= population,
        "noise.cohort-size",
        noise.cohort_size,
        f"from {least:g}, what is drawn here, to {population}, the clients that it would be drawn "
        "from",
    )


def _check_evaluation(config: RunConfig) -> None:
    evaluate, personal = config.evaluate, config.model.personal
    config.require(
        not personal or not evaluate.every,
        "model.personal",
        personal,
        "unset, or evaluate.every = 0: only clients have the whole model, and evaluate it with "
        "evaluate.clients-every",
    )
    config.require(
        not (
            (config.private or config.client.private)
            and evaluate.clients_every
            and not evaluate.unprotected
        ),
        "evaluate.clients-every",
        evaluate.clients_every,
        "0 in a run that is private at client or example level, since metrics of clients' data "
        "are released without noise; "
        "set evaluate.unprotected = true to have them all the same",
    )


def _check_state(config: RunConfig) -> None:
    client = config.client
    config.require(
        not (config.private and client.state == "server"),
        "client.state",
        client.state,
        "'reset' or 'client' in a run with client-level privacy: what clients report of their "
        "state would be a release of its own",
    )
    adapts = getattr(client, "adapt_rounds", 0)
    config.require(
        not (adapts and client.state == "reset"),
        "client.adapt-rounds",
        adapts,
        "0 while client.state = 'reset', since the plain steps after so many rounds take the rate "
        "that was reached; with client.state = 'client' they can",
    )


def _check_devices(config: RunConfig) -> None:
    devices, private = config.devices, config.private or config.client.private
    config.require(
        not (private and devices.deadline),
        "devices.deadline",
        devices.deadline,
        "0 in a run that is private at client or example level: how long a device takes depends on "
        "how many examples it has, which would decide whose update is in the sum",
    )
    config.require(
        config.engine.name != "deployment" or devices == type(devices)(),
        "devices",
        "a model of devices",
        "unset with engine.name = 'deployment', whose devices are real",
    )


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise FedsimError(
            f"--set {shown(text)} is not of the form key=value, such as client.lr=0.1."
        )
    return key.strip(), read_value(value)


def _assign(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *tables, key = dotted.split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise FedsimError(f"{shown(dotted)} cannot be set: '{table}' is a value, not a table.")
    tree[key] = value


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for key, value in tree.items():
        if key == "options":
            flat[f"{prefix}{key}"] = write_options(value)
        elif isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _in_use(section: type[Section], tree: Mapping[str, Any]) -> dict[str, Any]:
    """A table without the keys that belong to another choice than its own."""
    used: dict[str, Any] = {}
    for field in _in_order(section):
        key, inner = str(field.alias), field.annotation
        names = belongs_to(field)
        if names and tree["name"] not in names:
            continue
        nested = isinstance(inner, type) and issubclass(inner, Section)
        used[key] = _in_use(inner, tree[key]) if nested else tree[key]  # type: ignore[arg-type]
    return used


def _in_order(section: type[Section]) -> list[FieldInfo]:
    """A table's keys: what it names stands first, and the settings of that next."""
    fields = list(section.model_fields.values())
    if not issubclass(section, Choice):
        return fields
    settings = {setting.key for setting in own_settings(section, section.named)}
    fields.sort(key=lambda field: 1 if field.alias in settings else 2)
    fields.sort(key=lambda field: field.alias != section.selector)
    return fields
