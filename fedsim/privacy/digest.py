"""Digests of settings, equal in any process and on any machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

HASHED_BYTES = 2**16
"""Size in bytes above which an array enters the digest by its hash."""
OUTSIDE_DIGEST = {"outside digest": True}
"""Metadata of a dataclass's field that does not enter the digest."""
_SIMPLE = (bool, int, float, str, list, tuple, set, frozenset, Mapping)


def digest_of(settings: Mapping[str, Any]) -> str:
    """Hex digest (SHA-256) of named settings.

    A dataclass enters by its class's name and the fields of its constructor; any other object by
    its class's name and those attributes that are None, numbers, strings, arrays or containers; a
    method by its name and its object; a partial function by its function and arguments. 1 and 1.0
    are equal.
    """
    text = json.dumps(_plain(settings), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"fedsim release, version 1\n{text}".encode()).hexdigest()


def _plain(value: Any) -> Any:
    """The value as JSON, by the rules of `digest_of`; changing them changes all digests."""
    if value is None or isinstance(value, bool | str):
        return value
    # 1 and 1.0 have one digest, since TOML and Python code may give either. A larger integer would
    # lose digits as a float, and two of them could collide.
    if isinstance(value, int | float):
        return float(value) if abs(value) < 2**53 else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(entry) for entry in value), key=json.dumps)
    if hasattr(value, "tolist"):  # arrays and tensors, without importing torch
        return (
            _plain(value.tolist())
            if getattr(value, "nbytes", 0) <= HASHED_BYTES
            else _hashed(value)
        )
    if is_dataclass(value) and not isinstance(value, type):
        made_with = {
            field.name: getattr(value, field.name)
            for field in fields(value)
            if field.init and field.metadata != OUTSIDE_DIGEST
        }
        return [_name(type(value)), _plain(made_with)]
    if isinstance(value, partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    if callable(value) and hasattr(value, "__qualname__"):
        owner = getattr(value, "__self__", None)
        named = owner is None or isinstance(owner, type | ModuleType)
        return _name(value) if named else [_name(value), _plain(owner)]
    # Attributes that are other objects are left out: they may be anything, and may refer back.
    simple = {
        name: attribute
        for name, attribute in getattr(value, "__dict__", {}).items()
        if attribute is None or isinstance(attribute, _SIMPLE) or hasattr(attribute, "tolist")
    }
    return [_name(type(value)), _plain(simple)]


def _hashed(array: Any) -> list[Any]:
    """Type, shape and hash of an array or tensor that is too large to be written out."""
    host = array.detach().cpu() if hasattr(array, "detach") else array
    values = np.ascontiguousarray(host.double() if hasattr(host, "double") else host)
    return [str(array.dtype), list(array.shape), hashlib.sha256(values.tobytes()).hexdigest()]


def _name(definition: Any) -> str:
    # fedsim's classes may move between modules, so that their module does not enter. Two classes
    # of a user may have the same name in different modules.
    module = str(definition.__module__)
    is_shipped = module.partition(".")[0] == "fedsim"
    return str(definition.__qualname__ if is_shipped else f"{module}:{definition.__qualname__}")
