"""Records: frozen dataclasses, written as JSON and read back.

The contents of a ledger, a manifest or a law are dataclasses of numbers, strings, tables and other
such records. The types of the fields determine how JSON is read; infinity is the string "inf".
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from fedsim.arguments import as_text, expected
from fedsim.errors import FedsimError
from fedsim.settings import settings_of

Record = TypeVar("Record")


def to_json(record: Any, *, without: Collection[str] = ()) -> dict[str, Any]:
    """The record's fields in their order, with kebab-case keys."""
    names = (field.name for field in fields(record) if field.name not in without)
    return {name.replace("_", "-"): json_value(getattr(record, name)) for name in names}


def json_value(value: Any) -> Any:
    """A field's value in JSON; containers and records recursively."""
    if value is None or isinstance(value, str | int):
        return value
    if is_dataclass(value):
        return value.to_dict() if hasattr(value, "to_dict") else to_json(value)
    if isinstance(value, Mapping):
        return {name: json_value(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(entry) for entry in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def read_record(kind: type[Record], data: object, noun: str, **values: Any) -> Record:
    """Build a record from parsed JSON with kebab-case keys.

    Parameters
    ----------
    kind : dataclass
        Class of the record.
    data : object
        Parsed JSON, of any type.
    noun : str
        The record's name in error messages.
    others
        Values of fields that ``data`` does not have.

    Raises
    ------
    FedsimError
        If a field is missing, unknown or of a wrong type, or the class refuses a value.
    """
    settings = {s.key: s for s in settings_of(kind) if s.name not in values}
    if not isinstance(data, Mapping):
        raise FedsimError(f"{noun} is {as_text(data)}; it must be a table.")
    if data.keys() != settings.keys():
        raise FedsimError(f"{noun} has the fields {sorted(data)}; it must have {sorted(settings)}.")
    for key, setting in settings.items():
        values[setting.name] = _from_json(setting.type, data[key], f"{noun}'s {key}")
    return kind(**values)


def _from_json(kind: Any, value: Any, name: str) -> Any:
    """Convert parsed JSON to a field's type; a value that has the type already is unchanged."""
    allowed = expected(kind)
    if type(value) in allowed.types:
        return float(value) if kind is float else value
    if not isinstance(value, Mapping | list) and allowed.fits(value):
        return value
    if value == "inf" and float in allowed.types:
        return math.inf
    inner = [option for option in get_args(kind) if option is not type(None)]
    if get_origin(kind) in (Union, UnionType) and len(inner) == 1:
        return _from_json(inner[0], value, name)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_from_json(inner[0], entry, name) for entry in value)
    if get_origin(kind) is abc.Mapping and isinstance(value, Mapping):
        return {key: _from_json(inner[1], entry, f"{name} {key}") for key, entry in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        return read_record(kind, value, name)
    raise FedsimError(f"{name} is {as_text(value)}; it must be {allowed.words}.")
