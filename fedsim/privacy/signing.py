"""Signatures of a run's manifest: what a chain of hashes alone cannot show, that it is yours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy import durable

__all__ = ["LEDGER_KEY", "check_signature", "key_pair", "new_key", "private_key", "signature"]

FORMAT = 3
_SIGNED = b"fedsim manifest of a run, signed\n"
LEDGER_KEY = "FEDSIM_LEDGER_KEY"
"""Environment variable: the private key that signs ledgers here, where no config names one."""


def new_key(path: Path) -> Path:
    """Make a key that signs ledgers, for its owner's eyes only; where its public half is.

    Raises
    ------
    FedsimError
        If there is a file already.
    """
    public = path.with_name(f"{path.name}.pub")
    for taken in (path, public):
        if taken.exists():
            raise FedsimError(f"{taken} exists; choose another name for the new key.")
    private_pem, public_pem = key_pair()
    durable.create(path, private_pem, mode=0o600)
    durable.create(public, public_pem)
    return public


def key_pair() -> tuple[bytes, bytes]:
    """A new Ed25519 key and its public half, as PEM."""
    key = Ed25519PrivateKey.generate()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, pkcs8, serialization.NoEncryption())
    public_format = serialization.PublicFormat.SubjectPublicKeyInfo
    return private, key.public_key().public_bytes(pem, public_format)


def private_key(path: Path) -> Ed25519PrivateKey:
    """The key in a file that `new_key` made.

    Raises
    ------
    FedsimError
        If there is none.
    """
    try:
        key = serialization.load_pem_private_key(regular_files.read_bytes(path), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise _no_key("noise.ledger-key", path) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key("noise.ledger-key", path)
    return key


def signature(key: Ed25519PrivateKey, manifest: bytes) -> str:
    """A signature of a run's manifest, as a line of JSON."""
    signed = {"format": FORMAT, "signature": key.sign(_SIGNED + manifest).hex()}
    return json.dumps(signed, separators=(",", ":")) + "\n"


def check_signature(text: str, public: Path, manifest: bytes) -> str | None:
    """Why a signature is not of this manifest under this key; None if it is.

    Raises
    ------
    FedsimError
        If there is no public key in the file.
    """
    try:
        key: Any = serialization.load_pem_public_key(regular_files.read_bytes(public))
    except (OSError, ValueError) as error:
        raise _no_key("--public-key", public) from error
    if not isinstance(key, Ed25519PublicKey):
        raise _no_key("--public-key", public)
    try:
        signed = json.loads(text)
        if signed.get("format", 2) != FORMAT:
            return (
                f"the signature has format {signed.get('format', 2)} and this fedsim reads "
                f"{FORMAT}; before that, only the ledger's head was signed: `fedsim run ... "
                "--resume` with the key signs all of it"
            )
        key.verify(bytes.fromhex(signed["signature"]), _SIGNED + manifest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "the signature's file is not one that fedsim wrote"
    except InvalidSignature:
        return "the signature is not of this manifest and this key"
    return None


def _no_key(name: str, path: Path) -> FedsimError:
    return FedsimError(
        f"{name} = {str(path)!r}; it must be the path of an Ed25519 key, such as "
        "`fedsim privacy --new-key PATH` makes."
    )
