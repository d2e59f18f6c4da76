"""Fingerprints by which who made a release, and nobody else, recognises its data and sums."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy import durable

__all__ = ["KEY", "Fingerprints"]

KEY = "fingerprint.key"
_BYTES = 32


class Fingerprints:
    """HMAC-SHA256 under a key that stays where it was made.

    Without the key a fingerprint says nothing about what it is of, guesses included. Who
    loses the key loses no privacy: no release is taken for one that was made before.

    Parameters
    ----------
    directory : path or None
        Where the key is, in a file that only its owner may read, made on first use; None: in
        memory, for this object alone.
    read_only : bool
        Whether a key that is not there is refused instead of made.
    """

    def __init__(self, directory: Path | None, *, read_only: bool = False) -> None:
        self._directory, self._read_only = directory, read_only
        self._key: bytes | None = None if directory is not None else secrets.token_bytes(_BYTES)

    def of(self, contents: Iterable[bytes]) -> str:
        """Fingerprint of these parts, in this order, each as a whole.

        Raises
        ------
        FedsimError
            If the key is damaged, or missing where it may not be made.
        """
        code = self.code()
        for content in contents:
            # Lengths keep ("ab", "c") and ("a", "bc") apart.
            code.update(len(content).to_bytes(8, "little"))
            code.update(content)
        return code.hexdigest()

    def code(self) -> hmac.HMAC:
        """An HMAC under the key, of nothing as yet."""
        if self._key is None:
            assert self._directory is not None
            self._key = _key_in(self._directory, self._read_only)
        return hmac.new(self._key, digestmod=hashlib.sha256)


def _key_in(directory: Path, read_only: bool) -> bytes:
    path = directory / KEY
    if not path.exists() and read_only:
        raise FedsimError(f"{path} is missing; put back what was there.")
    if not path.exists():
        durable.create(path, secrets.token_bytes(_BYTES), mode=0o600)
    key = regular_files.read_bytes(path)
    if len(key) != _BYTES:
        raise FedsimError(
            f"{path} has {len(key)} bytes; a fingerprint's key must have {_BYTES}: put back what "
            "was there, or remove it to have a new one made, by which no earlier release is "
            "recognised."
        )
    return key
