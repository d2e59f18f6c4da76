"""Digests of settings: the same for equal settings, in any process and on any machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

LARGE = 2**16
"""Bytes of an array from which on its hash is taken."""
_SIMPLE = (bool, int, float, str, list, tuple, set, frozenset, Mapping)


def digest_of(settings: Mapping[str, Any]) -> str:
    """Hex digest (SHA-256) of named settings.

    A dataclass counts by its name and the fields it is made with, another object by its name
    and those of its attributes that are numbers, text or unset, or arrays and containers; a method
    by its object too, and a partial function by what it fills in. 1 and 1.0 are equal.
    """
    text = json.dumps(_plain(settings), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"fedsim release, version 1\n{text}".encode()).hexdigest()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return float(value) if abs(value) < 2**53 else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(entry) for entry in value), key=json.dumps)
    if hasattr(value, "tolist"):  # arrays and tensors, without loading what they are made of
        return _plain(value.tolist()) if getattr(value, "nbytes", 0) <= LARGE else _hashed(value)
    if is_dataclass(value) and not isinstance(value, type):
        made_with = {
            field.name: getattr(value, field.name) for field in fields(value) if field.init
        }
        return [_name(type(value)), _plain(made_with)]
    if isinstance(value, partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    if callable(value) and hasattr(value, "__qualname__"):
        owner = getattr(value, "__self__", None)
        named = owner is None or isinstance(owner, type | ModuleType)
        return _name(value) if named else [_name(value), _plain(owner)]
    # Other objects among its attributes may be anything, and refer to it in turn.
    simple = {
        name: attribute
        for name, attribute in getattr(value, "__dict__", {}).items()
        if attribute is None or isinstance(attribute, _SIMPLE) or hasattr(attribute, "tolist")
    }
    return [_name(type(value)), _plain(simple)]


def _hashed(array: Any) -> list[Any]:
    """What stands for an array or tensor that is too large to be written out."""
    host = array.detach().cpu() if hasattr(array, "detach") else array
    values = np.ascontiguousarray(host.double() if hasattr(host, "double") else host)
    return [str(array.dtype), list(array.shape), hashlib.sha256(values.tobytes()).hexdigest()]


def _name(definition: Any) -> str:
    # Where fedsim keeps a class may change; a user's may be one of many of its name.
    module = str(definition.__module__)
    ours = module.partition(".")[0] == "fedsim"
    return str(definition.__qualname__ if ours else f"{module}:{definition.__qualname__}")
