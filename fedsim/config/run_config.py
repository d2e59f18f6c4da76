"""RunConfig: the complete description of a run.

A config is a TOML file of tables with kebab-case keys. Flattened with dotted keys it is a Flower
run-config. That has neither lists nor nulls, so lists are strings (``"256,256"``) and the empty
string means unset.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tomli_w

from fedsim import regular_files
from fedsim.allowed_code import allow
from fedsim.arguments import as_text, check_arguments, expected, require
from fedsim.config.devices import DevicesSection
from fedsim.config.implied import drop_implied, implied_values
from fedsim.config.privacy_sections import (
    EvaluateSection,
    MechanismSection,
    NoiseSection,
    PrivacySection,
)
from fedsim.config.sections import (
    AdapterSection,
    CheckpointSection,
    ClientSection,
    CohortSection,
    DataSection,
    EngineSection,
    LogSection,
    ModelSection,
    PartitionSection,
    ServerSection,
    StopSection,
    TaskSection,
)
from fedsim.config.secure_aggregation import SecAggSection
from fedsim.config.tables import (
    OUTSIDE_RELEASE,
    OUTSIDE_TRAINING,
    ConfigTable,
    drop_ineffective,
    require_names,
)
from fedsim.config.values import OBJECTS, Scalar, objects_in, read_value, write_options
from fedsim.errors import FedsimError
from fedsim.settings import Constraint, Ge, Le

MAX_CONFIG = 2**20

_NAME = Constraint(
    lambda name: bool(re.fullmatch(r"(?!\.+$|-)[A-Za-z0-9._-]{1,100}", name, re.ASCII)),
    "1 to 100 letters a to z, digits, '.', '_' and '-', and not only dots, nor '-' first (it names "
    "files, and commands take '-' for options); any other words go into title",
)


_MARK = Constraint(
    lambda mark: all(name in OBJECTS for name in objects_in(mark)),
    f"as written by a run: names among {', '.join(OBJECTS)}, each with what it was",
)


@dataclass(frozen=True, init=False, kw_only=True)
class RunConfig(ConfigTable):
    """Everything that determines a run. See the README for a commented example."""

    name: Annotated[str, OUTSIDE_RELEASE, OUTSIDE_TRAINING, _NAME] = "fedsim-run"
    """The run's name, and its directory's: letters, digits, '.', '_' and '-'."""
    title: Annotated[str, OUTSIDE_RELEASE, OUTSIDE_TRAINING] = ""
    """The run's title in reports, in any words."""
    seed: Annotated[
        int,
        OUTSIDE_TRAINING,
        Constraint(lambda seed: 0 <= seed < 2**63, "an integer from 0 to 2^63 - 1"),
    ] = 1
    """The seed of all random draws: the same seed and config give the same model, byte for byte."""
    objects: Annotated[str, OUTSIDE_RELEASE, _MARK] = ""
    """Which Python objects the run was given (model=, data=, partition=, strategy=), without which
    it cannot be repeated; written by the run. Empty if the config describes everything."""
    # Outside of release: schedules have explicit lengths, and a resolved config has the calibrated
    # noise multiplier, so that no release depends on the number of rounds.
    rounds: Annotated[int, OUTSIDE_RELEASE, OUTSIDE_TRAINING, Ge(1), Le(1_000_000_000)] = 10
    """How many rounds the server runs."""
    data: DataSection
    partition: Annotated[PartitionSection, OUTSIDE_TRAINING]
    model: ModelSection
    adapter: AdapterSection
    task: TaskSection
    client: ClientSection
    cohort: Annotated[CohortSection, OUTSIDE_TRAINING]
    mechanism: Annotated[MechanismSection, OUTSIDE_TRAINING]
    noise: Annotated[NoiseSection, OUTSIDE_TRAINING]
    secagg: Annotated[SecAggSection, OUTSIDE_TRAINING]
    server: Annotated[ServerSection, OUTSIDE_TRAINING]
    devices: Annotated[DevicesSection, OUTSIDE_TRAINING]
    privacy: Annotated[PrivacySection, OUTSIDE_RELEASE, OUTSIDE_TRAINING]
    evaluate: Annotated[EvaluateSection, OUTSIDE_RELEASE, OUTSIDE_TRAINING]
    checkpoint: Annotated[CheckpointSection, OUTSIDE_RELEASE, OUTSIDE_TRAINING]
    stop: Annotated[StopSection, OUTSIDE_RELEASE, OUTSIDE_TRAINING]
    log: Annotated[LogSection, OUTSIDE_RELEASE, OUTSIDE_TRAINING]
    engine: Annotated[EngineSection, OUTSIDE_RELEASE]
    implied: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Tables and keys that have one legal value beside what is chosen, and were not set."""

    def __init__(self, /, **tree: Any) -> None:
        given, implied = dict(tree), []
        for table, key, value in implied_values(tree):
            inner = given.get(table, {})
            if isinstance(inner, Mapping) and key not in inner:
                given[table] = {**inner, key: value}
                implied.append((table, key))
        super().__init__(**given)
        object.__setattr__(self, "implied", tuple(implied))
        self._check()

    def _check(self) -> None:
        """Refuse keys that contradict each other, and what no object can be made of.

        A user's objects are made when the run is resolved: reading a config imports no code.
        """
        tables = [value for value in vars(self).values() if isinstance(value, ConfigTable)]
        for key, allowed in chain(*(table.refusals(self) for table in tables)):
            value = attrgetter(key.replace("-", "_"))(self)
            value = "" if value is None else value
            raise FedsimError(f"{key} = {as_text(value)}; it must be {allowed}.")
        for table in tables:
            table.check(self)

    @classmethod
    @check_arguments
    def load(
        cls, path: str | Path, overrides: Iterable[str] = (), *, allow_code: Iterable[str] = ()
    ) -> RunConfig:
        """Read and validate a TOML file, with ``key=value`` overrides applied to it.

        Parameters
        ----------
        path : path
        overrides : iterable of str
        allow_code : iterable of str
            Modules and packages that configs may name from now on in this process, in addition to
            those of `fedsim.allowed_code`. Nothing is imported here.

        Raises
        ------
        FedsimError
            If the file cannot be read or anything in it is not allowed.
        """
        allow(allow_code)
        return cls._with_changes(read_tree(path), _parse_overrides(overrides))

    @classmethod
    @check_arguments
    def from_overrides(cls, overrides: Iterable[str]) -> RunConfig:
        """The defaults with ``key=value`` overrides applied to them."""
        return cls._with_changes({}, _parse_overrides(overrides))

    @classmethod
    @check_arguments
    def parse(cls, tree: Mapping[str, Any]) -> RunConfig:
        """Validate a nested mapping with kebab-case keys.

        Raises
        ------
        FedsimError
            If a value is not allowed; the message names its key, the value and what is allowed.
        """
        require_names(tree, "")
        return cls(**tree)

    @classmethod
    @check_arguments
    def from_run_config(cls, flat: Mapping[str, Scalar]) -> RunConfig:
        """Read a Flower run-config: a flat mapping with dotted keys."""
        return cls._with_changes({}, flat)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_run_config, (self.to_run_config(),)

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with dotted keys changed: ``config.replace(**{"client.lr": 0.1})``.

        If a change chooses another thing in a table (such as another mechanism), the old thing's
        settings are dropped if they are at their defaults. If a change unsets a key, keys that need
        it are dropped.
        """
        tree = self.to_tree()
        for table, key in self.implied:
            del tree[table][key]
        return self._with_changes(tree, changes)

    @classmethod
    def _with_changes(cls, tree: dict[str, Any], changes: Mapping[str, Any]) -> RunConfig:
        require_names(changes, "")
        drop_ineffective(cls, tree, changes)
        for key, value in changes.items():
            _assign(tree, key, value)
        if changes.keys() & {"client.name", "model.personal"}:
            drop_implied(tree, changes)
        return cls.parse(tree)

    def to_tree(self) -> dict[str, Any]:
        """Nested mapping as for any table; ``objects`` is left out if it is empty."""
        tree = super().to_tree()
        return tree if self.objects else {k: v for k, v in tree.items() if k != "objects"}

    def to_run_config(self) -> dict[str, Scalar]:
        """Flat mapping with dotted keys, for Flower; a table of options becomes a string."""
        return flatten(self.to_tree())

    def to_toml(self) -> str:
        """The complete config as TOML text."""
        return tomli_w.dumps(self.to_tree())

    @property
    def private(self) -> bool:
        """Whether the run claims client-level differential privacy."""
        bounded = self.mechanism.name != "none" and not self.mechanism.gives_no_privacy
        return bounded and self.noise.adds_noise

    @property
    def protects(self) -> bool:
        """Whether the run claims privacy at client or example level."""
        return self.private or self.client.private


def earlier_config(path: Path, flat: Mapping[str, Scalar] | None = None) -> RunConfig:
    """The config of an earlier run, perhaps one of another version of fedsim.

    Keys that did not exist when it began get their defaults.

    Parameters
    ----------
    path : path
        The run's config.toml.
    flat : mapping of str to Scalar, optional
        Flat config from a checkpoint, to use instead of the file.

    Raises
    ------
    FedsimError
        If this version of fedsim cannot read it.
    """
    try:
        return RunConfig.load(path) if flat is None else RunConfig.from_run_config(flat)
    except FedsimError as error:
        raise FedsimError(
            f"{path} belongs to a run of another version of fedsim, or was edited: {error} Choose "
            "another --out, and resume that run with the version that began it."
        ) from None


def read_config(path: Path) -> dict[str, Scalar]:
    """Read a config file of any version by dotted keys, without checking it.

    Raises
    ------
    FedsimError
        If it is not TOML.
    """
    return flatten(read_tree(path))


def read_tree(path: str | Path) -> dict[str, Any]:
    """Read a TOML file as a nested mapping."""
    try:
        with open(path, "rb", opener=regular_files.opener) as file:
            content = file.read(MAX_CONFIG + 1)
    except OSError as error:
        saved_config = Path(path) / "config.toml"
        advice = f" (its own config is {saved_config})" if saved_config.is_file() else ""
        raise FedsimError(f"cannot read the config {path}: {error.strerror}{advice}.") from None
    if len(content) > MAX_CONFIG:
        raise FedsimError(
            f"{path} is too large for a config; one has at most {MAX_CONFIG:,} bytes."
        )
    try:
        return regular_files.parse_toml(content)
    except ValueError as error:
        raise FedsimError(f"{path} is not valid TOML: {error}.") from None


def _parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    if isinstance(texts, Mapping):
        raise FedsimError(
            f"overrides is {as_text(texts)}; it must be a list of strings such as 'client.lr=0.1': "
            "replace(**{...}) of the config takes a mapping."
        )
    return dict(map(_parse_override, texts))


def _parse_override(text: str) -> tuple[str, Any]:
    require("overrides", text, expected(str))
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise FedsimError(
            f"--set {as_text(text)} is not of the form key=value, such as client.lr=0.1."
        )
    return key.strip(), read_value(value)


def _assign(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *tables, key = dotted.split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise FedsimError(
                f"{as_text(dotted)} cannot be set: '{table}' is a value, not a table."
            )
    tree[key] = value


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mapping of a flat config with dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        _assign(tree, key, value)
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """A nested mapping by dotted keys, a table of options as one string."""
    flat: dict[str, Scalar] = {}
    for key, value in tree.items():
        if key == "options" and isinstance(value, Mapping):
            flat[f"{prefix}{key}"] = write_options(value)
        elif isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
