"""Records: frozen dataclasses as JSON holds them, and back again.

What a ledger, a manifest or a law in one says is a dataclass of numbers, words, tables and other
such records. Its fields' types say how it is read; an infinite number is the string "inf".
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from fedsim.arguments import expected, shown
from fedsim.errors import FedsimError
from fedsim.settings import settings_of

Record = TypeVar("Record")


def to_json(record: Any, *, without: Collection[str] = ()) -> dict[str, Any]:
    """A record by its fields, in their order, with kebab-case keys."""
    names = (field.name for field in fields(record) if field.name not in without)
    return {name.replace("_", "-"): json_value(getattr(record, name)) for name in names}


def json_value(value: Any) -> Any:
    """A value, or all that is in a container, as JSON holds it."""
    if value is None or isinstance(value, str | int):
        return value
    if is_dataclass(value):
        return value.to_dict() if hasattr(value, "to_dict") else to_json(value)
    if isinstance(value, Mapping):
        return {name: json_value(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(entry) for entry in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def read_record(kind: type[Record], data: object, noun: str, **others: Any) -> Record:
    """A record from what JSON holds, with kebab-case keys.

    Parameters
    ----------
    kind : dataclass
    data : object
    noun : str
        What sentences call it.
    others
        Fields that are not in ``data``.

    Raises
    ------
    FedsimError
        If a field is missing, unknown, or of another type than the dataclass says, or as the
        dataclass does.
    """
    known = {s.key: s for s in settings_of(kind) if s.name not in others}
    if not isinstance(data, Mapping):
        raise FedsimError(f"{noun} is {shown(data)}; it must be a table.")
    if data.keys() != known.keys():
        raise FedsimError(f"{noun} has the fields {sorted(data)}; it must have {sorted(known)}.")
    for key, setting in known.items():
        others[setting.name] = _from_json(setting.type, data[key], f"{noun}'s {key}")
    return kind(**others)


def _from_json(kind: Any, value: Any, name: str) -> Any:
    """A value of this type; what is of it already stays."""
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
    raise FedsimError(f"{name} is {shown(value)}; it must be {allowed.words}.")
