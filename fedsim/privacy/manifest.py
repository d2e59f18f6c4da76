"""The manifest of a run: digests of its files when it ended, so that changes are detected.

``manifest.json`` has the ledger's head and number of lines, SHA-256 digests of the public files
(model, configs), HMACs of the other files under the run's key (``fingerprint.key``: no unkeyed
digest is written of anything that may depend on protected data), and the heads of the archived
ledgers and of the clients' ledgers. It reveals nothing that is not in those files. A signature of
it (``ledger.sig``) covers them all, and proves what a chain of hashes cannot: who wrote them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from fedsim.privacy.digest import Fingerprints
from fedsim.privacy.durable import ARCHIVE
from fedsim.privacy.ledger_lines import GENESIS, End
from fedsim.privacy.records import read_record, to_json

MANIFEST = "manifest.json"
FORMAT = 1
KEYED = ("metrics.csv", "summary.json", "done")
"""Files that enter the manifest by an HMAC."""
LEDGER = "ledger.jsonl"
"""Enters by an HMAC too: its notes are covered by no hash of its lines."""

_HASHED = ("model.safetensors", "config.toml")
_HASH = re.compile(rb'"hash":"([0-9a-f]{64})"')


@dataclass(frozen=True)
class Manifest:
    """Digests of a run's files.

    Attributes
    ----------
    ledger : End
    sha256 : mapping of path to digest
        Digests of model and config, and of the configs of overwritten runs.
    hmac : mapping of path to HMAC
        HMACs of those files of `KEYED` that exist, and of the ledger (not in older manifests).
    archive : mapping of path to End
        Ends of the ledgers of overwritten runs.
    clients : mapping of client id to End
        Ends of the clients' ledgers (example level), if they are on this machine.
    """

    ledger: End
    sha256: Mapping[str, str]
    hmac: Mapping[str, str]
    archive: Mapping[str, End] = field(default_factory=dict)
    clients: Mapping[str, End] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Path, clients: Path | None, fingerprints: Fingerprints) -> Self:
        """The manifest of a run's directory in its present state.

        Parameters
        ----------
        run : path
        clients : path or None
            Directory of the clients' ledgers.
        fingerprints : Fingerprints
            HMACs under the run's key.

        Raises
        ------
        OSError
            If a file cannot be read.
        """
        ledgers = {} if clients is None else {_client(p): p for p in clients.glob("client-*.jsonl")}
        archived = sorted((run / ARCHIVE).rglob("*.jsonl"))
        plain = [run / name for name in _HASHED if (run / name).is_file()]
        plain += sorted((run / ARCHIVE).glob(f"*/{_HASHED[1]}"))
        return cls(
            ledger=end_of(run / LEDGER),
            sha256={_relative_name(run, path): file_digest(path) for path in plain},
            hmac={
                name: fingerprints.of([name.encode(), regular_files.read_bytes(run / name)])
                for name in (*KEYED, LEDGER)
                if (run / name).is_file()
            },
            archive={_relative_name(run, path): end_of(path) for path in archived},
            clients={client: end_of(path) for client, path in sorted(ledgers.items())},
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
                "there is none: it was deleted, or the run was killed or made by an older fedsim; "
                "`fedsim run ... --resume` writes one."
            ) from None
        except (OSError, ValueError, RecursionError):
            raise FedsimError("it is not one that fedsim wrote.") from None
        if isinstance(data, dict) and (version := data.pop("format", FORMAT)) != FORMAT:
            raise FedsimError(
                f"its format is {version!r}; this fedsim reads {FORMAT}: verify the run with the "
                "fedsim that made it."
            )
        return read_record(cls, data, "the manifest")


def end_of(path: Path) -> End:
    """End of a ledger of any format, from its last complete line; nothing else is checked."""
    if not path.is_file():
        return End(GENESIS, 0)
    lines = regular_files.read_bytes(path).split(b"\n")[:-1]
    hashes = _HASH.findall(lines[-1]) if lines else []
    return End(hashes[-1].decode() if hashes else GENESIS, len(lines))


def _relative_name(run: Path, path: Path) -> str:
    return path.relative_to(run).as_posix()


def _client(path: Path) -> str:
    return path.stem.removeprefix("client-")


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb", opener=regular_files.opener) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SIGNATURE_FORMAT = 3
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
    signed = {"format": SIGNATURE_FORMAT, "signature": key.sign(_SIGNED + manifest).hex()}
    return json.dumps(signed, separators=(",", ":")) + "\n"


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
        if signed.get("format", 2) != SIGNATURE_FORMAT:
            return (
                f"the signature has format {signed.get('format', 2)} and this fedsim reads "
                f"{SIGNATURE_FORMAT}; older formats sign only the ledger's head: `fedsim run ... "
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
