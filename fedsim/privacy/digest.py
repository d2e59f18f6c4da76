"""Digests of settings, equal in any process and on any machine; keyed ones of protected data.

A hash of protected data without a key would let anyone check a guess of the data.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy import durable

LARGE = 2**16
"""Size in bytes above which an array enters the digest by its hash."""
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


KEY = "fingerprint.key"
_BYTES = 32


class Fingerprints:
    """HMAC-SHA256 of protected data, under a key that never leaves its directory.

    Without the key a fingerprint reveals nothing, and no guess can be checked against it. Losing
    the key costs no privacy: all later releases are then charged as new ones.

    Parameters
    ----------
    directory : path or None
        Directory of the key's file, which only its owner may read and which is created at first
        use. None keeps the key in memory, for this object alone.
    read_only : bool
        Whether to refuse a missing key instead of creating one.
    """

    def __init__(self, directory: Path | None, *, read_only: bool = False) -> None:
        self._directory, self._read_only = directory, read_only
        self._key: bytes | None = None if directory is not None else secrets.token_bytes(_BYTES)

    def of(self, contents: Iterable[bytes]) -> str:
        """Fingerprint of a sequence of parts.

        Raises
        ------
        FedsimError
            If the key is damaged, or missing where it may not be created.
        """
        code = self.code()
        for content in contents:
            # The lengths tell ("ab", "c") from ("a", "bc").
            code.update(len(content).to_bytes(8, "little"))
            code.update(content)
        return code.hexdigest()

    def code(self) -> hmac.HMAC:
        """An empty HMAC under the key, to be updated by the caller."""
        if self._key is None:
            assert self._directory is not None
            self._key = _key_in(self._directory, self._read_only)
        return hmac.new(self._key, digestmod=hashlib.sha256)


def _key_in(directory: Path, read_only: bool) -> bytes:
    path = directory / KEY
    if not path.exists() and read_only:
        raise FedsimError(f"{path} is missing; restore it.")
    if not path.exists():
        durable.create(path, secrets.token_bytes(_BYTES), mode=0o600)
    key = regular_files.read_bytes(path)
    if len(key) != _BYTES:
        raise FedsimError(
            f"{path} has {len(key)} bytes; a fingerprint's key must have {_BYTES}: restore it, or "
            "remove it: a new key is then made, which recognises no earlier release."
        )
    return key
