"""Describes a config's keys: in words, as a template, as Flower's table, as a JSON schema."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

import tomli_w

from fedsim import registry
from fedsim.config.run_config import RunConfig
from fedsim.config.tables import ConfigTable, NamesOf, ObjectTable, belongs_to, is_table
from fedsim.settings import Ge, Gt, Le, Lt, Setting, allowed, settings_of, type_in_words


@dataclass(frozen=True)
class Key:
    """One key of a config.

    Attributes
    ----------
    name : str
        Dotted name.
    belongs_to : tuple of str
        The choices of its table that have this key; empty for all.
    type, allowed : str
        In words; ``allowed`` is empty if every value of the type is allowed.
    default : object
        Default value as a config writes it.
    doc : str
    """

    name: str
    belongs_to: tuple[str, ...]
    type: str
    allowed: str
    default: Any
    doc: str


def keys() -> list[Key]:
    """All keys of all possible configs, table by table."""
    return list(_keys(RunConfig))


def object_names(kind: str) -> list[tuple[str, str]]:
    """Names of a kind, each with the first line of its docstring."""
    described = []
    for name in registry.names(kind):
        doc = registry.find(kind, name, kind).__doc__ or ""
        line = next(iter(doc.strip().splitlines()), "")
        described.append((name, line.replace("``", "`")))
    return described


def object_tables() -> list[tuple[str, str]]:
    """Tables that name a thing, each with the thing's kind."""
    return [
        (table.table, table.kind) for table in _tables(RunConfig) if issubclass(table, ObjectTable)
    ]


def object_summary(table: str, name: str) -> str:
    """Docstring's first line of a thing that a table may name; empty if it may not."""
    kind = dict(object_tables()).get(table)
    return dict(object_names(kind)).get(name, "") if kind else ""


def _tables(table: type[ConfigTable]) -> Iterator[type[ConfigTable]]:
    for inner in table.tables().values():
        yield inner
        yield from _tables(inner)


def _keys(table: type[ConfigTable]) -> Iterator[Key]:
    for setting in settings_of(table):
        if is_table(setting):
            continue
        key = _key(table.key(setting.key), belongs_to(setting), setting)
        if issubclass(table, ObjectTable) and setting.key == table.selector:
            words = ", ".join(f"'{word}'" for word in registry.names(table.kind))
            key = replace(key, allowed=f"{words} or 'module:name'")
        yield key
        for names in (m for m in setting.metadata if isinstance(m, NamesOf)):
            entries = {
                n: registry.find(names.kind, n, names.kind) for n in registry.names(names.kind)
            }
            settings_by_name = {name: settings_of(entry) for name, entry in entries.items()}
            yield from _shared(settings_by_name, f"{table.key(setting.key)}.")
    if issubclass(table, ObjectTable):
        settings_by_name = {
            name: table.declared_settings(name) for name in registry.names(table.kind)
        }
        yield from _shared(settings_by_name, table.key(""))
        yield Key(
            table.key("options"),
            ("module:name",),
            "a table",
            "",
            "",
            f"Settings of what {table.key(table.selector)} = 'module:name' stands for, by their "
            "names.",
        )
    for inner in table.tables().values():
        yield from _keys(inner)


def _key(name: str, names: Sequence[str], setting: Setting) -> Key:
    kind = type_in_words(setting.type)
    default = setting.write(setting.default)
    return Key(name, tuple(names), kind, allowed(setting), default, setting.doc)


def _shared(settings_by_name: Mapping[str, Sequence[Setting]], table: str) -> Iterator[Key]:
    """Keys of several things; those with the same name, description and default are one."""
    shared: dict[tuple[str, ...], list[str]] = {}
    settings_of_key: dict[tuple[str, ...], Setting] = {}
    for name, settings in settings_by_name.items():
        for setting in settings:
            identity = (setting.key, setting.doc, str(setting.write(setting.default)))
            shared.setdefault(identity, []).append(name)
            settings_of_key.setdefault(identity, setting)
    for entry in sorted(shared, key=lambda entry: entry[0]):
        yield _key(f"{table}{entry[0]}", shared[entry], settings_of_key[entry])


def template(config: RunConfig) -> str:
    """A config as TOML with comments, which reads as the same config."""
    described: dict[str, list[Key]] = {}
    for key in keys():
        described.setdefault(key.name, []).append(key)
    lines = ["# A run of fedsim. A key that is left out has its default.", ""]
    lines += _template_of(config.to_tree(), "", described)
    return "\n".join(lines).rstrip() + "\n"


def _template_of(
    tree: Mapping[str, Any], table: str, described: Mapping[str, list[Key]]
) -> Iterator[str]:
    strings = {value for value in tree.values() if isinstance(value, str)}
    inner = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    for key, value in tree.items():
        if key in inner:
            continue
        entries = described[f"{table}{key}"]
        entry = next((e for e in entries if strings & {*e.belongs_to}), entries[0])
        words = f"{entry.doc} {entry.allowed[:1].upper()}{entry.allowed[1:]}".strip()
        words += "." if entry.allowed else ""
        yield from textwrap.wrap(words, 92, initial_indent="# ", subsequent_indent="# ")
        yield tomli_w.dumps({key: value}).rstrip()
    yield ""
    for key, value in inner.items():
        yield f"[{table}{key}]"
        if key == "options":
            yield from (tomli_w.dumps({k: v}).rstrip() for k, v in value.items())
            yield ""
        else:
            yield from _template_of(value, f"{table}{key}.", described)


def flower_table() -> dict[str, Any]:
    """An app's table of defaults; Flower lets a run change only keys that are in it.

    Settings of things that tables name are the empty string, since defaults depend on the thing.
    """
    return _flower_table(RunConfig, RunConfig().to_tree())


def _flower_table(table: type[ConfigTable], tree: dict[str, Any]) -> dict[str, Any]:
    settings = [setting for setting in settings_of(table) if not is_table(setting)]
    flat = {s.key: tree.get(s.key, s.write(s.default)) for s in settings}
    if issubclass(table, ObjectTable):
        for name in registry.names(table.kind):
            if name not in registry.plugins(table.kind):
                flat |= {setting.key: "" for setting in table.declared_settings(name)}
        flat["options"] = ""
    return flat | {key: _flower_table(t, tree[key]) for key, t in table.tables().items()}


def schema() -> dict[str, Any]:
    """The JSON schema, draft 2020-12, by which an editor completes and checks a TOML file.

    A table's allowed keys depend on the thing that it names.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fedsim config",
        **_schema_of(RunConfig),
    }


_OPTIONS = {
    "type": ["object", "string"],
    "description": "Settings of a class or function of your own, by their names.",
}


def _schema_of(table: type[ConfigTable]) -> dict[str, Any]:
    properties = {
        s.key: _schema_of(s.type) if is_table(s) else _property(s) for s in settings_of(table)
    }
    described: dict[str, Any] = {"type": "object", "description": table.__doc__}
    if not issubclass(table, ObjectTable):
        return {**described, "properties": properties, "additionalProperties": False}
    selector, names = table.selector, registry.names(table.kind)
    name_schemas = [{"enum": list(names)}, {"type": "string", "pattern": ":|/|\\.(npz|csv)$"}]
    properties[selector].pop("type")
    properties[selector]["anyOf"] = name_schemas
    properties["options"] = _OPTIONS
    branches = []
    for name in names:
        condition: dict[str, Any] = {"properties": {selector: {"const": name}}}
        if name != properties[selector]["default"]:
            condition["required"] = [selector]
        added = {setting.key: _property(setting) for setting in table.declared_settings(name)}
        consequence = {"properties": {**properties, **added}, "additionalProperties": False}
        branches.append({"if": condition, "then": consequence})
    return {**described, "properties": properties, "allOf": branches}


_JSON_TYPES = {float: "number", int: "integer", bool: "boolean", str: "string"}
_JSON_LIMITS = {
    Gt: ("gt", "exclusiveMinimum"),
    Ge: ("ge", "minimum"),
    Lt: ("lt", "exclusiveMaximum"),
    Le: ("le", "maximum"),
}


def _property(setting: Setting) -> dict[str, Any]:
    """A setting as JSON schema; a setting with a `Text` may have any type."""
    described: dict[str, Any] = {
        "description": setting.doc,
        "default": setting.write(setting.default),
    }
    if setting.text is not None:
        return described
    options = [option for option in get_args(setting.type) if option is not type(None)]
    if get_origin(setting.type) is Literal:
        return {"enum": options, **described}
    limited: dict[str, Any] = {}
    for kind in options or [setting.type]:
        if kind in _JSON_TYPES:
            limited["type"] = _JSON_TYPES[kind]
    for entry in setting.metadata:
        if type(entry) in _JSON_LIMITS:
            attribute, word = _JSON_LIMITS[type(entry)]
            limited[word] = getattr(entry, attribute)
    if options:  # None is allowed too, which a config writes as the empty string
        return {"anyOf": [limited, {"const": ""}], **described}
    return {**limited, **described}
