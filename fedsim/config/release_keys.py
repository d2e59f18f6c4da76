"""Which keys of a config determine releases, the split, training, the code run and files read."""

from __future__ import annotations

from collections.abc import Iterator

from fedsim import registry
from fedsim.config.run_config import RunConfig
from fedsim.config.tables import (
    OUTSIDE_DIGEST,
    OUTSIDE_RELEASE,
    OUTSIDE_TRAINING,
    ConfigTable,
    ObjectTable,
    is_table,
)
from fedsim.config.values import Scalar
from fedsim.errors import FedsimError
from fedsim.privacy.digest import digest_of
from fedsim.settings import REQUIRED, NamesPath, Setting, settings_of


def release_digest(config: RunConfig) -> str:
    """Digest of a config whose noise multipliers are resolved.

    Two configs with the same digest release the same values with the same noise. It does not cover
    the examples, where they are stored, and the code of the user's own classes. Keys at their
    defaults are left out, so that a key that a version adds or removes changes no noise.

    Raises
    ------
    FedsimError
        If the config is not resolved by `fedsim.runs.resolve`.
    """
    for key, target in (
        ("noise.target-epsilon", config.noise.target_epsilon),
        ("client.noise.target-epsilon", config.client.noise.target_epsilon),
    ):
        if target is not None:
            raise FedsimError(f"{key} is {target!r}; a release digest is of a resolved config.")
    left_out = {*keys_outside_release()} | {
        key for key, setting in _settings(config) if OUTSIDE_DIGEST in setting.metadata
    }
    return digest_of(
        {key: value for key, value in changed_keys(config).items() if key not in left_out}
    )


def changed_keys(config: RunConfig) -> dict[str, Scalar]:
    """Keys that are not at their defaults, with their values."""
    defaults = {
        key: setting.write(setting.default)
        for key, setting in _settings(config)
        if setting.default is not REQUIRED
    }
    flat = config.to_run_config().items()
    return {key: value for key, value in flat if key not in defaults or value != defaults[key]}


def keys_outside_release() -> frozenset[str]:
    """Dotted keys that no release depends on, so that a resumed run may change them."""
    return frozenset(_outside_release(RunConfig))


def _outside_release(table: type[ConfigTable], marked: bool = False) -> Iterator[str]:
    """Dotted keys below a table that are marked `OUTSIDE_RELEASE`, or whose table is."""
    for setting in settings_of(table):
        outside = marked or OUTSIDE_RELEASE in setting.metadata
        if is_table(setting):
            yield from _outside_release(setting.type, outside)
        elif outside:
            yield table.key(setting.key)


def split_settings(config: RunConfig, objects: str | None = None) -> dict[str, Scalar]:
    """The population, and the settings that determine which client has which examples.

    Only if they are equal are two runs about the same clients, so that their costs add up. They are
    the same on all engines, also where nodes have their own examples: a run's ledger does not
    depend on its engine. Python objects enter by their public properties, as in ``objects``; by
    default the config's.
    """
    population: dict[str, Scalar] = {"population": config.partition.clients}
    seed = ("seed",) if getattr(config.partition.find(), "depends_on_seed", True) else ()
    outside = {*keys_outside_release(), "partition.clients", "data.normalize"}
    given = (config.objects if objects is None else objects).split(", ")
    named = [mark for mark in given if mark.startswith(("data=", "partition="))]
    return (
        population
        | ({"objects": ", ".join(named)} if named else {})
        | {
            key: value
            for key, value in config.to_run_config().items()
            if key not in outside and (key in seed or key.startswith(("data.", "partition.")))
        }
    )


def training_settings(config: RunConfig) -> tuple[tuple[str, Scalar], ...]:
    """Settings that determine how a client trains on its examples, by dotted key."""
    outside = {s.key for s in settings_of(RunConfig) if OUTSIDE_TRAINING in s.metadata}
    flat = config.to_run_config().items()
    return tuple((key, value) for key, value in flat if key.partition(".")[0] not in outside)


def _all_tables(table: ConfigTable) -> Iterator[ConfigTable]:
    """A table and all tables in it, innermost first."""
    for setting in settings_of(type(table)):
        value = getattr(table, setting.name)
        if isinstance(value, ConfigTable):
            yield from _all_tables(value)
    yield table


def _settings(config: RunConfig) -> Iterator[tuple[str, Setting]]:
    """Settings of all tables and of the things that they choose, each with its dotted key."""
    for table in _all_tables(config):
        own: tuple[Setting, ...] = ()
        if isinstance(table, ObjectTable):
            own = table.declared_settings(table.selected_name)
        for setting in (*settings_of(type(table)), *own):
            if not is_table(setting):
                yield table.key(setting.key), setting


def path_keys(config: RunConfig, *uses: str) -> dict[str, NamesPath]:
    """Marks of the keys that may name a file or directory, for one of ``uses`` or for any use."""
    return {
        key: mark
        for key, setting in _settings(config)
        for mark in setting.metadata
        if isinstance(mark, NamesPath) and (not uses or mark.use in uses)
    }


def text_options(config: RunConfig) -> list[tuple[str, str]]:
    """Options that are strings, of metrics and of code outside of fedsim: their keys and values."""
    options = [("task.metrics", options) for _, options in config.task.named_metrics()]
    for table in _all_tables(config):
        if isinstance(table, ObjectTable):
            options.append((table.key("options"), dict(table.options)))
    return [
        (f"{key}.{option}", value)
        for key, values in options
        for option, value in values.items()
        if isinstance(value, str)
    ]


def modules_in_config(config: RunConfig) -> list[tuple[str, str, str]]:
    """Code outside of fedsim that a config names: its key, its name and its module."""
    entries = [("task.metrics", "metric", name) for name, _ in config.task.named_metrics()]
    for table in _all_tables(config):
        if isinstance(table, ObjectTable):
            name = table.registered(table.selected_name)
            entries.append((table.key(table.selector), table.kind, name))
    modules = []
    for key, kind, name in entries:
        if ":" in name:
            modules.append((key, name, name.partition(":")[0].strip()))
        elif name in registry.plugins(kind):
            modules.append((key, name, registry.plugins(kind)[name].module))
    return modules
