"""The manifest of a run: digests of its files when it ended, so that changes are detected.

``manifest.json`` has the SHA-256 digests of model, config and metrics, and the final hash and
number of lines of the ledgers, which other runs may extend. A signature of it (``ledger.sig``)
covers them all, and proves what a chain of hashes cannot: who wrote them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy import durable
from fedsim.privacy.laws.base import Level
from fedsim.privacy.ledger import Ledger, LedgerPosition
from fedsim.privacy.records import read_record, to_json

MANIFEST = "manifest.json"
FORMAT = 1
HASHED = ("model.safetensors", "config.toml", "metrics.csv")
"""Files whose digests a manifest has."""


@dataclass(frozen=True)
class Manifest:
    """Digests of a run's files.

    Attributes
    ----------
    sha256 : mapping of file name to digest
        Digests of those of `HASHED` that exist.
    ledgers : mapping of level to LedgerPosition
        Ends of the server's ledger (``client``) and of the clients' (``example``).
    """

    sha256: Mapping[str, str]
    ledgers: Mapping[Level, LedgerPosition]

    @classmethod
    def of(cls, run: Path, ledgers: Mapping[Level, Path]) -> Self:
        """The manifest of a run's directory in its present state.

        Parameters
        ----------
        run : path
        ledgers : mapping of level to path
            The run's ledgers; one that does not exist is left out.

        Raises
        ------
        OSError
            If a file cannot be read.
        FedsimError
            If a ledger is damaged.
        """
        return cls(
            {name: file_digest(run / name) for name in HASHED if (run / name).is_file()},
            {
                level: Ledger.read(path).position
                for level, path in ledgers.items()
                if path.is_file()
            },
        )

    def to_json(self) -> str:
        """Text of the file."""
        return json.dumps({"format": FORMAT, **to_json(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a manifest's file.

        Raises
        ------
        FedsimError
            If it does not exist, is damaged, or has another format.
        """
        try:
            data = json.loads(regular_files.read_text(path))
        except FileNotFoundError:
            raise FedsimError(
                "there is none: it was deleted, or the run was killed; `fedsim run ... --resume` "
                "writes one."
            ) from None
        except (OSError, ValueError, RecursionError):
            raise FedsimError("it is not one that fedsim wrote.") from None
        if isinstance(data, dict) and (version := data.pop("format", None)) != FORMAT:
            raise FedsimError(
                f"its format is {version!r}; this fedsim reads {FORMAT}: verify the run with the "
                "fedsim that made it."
            )
        return read_record(cls, data, "the manifest")


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb", opener=regular_files.opener) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# A prefix of the signed bytes: a signature that the key gave for another purpose is not valid here.
_SIGNED = b"fedsim manifest of a run, signed\n"
LEDGER_KEY = "FEDSIM_LEDGER_KEY"
"""Environment variable with the path of the signing key, used if a config gives none."""


def new_key(path: Path) -> Path:
    """Create a signing key, readable by its owner only; returns the path of its public key.

    Raises
    ------
    FedsimError
        If one of the two files exists.
    """
    public = path.with_name(f"{path.name}.pub")
    for key in (path, public):
        if key.exists():
            raise FedsimError(f"{key} exists; choose another name for the new key.")
    private_pem, public_pem = key_pair()
    durable.create(path, private_pem, mode=0o600)
    durable.create(public, public_pem)
    return public


def key_pair() -> tuple[bytes, bytes]:
    """New Ed25519 private and public key, as PEM."""
    key = Ed25519PrivateKey.generate()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, pkcs8, serialization.NoEncryption())
    public_format = serialization.PublicFormat.SubjectPublicKeyInfo
    return private, key.public_key().public_bytes(pem, public_format)


def signing_key(setting: str) -> Ed25519PrivateKey | None:
    """The key at the path of `noise.ledger-key`, or else of `LEDGER_KEY`; None if both are empty.

    Raises
    ------
    FedsimError
        If the file has no private key that `new_key` created.
    """
    name = "noise.ledger-key" if setting else LEDGER_KEY
    setting = setting or os.environ.get(LEDGER_KEY, "")
    if not setting:
        return None
    path = Path(setting)
    try:
        key = serialization.load_pem_private_key(regular_files.read_bytes(path), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise _no_key(name, path) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key(name, path)
    return key


def signature(key: Ed25519PrivateKey, manifest: bytes) -> str:
    """Signature of a run's manifest, as a line of JSON."""
    return json.dumps({"signature": key.sign(_SIGNED + manifest).hex()}) + "\n"


def check_signature(text: str, public: Path, manifest: bytes) -> str | None:
    """Reason why a signature is not valid for this manifest and key; None if it is valid.

    Raises
    ------
    FedsimError
        If the file ``public`` has no public key.
    """
    try:
        key: Any = serialization.load_pem_public_key(regular_files.read_bytes(public))
    except (OSError, ValueError) as error:
        raise _no_key("--public-key", public) from error
    if not isinstance(key, Ed25519PublicKey):
        raise _no_key("--public-key", public)
    try:
        signed = json.loads(text)
        key.verify(bytes.fromhex(signed["signature"]), _SIGNED + manifest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "the signature's file is not one that fedsim wrote"
    except InvalidSignature:
        return "the signature is not of this manifest and this key"
    return None


def _no_key(name: str, path: Path) -> FedsimError:
    return FedsimError(
        f"{name} = {str(path)!r}; it must be the path of an Ed25519 key, such as "
        "`fedsim key PATH` makes."
    )
