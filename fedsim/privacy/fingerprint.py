"""Fingerprints by which a client, and nobody else, knows its own data again."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy import durable
from fedsim.privacy.archive import archived

__all__ = ["Fingerprints"]

_BYTES = 32


class Fingerprints:
    """HMAC-SHA256 under a key that stays where it was made.

    Without the key a fingerprint says nothing about what it is of, guesses included. Who
    loses the key loses no privacy: releases are charged again that were the same.

    Parameters
    ----------
    directory : path or None
        Where the key is, in a file that only its owner may read, made on first use; None: in
        memory, for this object alone.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._key: bytes | None = None if directory is not None else secrets.token_bytes(_BYTES)

    def of(self, contents: Iterable[bytes]) -> str:
        """Fingerprint of these parts, in this order, each as a whole."""
        if self._key is None:
            assert self._directory is not None
            self._key = _key_in(self._directory)
        code = hmac.new(self._key, digestmod=hashlib.sha256)
        for content in contents:
            # Lengths keep ("ab", "c") and ("a", "bc") apart.
            code.update(len(content).to_bytes(8, "little"))
            code.update(content)
        return code.hexdigest()


def _key_in(directory: Path) -> bytes:
    path = directory / "fingerprint.key"
    if not path.exists():
        # Of a run that was overwritten: the same data must be known again.
        before = archived(path)
        key = regular_files.read_bytes(before[-1]) if before else secrets.token_bytes(_BYTES)
        durable.create(path, key, mode=0o600)
    key = regular_files.read_bytes(path)
    if len(key) != _BYTES:
        raise FedsimError(
            f"{path} has {len(key)} bytes; a client's key must have {_BYTES}: remove it to have a "
            "new one made, and what is run again charged again."
        )
    return key
