"""What a config may say, in words: each key with its type, range, default and meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from fedsim import registry
from fedsim.config.choices import Choice, own_settings, written
from fedsim.config.keys import NamesOf, Section, belongs_to, to_empty
from fedsim.config.run_config import RunConfig
from fedsim.settings import Doc, Setting, allowed, settings_of

__all__ = ["Key", "choice_in", "choices_of", "keys", "summary_of"]


@dataclass(frozen=True)
class Key:
    """One key of a config.

    Attributes
    ----------
    name : str
        With dots.
    belongs_to : tuple of str
        The choices of its table beside which it stands; empty for all.
    type, allowed : str
        In words; ``allowed`` is empty if anything of the type is.
    default : object
        As a config writes it.
    doc : str
    """

    name: str
    belongs_to: tuple[str, ...]
    type: str
    allowed: str
    default: Any
    doc: str


def keys() -> list[Key]:
    """Every key that some config has, table by table."""
    return list(_keys(RunConfig, ""))


def choices_of(kind: str) -> list[tuple[str, str]]:
    """Names of a kind, with a line on each."""
    return [(name, summary_of(registry.find(kind, name, kind))) for name in registry.names(kind)]


def choice_in(table: str, name: str) -> str:
    """The line on what a table may name; empty where it may not name such a thing."""
    for section in _tables(RunConfig):
        if issubclass(section, Choice) and section.table == table:
            return dict(choices_of(section.kind)).get(name, "")
    return ""


def _tables(section: type[Section]) -> Iterator[type[Section]]:
    for field in section.model_fields.values():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, Section):
            yield model
            yield from _tables(model)


def summary_of(thing: Any) -> str:
    """The first line of its docstring."""
    return next(iter((thing.__doc__ or "").strip().splitlines()), "").replace("``", "`")


def _keys(section: type[Section], table: str) -> Iterator[Key]:
    inner: list[tuple[type[Section], str]] = []
    for field in section.model_fields.values():
        model, name = field.annotation, f"{table}{field.alias}"
        if isinstance(model, type) and issubclass(model, Section):
            inner.append((model, f"{name}."))
            continue
        yield _common(section, field, name)
        for names_of in (m for m in field.metadata if isinstance(m, NamesOf)):
            by_name = {n: _settings(names_of, n) for n in registry.names(names_of.kind)}
            yield from _shared(by_name, f"{name}.")
    if issubclass(section, Choice):
        names = registry.names(section.kind)
        yield from _shared({name: own_settings(section, name) for name in names}, table)
        chooses = f"{table}{section.selector} = 'module:name'"
        yield Key(
            f"{table}options", ("module:name",), "a table", "", "",
            f"Settings of what {chooses} stands for, by their names.",
        )  # fmt: skip
    for model, name in inner:
        yield from _keys(model, name)


def _common(section: type[Section], field: FieldInfo, name: str) -> Key:
    doc = next((m.documentation for m in field.metadata if isinstance(m, Doc)), "")
    chooses = issubclass(section, Choice) and field.alias == section.selector
    setting = Setting(name, name, field.annotation, tuple(_limits(field)), field.default)
    words = ", ".join(f"'{word}'" for word in registry.names(section.kind)) if chooses else ""  # type: ignore[attr-defined]
    return Key(
        name,
        tuple(belongs_to(field)),
        _type(field.annotation),
        f"{words} or 'module:name'" if words else allowed(setting),
        to_empty(field.default),
        doc,
    )


def _limits(field: FieldInfo) -> Iterator[Any]:
    yield from (entry for entry in field.metadata if isinstance(entry, Gt | Ge | Lt | Le))


def _settings(names_of: NamesOf, name: str) -> tuple[Setting, ...]:
    return settings_of(registry.find(names_of.kind, name, names_of.kind))


def _shared(by_name: Mapping[str, Sequence[Setting]], table: str) -> Iterator[Key]:
    """Keys of the things that may be named: those of one description and default together."""
    shared: dict[tuple[Any, ...], list[str]] = {}
    for name, settings in by_name.items():
        for setting in settings:
            shared.setdefault((setting.key, setting.doc, str(written(setting))), []).append(name)
    for (key, doc, _), names in sorted(shared.items(), key=lambda item: item[0][0]):
        setting = next(s for s in by_name[names[0]] if s.key == key)
        yield Key(
            f"{table}{key}", tuple(names), _type(setting.type), allowed(setting),
            written(setting), doc,
        )  # fmt: skip


_WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a string"}


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "a word"
    options = [option for option in get_args(annotation) if option is not type(None)]
    if len(options) < len(get_args(annotation)) and options:
        return f"{_type(options[0])}, or '' for unset"
    return _WORDS.get(annotation, "a string")
