"""Tables of a config: dataclasses of settings, read from TOML or Flower and written back.

A `ConfigTable` is a frozen dataclass whose fields declare type, range and meaning
(`fedsim.settings`) or are tables themselves. It is made from a tree of kebab-case keys, which it
checks. An `ObjectTable` also has the settings of the thing that it names: ``[client]`` with
``name = "adam"`` has the keys of every client, and those of Adam's dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from fedsim import registry
from fedsim.arguments import as_text
from fedsim.config.values import Scalar, read_options
from fedsim.errors import FedsimError
from fedsim.keywords import accepted, arguments_of
from fedsim.settings import Setting, read_setting, read_settings, settings_of
from fedsim.synonyms import closest_key


@dataclass(frozen=True)
class WithNames:
    """Marks a key that has an effect only if its table's ``name`` is one of ``names``."""

    names: tuple[str, ...]


Refusals: TypeAlias = Iterator[tuple[str, str]]
"""Keys of a config that break a rule, each with what it must be."""


@dataclass(frozen=True)
class Needs:
    """Marks a key that has an effect only if another key of its table is set."""

    key: str


@dataclass(frozen=True)
class NamesOf:
    """Marks a key whose value is a list of names of a kind, each with its options."""

    kind: str


OUTSIDE_RELEASE = object()
"""Marks a key or a table whose changes never change what a run releases.

It is not in the release digest, and a resumed run may change it.
"""

OUTSIDE_DIGEST = object()
"""Marks a key that a resumed run must keep, although other noise need not follow from it.

It says what is claimed of the released values, or whether the digest keys their noise at all.
"""

OUTSIDE_TRAINING = object()
"""Marks a key or a table that no trainer reads.

Clients of runs that differ only in such keys can train in common blocks.
"""


@dataclass(frozen=True, init=False)
class ConfigTable:
    """A table with kebab-case keys; unknown keys and wrong types are errors.

    Attributes
    ----------
    table : str
        Dotted name of the table; empty for the whole config.

    Raises
    ------
    FedsimError
        If a key or a value is not allowed.
    """

    table: ClassVar[str] = ""

    def refusals(self, config: Any) -> Refusals:
        """Keys that break a rule of the whole ``config``, each with what it must be."""
        yield from ()

    def check(self, config: Any) -> None:
        """Make the objects that refuse themselves what they cannot be in the whole ``config``.

        Raises
        ------
        FedsimError
        """

    def __init_subclass__(cls, table: str = "") -> None:
        cls.table = table

    def __init__(self, /, **tree: Any) -> None:
        settings = {setting.key: setting for setting in settings_of(type(self))}
        for key in tree:
            if key not in settings:
                raise self._unknown_among(key, list(settings))
        for key, setting in settings.items():
            value = setting.default
            if key in tree or is_table(setting):
                value = _read(setting, tree.get(key, {}), self.key(key))
            object.__setattr__(self, setting.name, value)
        for setting in settings.values():
            self._require_effect(setting)

    @classmethod
    def key(cls, key: str) -> str:
        """Dotted name of one of the table's keys."""
        return f"{cls.table}.{key}".lstrip(".")

    @classmethod
    def tables(cls) -> dict[str, type[ConfigTable]]:
        """The tables in this table, by key."""
        return {s.key: s.type for s in settings_of(cls) if is_table(s)}

    def to_tree(self) -> dict[str, Any]:
        """Complete nested mapping with kebab-case keys; the empty string means unset.

        Keys without effect, which belong to another choice, are left out.
        """
        tree = {}
        for setting in settings_of(type(self)):
            value = getattr(self, setting.name)
            if isinstance(value, ConfigTable):
                tree[setting.key] = value.to_tree()
            elif self._is_used(setting):
                tree[setting.key] = setting.write(value)
        return tree

    def _is_used(self, setting: Setting) -> bool:
        names = belongs_to(setting)
        return not names or getattr(self, "name", "") in names

    def _require_effect(self, setting: Setting) -> None:
        """Refuse a setting that would silently have no effect."""
        value = getattr(self, setting.name)
        if value != setting.default and not self._is_used(setting):
            raise FedsimError(
                f"{self.key(setting.key)} = {value!r} has no effect with {self.table}.name = "
                f"'{getattr(self, 'name', '')}'; it belongs to {', '.join(belongs_to(setting))}."
            )
        for needed_key in (m.key for m in setting.metadata if isinstance(m, Needs)):
            needed_value = getattr(self, needed_key.replace("-", "_"))
            if value != setting.default and not needed_value:
                needed = {"False": "= true", "0": "is above 0"}.get(str(needed_value), "is set")
                raise FedsimError(
                    f"{self.key(setting.key)} = {as_text(value)}; it must be "
                    f"{as_text(setting.default) if setting.default else 'unset'} unless "
                    f"{self.key(needed_key)} {needed}."
                )

    @classmethod
    def _unknown_among(cls, key: str, keys: list[str]) -> FedsimError:
        hint = closest_key(cls.table, key, keys)
        top = "The top level" if hint else "the top level"
        where = f"[{cls.table}]" if cls.table else top
        return FedsimError(
            f"unknown key {as_text(cls.key(key))};{hint} {where} takes {', '.join(keys)}."
        )


@dataclass(frozen=True, init=False)
class ObjectTable(ConfigTable):
    """A table that names a thing of a kind, and has that thing's settings as keys.

    Attributes
    ----------
    kind : str
        Kind in `fedsim.registry`; by default the last part of the table's name.
    selector : str
        The key that names the thing.
    derived_fields : tuple of str
        Fields of such things that other keys of a config determine.
    note : str
        End of the message that refuses a key of another thing.
    own : mapping of str to value
        Settings of the thing, by Python name; they are also attributes of the table.
    options : mapping of str to Scalar
        Instead of ``object_settings``, for a thing that does not declare its settings
        (``module:name``).
    """

    kind: ClassVar[str]
    selector: ClassVar[str] = "name"
    derived_fields: ClassVar[tuple[str, ...]] = ()
    wrong_key_hint: ClassVar[str] = ""

    def __init_subclass__(cls, table: str = "") -> None:
        super().__init_subclass__(table)
        if "kind" not in vars(cls):
            cls.kind = table.rpartition(".")[2]

    object_settings: Mapping[str, Any] = field(init=False)
    options: Mapping[str, Scalar] = field(init=False)

    def __init__(self, /, **tree: Any) -> None:
        name = self.selected_in(tree)
        settings, options = self._settings_and_options(name, tree)
        # Flower has no null, and an app's table has every key: the empty string means not given.
        values = {s.key: v for s in settings if not isinstance(v := tree.pop(s.key, ""), str) or v}
        object.__setattr__(self, "object_settings", read_settings(settings, values, self.table))
        object.__setattr__(self, "options", options)
        super().__init__(**tree)

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are no fields. While unpickling, even `object_settings` is
        # missing.
        try:
            return vars(self)["object_settings"][name]
        except KeyError:
            raise AttributeError(f"[{self.table}] has no key {name!r}") from None

    @property
    def selected_name(self) -> str:
        """Name of the chosen thing."""
        return str(getattr(self, self.selector))

    def find(self) -> Callable[..., Any]:
        """Import the chosen class or function."""
        return registry.find(
            self.kind, self.registered(self.selected_name), self.key(self.selector)
        )

    def settings_for(
        self, factory: Callable[..., Any], derived: Collection[str] = ()
    ) -> Mapping[str, Any]:
        """Keyword arguments of the chosen thing, by Python name; checks options.

        Raises
        ------
        FedsimError
            If options do not fit the thing, or one is ``derived`` from other keys.
        """
        if not self.has_options(self.selected_name):
            return self.object_settings
        name = self.selected_name
        return arguments_of(factory, name, self.options, self.key("options"), derived)

    @property
    def settings_by_key(self) -> Mapping[str, Any]:
        """The chosen thing's settings or options by key, as a config writes them."""
        settings = self.declared_settings(self.selected_name)
        return self.options or {s.key: s.write(self.object_settings[s.name]) for s in settings}

    def make(self, **derived: Any) -> Any:
        """Make the chosen thing, with those of the arguments ``derived`` that it takes.

        Raises
        ------
        FedsimError
            If there is none, it is of another kind, or its options do not fit it. Errors raised by
            the user's own code are passed on unchanged.
        """
        # fedsim's own need no search of the directory, which would cost more than all the rest.
        is_path = ":" in self.selected_name
        with registry.current_directory_importable() if is_path else nullcontext():
            maker = self.find()
            instance = maker(**self.settings_for(maker, tuple(derived)), **accepted(maker, derived))
        registry.require_kind(self.kind, instance, self.key(self.selector), self.selected_name)
        return instance

    def to_tree(self) -> dict[str, Any]:
        """Nested mapping as for any table: first the selector, then the thing's settings."""
        chosen, tree = {self.selector: self.selected_name}, super().to_tree()
        if self.has_options(self.selected_name):
            return {**chosen, **tree, "options": dict(self.options)}
        return {**chosen, **self.settings_by_key, **tree}

    @classmethod
    def registered(cls, name: str) -> str:
        """Name in the registry of the thing that a config calls ``name``."""
        return name

    @classmethod
    def has_options(cls, name: str) -> bool:
        """Whether a thing takes undeclared options rather than declared settings."""
        name = cls.registered(name)
        if ":" in name:
            return True
        plugged = name in registry.plugins(cls.kind)
        return plugged and not dataclasses.is_dataclass(
            registry.find(cls.kind, name, cls.key(cls.selector))
        )

    @classmethod
    def declared_settings(cls, name: str) -> tuple[Setting, ...]:
        """Settings that a thing adds, without ``derived_fields``; none for ``module:name``."""
        name, key = cls.registered(name), cls.key(cls.selector)
        if name not in registry.names(cls.kind) or cls.has_options(name):
            return ()
        factory = registry.find(cls.kind, name, key)
        settings = tuple(s for s in settings_of(factory) if s.name not in cls.derived_fields)
        fields = {setting.name for setting in settings_of(cls)}
        if clash := {"object_settings", "options", *fields} & {
            setting.name for setting in settings
        }:
            raise FedsimError(
                f"{key} = '{name}' has a setting '{min(clash)}', which is a key of every "
                f"[{cls.table}]; it must have another name."
            )
        return settings

    @classmethod
    def names_with_key(cls, key: str) -> list[str]:
        """Names of the kind's things that have this key."""
        names = registry.names(cls.kind)
        return [name for name in names if any(s.key == key for s in cls.declared_settings(name))]

    @classmethod
    def selected_in(cls, tree: Mapping[str, Any]) -> str:
        """Name of the thing that a tree chooses.

        Raises
        ------
        FedsimError
            If there is no such thing.
        """
        setting = next(s for s in settings_of(cls) if s.key == cls.selector)
        key = cls.key(cls.selector)
        name: str = read_setting(setting, tree.get(cls.selector, setting.default), key)
        if ":" not in name and cls.registered(name) not in registry.names(cls.kind):
            raise registry.unknown_name_error(cls.kind, name, key)
        return name

    def _settings_and_options(
        self, name: str, values: dict[str, Any]
    ) -> tuple[tuple[Setting, ...], Mapping[str, Scalar]]:
        """Settings and options of a thing; options that are settings become keys of ``values``."""
        options, key = values.pop("options", ""), self.key("options")
        if isinstance(options, str):
            options = read_options(options, key)
        if not isinstance(options, Mapping):
            raise FedsimError(f"{key} = {as_text(options)}; it must be a table.")
        require_names(options, key)
        settings = self.declared_settings(name)
        common = {setting.key for setting in settings_of(type(self))}
        if not self.has_options(name):
            for option, value in options.items():
                if option == self.selector or values.get(option, "") != "":
                    raise FedsimError(
                        f"{key}.{option} and {self.key(option)} are both set; set one of them."
                    )
                values[option] = value
            options = {}
        for option, value in options.items():
            _check_option(f"{key}.{option}", value)
        known_keys = {setting.key for setting in settings} | common
        for unknown_key in [k for k, value in values.items() if k not in known_keys]:
            # An app's table of defaults has settings of all choices, which are empty strings.
            if values[unknown_key] == "" and self.names_with_key(unknown_key):
                del values[unknown_key]
            else:
                raise self._unknown_key_error(name, unknown_key, values[unknown_key])
        return settings, options

    @classmethod
    def _unknown_key_error(cls, name: str, key: str, value: Any) -> FedsimError:
        selection = f"{cls.table}.{cls.selector} = '{name}'"
        if names := cls.names_with_key(key):
            return FedsimError(
                f"{cls.key(key)} = {as_text(value)} has no effect with {selection}; it belongs to "
                f"{', '.join(names)}. Leave it out, or unset it by --set {cls.key(key)}=."
                f"{cls.wrong_key_hint}"
            )
        if cls.has_options(name):
            where = f"[{cls.table}.options]"
            return FedsimError(
                f"unknown key '{cls.key(key)}'; settings of {selection} belong in {where}."
            )
        own_keys = [setting.key for setting in cls.declared_settings(name)]
        return cls._unknown_among(key, [*(s.key for s in settings_of(cls)), *own_keys])


def require_names(tree: Mapping[Any, Any], key: str) -> None:
    """Refuse a table from Python with a key that is no string.

    Raises
    ------
    FedsimError
    """
    for name in tree:
        if not isinstance(name, str):
            raise FedsimError(
                f"{as_text(name)} is a key of {key or 'the config'}; a key must be a string."
            )


def is_table(setting: Setting) -> bool:
    """Whether a field is a nested table."""
    return isinstance(setting.type, type) and issubclass(setting.type, ConfigTable)


def belongs_to(setting: Setting) -> tuple[str, ...]:
    """Values of the table's ``name`` with which a key has an effect; empty for all."""
    return next((entry.names for entry in setting.metadata if isinstance(entry, WithNames)), ())


def drop_ineffective(
    table: type[ConfigTable], tree: dict[str, Any], changes: Mapping[str, Any]
) -> None:
    """Drop keys from a tree that changes leave without effect.

    These need a key that is unset, or are defaults of a thing that is no longer chosen.
    """
    for key, inner in table.tables().items():
        if isinstance(tree.get(key), dict):
            drop_ineffective(inner, tree[key], changes)
    for setting in settings_of(table):
        needs = [table.key(m.key) for m in setting.metadata if isinstance(m, Needs)]
        unset = any(not changes.get(key, True) for key in needs)
        if unset and table.key(setting.key) not in changes:
            tree.pop(setting.key, None)
    if not issubclass(table, ObjectTable):
        return
    old, new = table.selected_in(tree), changes.get(table.key(table.selector))
    if new is None or new == old or table.has_options(old):
        return
    for setting in table.declared_settings(old):
        at_default = tree.get(setting.key) == setting.write(setting.default)
        if at_default and table.key(setting.key) not in changes:
            del tree[setting.key]


def _read(setting: Setting, value: Any, key: str) -> Any:
    if not is_table(setting):
        return read_setting(setting, value, key)
    if isinstance(value, setting.type):
        return value
    if not isinstance(value, Mapping):
        example_key = f"{key}.{settings_of(setting.type)[0].key}"
        raise FedsimError(
            f"{key} = {as_text(value)}; it must be a table of settings such as {example_key}."
        )
    require_names(value, key)
    return setting.type(**value)


def _check_option(key: str, value: Any) -> None:
    if not isinstance(value, bool | int | float | str):
        raise FedsimError(
            f"{key} = {as_text(value)}; it must be a number, a string, true or false."
        )
    if isinstance(value, float) and value - value != 0:  # NaN or infinite
        raise FedsimError(f"{key} = {as_text(value)}; it must be a finite number.")
