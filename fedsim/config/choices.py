"""Tables whose keys follow from the thing that they name.

A table ``[client]`` with ``name = "adam"`` has the keys that every client has, and those of Adam:
the fields of its dataclass. For each choice there is a model of the whole config with these keys
and no others, so that whatever reads, checks or writes a config sees them as keys like any.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, create_model
from pydantic_core import PydanticCustomError

from fedsim import registry
from fedsim.config.keys import Section, from_empty, shown, to_empty
from fedsim.config.values import Scalar, read_options
from fedsim.errors import FedsimError
from fedsim.settings import REQUIRED, Between, Doc, Setting, Text, settings_of

__all__ = [
    "Choice",
    "model_field",
    "model_of",
    "own_settings",
    "prepared",
    "switched",
    "takers",
    "unknown",
]

Options = Annotated[
    dict[str, Scalar], Doc("Settings of a class or function of your own, by their names.")
]


class Choice(Section):
    """A table that names a thing of a kind, and has its settings for keys.

    Attributes
    ----------
    kind : str
        As `fedsim.registry` calls it.
    selector : str
        The key that names the thing.
    filled : tuple of str
        Fields of such things that other keys of a config say.
    """

    kind: ClassVar[str]
    selector: ClassVar[str] = "name"
    filled: ClassVar[tuple[str, ...]] = ()
    named: ClassVar[str] = ""
    """The thing whose settings this model has."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def chosen(self) -> str:
        """The name of the thing."""
        name: str = getattr(self, self.selector)
        return name

    def values(self) -> dict[str, Any]:
        """The settings of the thing, by the names of its fields."""
        if self.has_options(self.chosen):
            return dict(self.options)
        return {s.name: getattr(self, s.name) for s in own_settings(type(self), self.chosen)}

    @classmethod
    def knows(cls, name: str) -> bool:
        """Whether there is such a thing, or may be."""
        return ":" in name or cls.registered(name) in registry.names(cls.kind)

    @classmethod
    def registered(cls, name: str) -> str:
        """What a thing is called in the registry, by what a config calls it."""
        return name

    @classmethod
    def has_options(cls, name: str) -> bool:
        """Whether what a thing is made with are options, and no keys: it does not describe them."""
        if ":" in name:
            return True
        name, key = cls.registered(name), f"{cls.table}.{cls.selector}"
        plugged = name in registry.plugins(cls.kind)
        return plugged and not dataclasses.is_dataclass(registry.find(cls.kind, name, key))


def prepared(
    section: type[Section], tree: Mapping[str, Any], table: str = ""
) -> tuple[type[Section], dict[str, Any]]:
    """The model of a table with the keys of what it and those in it name, and what it reads.

    Raises
    ------
    FedsimError
        If a name or a key is no good.
    """
    tree, inner = dict(tree), []
    for attribute, field in section.model_fields.items():
        kept, key = field.annotation, str(field.alias)
        if not (isinstance(kept, type) and issubclass(kept, Section)):
            continue
        given = tree.get(key, {})
        if not isinstance(given, Mapping):
            raise FedsimError(f"{table}{key} = {shown(given)}; it must be a table.")
        model, tree[key] = prepared(kept, given, f"{table}{key}.")
        inner.append((attribute, model))
    name = ""
    if issubclass(section, Choice):
        name = _chosen(section, tree)
        _merge_options(section, name, tree, table)
        for key in _unset(section, name, tree):
            del tree[key]
    return _model(section, name, tuple(inner)), tree


def switched(
    section: type[Section], tree: dict[str, Any], changes: Mapping[str, Any], table: str = ""
) -> None:
    """Drop from a tree the settings that follow what a change chooses: those at their defaults."""
    for field in section.model_fields.values():
        inner, key = field.annotation, str(field.alias)
        if (
            isinstance(inner, type)
            and issubclass(inner, Section)
            and isinstance(tree.get(key), dict)
        ):
            switched(inner, tree[key], changes, f"{table}{key}.")
    if not issubclass(section, Choice):
        return
    old, new = _chosen(section, tree), changes.get(f"{table}{section.selector}")
    if new is None or new == old or not section.knows(old) or section.has_options(old):
        return
    for setting in own_settings(section, old):
        if f"{table}{setting.key}" not in changes and tree.get(setting.key) == written(setting):
            del tree[setting.key]


def takers(section: type[Choice], key: str) -> list[str]:
    """Names of the things of a table's kind that have this key."""
    return [
        name
        for name in registry.names(section.kind)
        if key in {setting.key for setting in own_settings(section, name)}
    ]


def own_settings(section: type[Choice], name: str) -> tuple[Setting, ...]:
    """What a thing brings to a table, less what other keys say; nothing for ``module:name``."""
    name = section.registered(name)
    if name not in registry.names(section.kind) or section.has_options(name):
        return ()
    table = f"{section.table}.{section.selector}"
    thing = registry.find(section.kind, name, table)
    settings = tuple(s for s in settings_of(thing) if s.name not in section.filled)
    clash = {"options", *_base(section).model_fields} & {setting.name for setting in settings}
    if clash:
        raise FedsimError(
            f"{table} = '{name}' has a setting '{min(clash)}', which is a key of every "
            f"[{section.table}]; it must be called something else."
        )
    return settings


def written(setting: Setting) -> Any:
    """The default of a setting, as a config writes it."""
    if setting.default is None or setting.default is REQUIRED:
        return ""
    return setting.text.write(setting.default) if setting.text else setting.default


def _chosen(section: type[Choice], tree: Mapping[str, Any]) -> str:
    default = section.model_fields[section.selector].default
    name = tree.get(section.selector, default)
    if not isinstance(name, str):
        return str(default)  # and the model will say what is wrong
    if not section.knows(name):
        raise unknown(section.kind, name, f"{section.table}.{section.selector}")
    return name


def unknown(kind: str, name: str, key: str) -> FedsimError:
    """That a key names nothing of a kind that is allowed here, and what there is of it."""
    registry.refuse_plugin(kind, name, key)
    known = registry.names(kind)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" did you mean '{close[0]}'? It" if close else " it"
    return FedsimError(
        f"{key} = {shown(name)};{hint} must be {', '.join(repr(word) for word in known)} or "
        "'module:name'."
    )


def _merge_options(section: type[Choice], name: str, tree: dict[str, Any], table: str) -> None:
    """What ``options`` say in a string is said in keys, where the keys are known."""
    options = tree.get("options", "")
    if isinstance(options, str):
        options = read_options(options, f"{table}options")
    if section.has_options(name):
        tree["options"] = options
        return
    tree.pop("options", None)
    if not isinstance(options, Mapping):
        raise FedsimError(f"{table}options = {shown(options)}; it must be a table.")
    for key, value in options.items():
        if tree.get(key, "") != "":
            raise FedsimError(f"{table}options.{key} is given, and so is {table}{key}; give one.")
        tree[key] = value


def _unset(section: type[Choice], name: str, tree: Mapping[str, Any]) -> list[str]:
    """Keys of any thing of the kind that are written as the empty string: they are not set."""
    common = {str(field.alias) for field in section.model_fields.values()}
    empty = [key for key, value in tree.items() if value == "" and key not in common]
    own = {setting.key for setting in own_settings(section, name)}
    return [key for key in empty if key in own or takers(section, key)]


def model_of(section: type[Choice], name: str) -> type[Section]:
    """A table's model with the keys of the thing of this name."""
    return _model(section, name, ())


@cache
def _model(
    section: type[Section], name: str, inner: tuple[tuple[str, type[Section]], ...]
) -> type[Section]:
    fields: dict[str, Any] = {}
    for attribute, model in inner:
        if model is not section.model_fields[attribute].annotation:
            info = section.model_fields[attribute]
            default = model.model_construct() if _incomplete(model) else model()
            fields[attribute] = (
                model,
                Field(default, json_schema_extra=info.json_schema_extra),
            )
    if issubclass(section, Choice):
        if section.has_options(name):
            fields["options"] = (Options, {})
        for setting in own_settings(section, name):
            fields[setting.name] = model_field(setting)
    if not fields and not name:
        return section
    return _with_name(create_model(section.__name__, __base__=section, **fields), name)


def _with_name(model: type[Section], name: str) -> type[Section]:
    if issubclass(model, Choice):
        model.named = name
    return model


def _incomplete(model: type[Section]) -> bool:
    return any(field.is_required() for field in model.model_fields.values())


def _base(section: type[Section]) -> type[Section]:
    """The table itself, without what it names."""
    return next(c for c in section.__mro__ if c.__module__ != __name__ or c is Choice)


def model_field(setting: Setting) -> tuple[Any, Any]:
    """A setting as a field of a model: its type with its rules, and its default."""
    default = ... if setting.default is REQUIRED else setting.default
    plain = setting.type if setting.text is None else Any
    return Annotated[(plain, setting, *_rules(setting))], default


def _rules(setting: Setting) -> Iterator[Any]:
    if setting.text is not None:
        yield AfterValidator(_reading(setting.text))
        yield PlainSerializer(setting.text.write)
    if type(None) in get_args(setting.type):
        yield BeforeValidator(from_empty)
        yield PlainSerializer(to_empty)
    for entry in setting.metadata:
        yield AfterValidator(_within(entry)) if isinstance(entry, Between) else entry


def _reading(text: Text) -> Any:
    def read(value: Any) -> Any:
        try:
            return text.read(value)
        except FedsimError:
            raise
        except (TypeError, AttributeError, ValueError):
            raise PydanticCustomError("text", "a string, as its description says") from None

    return read


def _within(limits: Between) -> Any:
    def check(value: float | None) -> float | None:
        if value is not None and not limits.low <= value <= limits.high:
            raise PydanticCustomError("between", "{allowed}", {"allowed": str(limits)})
        return value

    return check
