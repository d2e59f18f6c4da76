"""Tables of a config: dataclasses of settings, read from TOML or Flower and written back.

A `ConfigTable` is a frozen dataclass whose fields say their type, range and meaning
(`fedsim.settings`) or are tables themselves. It is made from a tree of kebab-case keys, which it
checks; a `Choice` has, besides, the settings of the thing that it names: ``[client]`` with
``name = "adam"`` has the keys that every client has, and those of Adam's dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedsim import registry
from fedsim.arguments import keywords_of, shown
from fedsim.config.values import Scalar, read_options, read_options_of
from fedsim.errors import FedsimError
from fedsim.settings import Setting, read_setting, read_settings, settings_of
from fedsim.synonyms import closest_key


@dataclass(frozen=True)
class Beside:
    """Marks a key that has a meaning only where its table's ``name`` is one of ``names``."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Needs:
    """Marks a key that has a meaning only where another key of its table is set."""

    key: str


@dataclass(frozen=True)
class NamesOf:
    """Marks a key whose value is names of things of a kind, each with its options."""

    kind: str


OUTSIDE_RELEASE = object()
"""Marks a key, or a table, no change of which changes what a run releases."""

OUTSIDE_TRAINING = object()
"""Marks one that no trainer reads: clients of runs that differ in it train in common blocks.

They are numbered by run, and their examples are those of its partition.
"""


@dataclass(frozen=True, init=False)
class ConfigTable:
    """A table with kebab-case keys; unknown keys and wrong types are errors.

    Attributes
    ----------
    table : str
        Its name in a config, with dots; empty for the whole.

    Raises
    ------
    FedsimError
        If a key or a value is not allowed, in one sentence.
    """

    table: ClassVar[str] = ""

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
        """One of its keys, with dots."""
        return f"{cls.table}.{key}".lstrip(".")

    @classmethod
    def tables(cls) -> dict[str, type[ConfigTable]]:
        """The tables in it, by their keys."""
        return {s.key: s.type for s in settings_of(cls) if is_table(s)}

    def to_tree(self) -> dict[str, Any]:
        """Nested mapping with kebab-case keys, complete; unset is the empty string.

        Keys that belong to another choice than its own are left out.
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
        """Refuse a setting that would silently do nothing: that is a mistake."""
        value = getattr(self, setting.name)
        if value != setting.default and not self._is_used(setting):
            raise FedsimError(
                f"{self.key(setting.key)} = {value!r} has no effect with {self.table}.name = "
                f"'{getattr(self, 'name', '')}'; it belongs to {', '.join(belongs_to(setting))}."
            )
        for needed in (m.key for m in setting.metadata if isinstance(m, Needs)):
            other = getattr(self, needed.replace("-", "_"))
            if value != setting.default and not other:
                raise FedsimError(
                    f"{self.key(setting.key)} = {shown(value)}; it must be "
                    f"{shown(setting.default) if setting.default else 'unset'} unless "
                    f"{self.key(needed)} {'= true' if other is False else 'is set'}."
                )

    @classmethod
    def _unknown_among(cls, key: str, keys: list[str]) -> FedsimError:
        hint = closest_key(cls.table, key, keys)
        where = f"[{cls.table}]" if cls.table else "the top level"
        return FedsimError(
            f"unknown key {shown(cls.key(key))};{hint} {where} takes {', '.join(keys)}."
        )


@dataclass(frozen=True, init=False)
class Choice(ConfigTable):
    """A table that names a thing of a kind, and has its settings for keys.

    Attributes
    ----------
    kind : str
        As `fedsim.registry` calls it; what the table is called, if nothing else is said.
    selector : str
        The key that names the thing.
    filled : tuple of str
        Fields of such things that other keys of a config say.
    note : str
        What a refusal of another thing's key ends with.
    own : mapping of str to value
        The settings of the thing, by Python's names; they are attributes of the table too.
    options : mapping of str to Scalar
        In their place those of ``module:name``, which describes none.
    """

    kind: ClassVar[str]
    selector: ClassVar[str] = "name"
    filled: ClassVar[tuple[str, ...]] = ()
    note: ClassVar[str] = ""

    def __init_subclass__(cls, table: str = "") -> None:
        super().__init_subclass__(table)
        if "kind" not in vars(cls):
            cls.kind = table.rpartition(".")[2]

    own: Mapping[str, Any] = field(init=False)
    options: Mapping[str, Scalar] = field(init=False)

    def __init__(self, /, **tree: Any) -> None:
        name = self.name_in(tree)
        settings, options = self._settings_and_options(name, tree)
        # Flower has no null and an app's table every key: the empty string is none given.
        given = {s.key: v for s in settings if (v := tree.pop(s.key, "")) != ""}
        object.__setattr__(self, "own", read_settings(settings, given, self.table))
        object.__setattr__(self, "options", options)
        super().__init__(**tree)

    def __getattr__(self, name: str) -> Any:
        # Only what is no field comes here; while an object is unpickled nothing is.
        try:
            return vars(self)["own"][name]
        except KeyError:
            raise AttributeError(f"[{self.table}] has no key {name!r}") from None

    @property
    def chosen(self) -> str:
        """The name of the thing."""
        name: str = getattr(self, self.selector)
        return name

    def find(self) -> Callable[..., Any]:
        """The class or function that is named."""
        name = self.registered(self.chosen)
        return registry.find(self.kind, name, self.key(self.selector))

    def settings_for(
        self, thing: Callable[..., Any], filled: Collection[str] = ()
    ) -> Mapping[str, Any]:
        """What it is called with, by Python's names; options are checked here.

        Raises
        ------
        FedsimError
            If these are not what it takes, or one is ``filled`` by other keys.
        """
        if not self.has_options(self.chosen):
            return self.own
        return read_options_of(thing, self.chosen, self.options, self.key("options"), filled)

    def make(self, **filled: Any) -> Any:
        """The thing, which of what other tables say, ``filled``, gets what it takes.

        Raises
        ------
        FedsimError
            If there is none, it is of another kind, or its options are not what it takes. Errors of
            the user's own code come through as they are.
        """
        # fedsim's own are found without the directory, whose search costs more than the rest.
        place = registry.current_directory_importable() if ":" in self.chosen else nullcontext()
        key = self.key(self.selector)
        with place:
            thing = self.find()
            named, others = keywords_of(thing)
            given = {k: v for k, v in filled.items() if others or k in named}
            made = thing(**self.settings_for(thing, tuple(filled)), **given)
        registry.require_kind(self.kind, made, key, self.chosen)
        return made

    def to_tree(self) -> dict[str, Any]:
        """As of any table: what it names stands first, and the settings of that next."""
        tree = super().to_tree()
        own = {s.key: s.write(self.own[s.name]) for s in self.own_settings(self.chosen)}
        first = {self.selector: tree.pop(self.selector)}
        options = {"options": dict(self.options)} if self.has_options(self.chosen) else {}
        return {**first, **own, **tree, **options}

    @classmethod
    def registered(cls, name: str) -> str:
        """What a thing is called in the registry, by what a config calls it."""
        return name

    @classmethod
    def has_options(cls, name: str) -> bool:
        """Whether what a thing is made with are options, and no keys: it does not describe them."""
        if ":" in name:
            return True
        name = cls.registered(name)
        plugged = name in registry.plugins(cls.kind)
        return plugged and not dataclasses.is_dataclass(
            registry.find(cls.kind, name, cls.key(cls.selector))
        )

    @classmethod
    def own_settings(cls, name: str) -> tuple[Setting, ...]:
        """What a thing brings to the table, less what other keys say; none of ``module:name``."""
        name, key = cls.registered(name), cls.key(cls.selector)
        if name not in registry.names(cls.kind) or cls.has_options(name):
            return ()
        thing = registry.find(cls.kind, name, key)
        settings = tuple(s for s in settings_of(thing) if s.name not in cls.filled)
        fields = {setting.name for setting in settings_of(cls)}
        if clash := {"own", "options", *fields} & {setting.name for setting in settings}:
            raise FedsimError(
                f"{key} = '{name}' has a setting '{min(clash)}', which is a key of every "
                f"[{cls.table}]; it must be called something else."
            )
        return settings

    @classmethod
    def takers(cls, key: str) -> list[str]:
        """Names of the things of its kind that have this key."""
        return [
            name
            for name in registry.names(cls.kind)
            if key in {setting.key for setting in cls.own_settings(name)}
        ]

    @classmethod
    def name_in(cls, tree: Mapping[str, Any]) -> str:
        """The name of the thing that a tree chooses.

        Raises
        ------
        FedsimError
            If there is no such thing.
        """
        setting = next(s for s in settings_of(cls) if s.key == cls.selector)
        key = cls.key(cls.selector)
        name: str = read_setting(setting, tree.get(cls.selector, setting.default), key)
        if ":" not in name and cls.registered(name) not in registry.names(cls.kind):
            raise registry.unknown_name(cls.kind, name, key)
        return name

    def _settings_and_options(
        self, name: str, given: dict[str, Any]
    ) -> tuple[tuple[Setting, ...], Mapping[str, Scalar]]:
        """What the thing takes; options that are settings become keys of ``given``."""
        options, key = given.pop("options", ""), self.key("options")
        if isinstance(options, str):
            options = read_options(options, key)
        if not isinstance(options, Mapping):
            raise FedsimError(f"{key} = {shown(options)}; it must be a table.")
        settings = self.own_settings(name)
        common = {setting.key for setting in settings_of(type(self))}
        if not self.has_options(name):
            for option, value in options.items():
                if option == self.selector or given.get(option, "") != "":
                    raise FedsimError(
                        f"{key}.{option} is given, and so is {self.key(option)}; give one."
                    )
                given[option] = value
            options = {}
        for option, value in options.items():
            _check_option(f"{key}.{option}", value)
        known = {setting.key for setting in settings} | common
        for other in [k for k, value in given.items() if k not in known]:
            # Settings of another choice may stand there empty, as in an app's table of defaults.
            if given[other] == "" and self.takers(other):
                del given[other]
            else:
                raise self._unknown_beside(name, other, given[other])
        return settings, options

    @classmethod
    def _unknown_beside(cls, name: str, key: str, value: Any) -> FedsimError:
        chosen = f"{cls.table}.{cls.selector} = '{name}'"
        if names := cls.takers(key):
            return FedsimError(
                f"{cls.key(key)} = {shown(value)} has no effect with {chosen}; it belongs to "
                f"{', '.join(names)}. Leave it out, or unset it by --set {cls.key(key)}=.{cls.note}"
            )
        if cls.has_options(name):
            return FedsimError(
                f"unknown key '{cls.key(key)}'; settings of {chosen} stand in "
                f"[{cls.table}.options]."
            )
        own = [setting.key for setting in cls.own_settings(name)]
        return cls._unknown_among(key, [*(s.key for s in settings_of(cls)), *own])


def is_table(setting: Setting) -> bool:
    """Whether a field is a table in a table."""
    return isinstance(setting.type, type) and issubclass(setting.type, ConfigTable)


def belongs_to(setting: Setting) -> tuple[str, ...]:
    """The names of its table beside which alone a key has a meaning; none for any."""
    return next((entry.names for entry in setting.metadata if isinstance(entry, Beside)), ())


def drop_switched(
    table: type[ConfigTable], tree: dict[str, Any], changes: Mapping[str, Any]
) -> None:
    """Drop from a tree what a change leaves without effect.

    That is what needs a key which it unsets, and what it no longer chooses, where at its default.
    """
    for key, inner in table.tables().items():
        if isinstance(tree.get(key), dict):
            drop_switched(inner, tree[key], changes)
    for setting in settings_of(table):
        needs = [table.key(m.key) for m in setting.metadata if isinstance(m, Needs)]
        unset = any(not changes.get(key, True) for key in needs)
        if unset and table.key(setting.key) not in changes:
            tree.pop(setting.key, None)
    if not issubclass(table, Choice):
        return
    old, new = table.name_in(tree), changes.get(table.key(table.selector))
    if new is None or new == old or table.has_options(old):
        return
    for setting in table.own_settings(old):
        at_default = tree.get(setting.key) == setting.write(setting.default)
        if at_default and table.key(setting.key) not in changes:
            del tree[setting.key]


def _read(setting: Setting, value: Any, key: str) -> Any:
    if not is_table(setting):
        return read_setting(setting, value, key)
    if isinstance(value, setting.type):
        return value
    if not isinstance(value, Mapping):
        such = f"{key}.{settings_of(setting.type)[0].key}"
        raise FedsimError(f"{key} = {shown(value)}; it must be a table of settings such as {such}.")
    return setting.type(**value)


def _check_option(key: str, value: Any) -> None:
    if not isinstance(value, bool | int | float | str):
        raise FedsimError(f"{key} = {shown(value)}; it must be a number, a string, true or false.")
    if isinstance(value, float) and value - value != 0:  # NaN or infinite
        raise FedsimError(f"{key} = {shown(value)}; it must be a finite number.")
