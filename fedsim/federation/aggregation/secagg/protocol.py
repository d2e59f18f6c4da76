"""The messages of secure aggregation and its cryptography, on both sides.

First the messages: how entries are read, and the purposes of derived keys. Then key agreement,
secret sharing, sealed messages and masks. All but the secret sharing comes from the `cryptography`
package: X25519, HKDF-SHA256, ChaCha20-Poly1305, ChaCha20. All secrets come from the operating
system.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.app import ConfigRecord, Message

from fedsim.errors import FedsimError

RECORD = "secagg"
"""Name of the config record in the protocol's messages and replies."""
Stage = Literal["keys", "shares", "masked", "unmask"]
PREFIX = b"fedsim-secagg-1"
MAX_CLIENTS = 100_000

Words = npt.NDArray[np.uint64]
"""Vector of integers modulo 2^64: numpy's unsigned arithmetic wraps around."""

KEY_BYTES = 32
# Far above every secret: shares that do not fit together give a number below it at random, of which
# only one in 2^265 could pass for a secret (`join_secret`).
PRIME = 2**521 - 1
SHARE_BYTES = 66
"""Length of a share, which is a number below `PRIME`."""
_NONCE = bytes(12)
"""Nonce of sealed messages; constant, since each key seals only one message."""
SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Length of the shares of two secrets, sealed (with a tag of 16 bytes)."""


def context_of(run: str, server_round: int, nonce: bytes) -> bytes:
    """Byte string that binds keys and sealed messages to one attempt at a round."""
    return b"|".join([PREFIX, run.encode(), str(server_round).encode(), nonce])


def channel_purpose(context: bytes, sender: int, receiver: int) -> bytes:
    """Purpose of the key that seals one client's shares for another."""
    # Each direction has a key of its own, since all sealed messages have one nonce.
    return b"|".join([context, b"channel", str(sender).encode(), str(receiver).encode()])


def pair_purpose(context: bytes, first: bytes, second: bytes) -> bytes:
    """Purpose of the mask between two clients, in either order of their public keys."""
    return b"|".join([context, b"pair", min(first, second), max(first, second)])


def own_purpose(context: bytes) -> bytes:
    """Purpose of a client's own mask."""
    return context + b"|self"


def stage_of(message: Message) -> Stage | None:
    """The protocol stage of a message; None if the message is not of the protocol."""
    if not message.has_content():
        return None
    record = message.content.config_records.get(RECORD)
    stage = None if record is None else record.get("stage")
    return next((known for known in get_args(Stage) if known == stage), None)


def entries_of(message: Message) -> ConfigRecord:
    """The protocol's record of a message.

    Raises
    ------
    FedsimError
        If there is none.
    """
    record = message.content.config_records.get(RECORD)
    if record is None:
        raise FedsimError("a message of secure aggregation lacks its record.")
    return record


def numbers(record: Mapping[str, object], name: str) -> list[int]:
    """A record's list of distinct integers, 0 or more.

    Raises
    ------
    FedsimError
        If the entry is anything else.
    """
    entries = record.get(name)
    listed: list[Any] = entries if isinstance(entries, list) else [None]
    # By exact type: true and false are integers too.
    sound = all(type(entry) is int and 0 <= entry < 2**63 for entry in listed)
    if not sound or len(set(listed)) != len(listed) or len(listed) > MAX_CLIENTS:
        raise FedsimError(f"'{name}' of a message of secure aggregation is not a list of clients.")
    return listed


def byte_strings(record: Mapping[str, object], name: str, count: int, size: int) -> list[bytes]:
    """A record's list of ``count`` byte strings of one size.

    Raises
    ------
    FedsimError
        If the entry is anything else.
    """
    entries = record.get(name)
    listed = entries if isinstance(entries, list) else []
    if len(listed) != count or not all(type(e) is bytes and len(e) == size for e in listed):
        raise FedsimError(
            f"'{name}' of a message of secure aggregation is not {count} times {size} bytes."
        )
    return listed


def byte_string(record: Mapping[str, object], name: str, size: int) -> bytes:
    """A record's byte string of this size.

    Raises
    ------
    FedsimError
        If the entry is anything else.
    """
    entry = record.get(name)
    if not isinstance(entry, bytes) or len(entry) != size:
        raise FedsimError(f"'{name}' of a message of secure aggregation is not {size} bytes.")
    return entry


def join_shares(key_share: int, seed_share: int) -> bytes:
    """Concatenate a share of a client's mask key and one of its seed, for another client."""
    return key_share.to_bytes(SHARE_BYTES) + seed_share.to_bytes(SHARE_BYTES)


def new_key() -> bytes:
    """A private X25519 key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public key that belongs to a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def new_seed() -> bytes:
    """A random seed for a client's own mask."""
    return secrets.token_bytes(KEY_BYTES)


def agreed_key(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """The shared key of two clients, from one's private key and the other's public key.

    Raises
    ------
    FedsimError
        If the public key is invalid.
    """
    try:
        other_key = X25519PublicKey.from_public_bytes(public)
        # Raises for a point of small order as well, with which everybody knows the common key.
        common = X25519PrivateKey.from_private_bytes(private).exchange(other_key)
    except ValueError:
        raise FedsimError("a public key of secure aggregation is invalid.") from None
    return derived_key(common, purpose)


def derived_key(secret: bytes, purpose: bytes) -> bytes:
    """A key for one purpose, from a secret."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose).derive(secret)


def mask(key: bytes, size: int) -> Words:
    """Pseudorandom words ``[size]``: the key's ChaCha20 stream. A key is used for one mask."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), dtype="<u8").astype(np.uint64)


def seal(key: bytes, text: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate ``text``, under a key that seals nothing else."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, text, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """Inverse of `seal`.

    Raises
    ------
    FedsimError
        If it was sealed under another key or for another context, or was changed.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, context)
    except InvalidTag:
        raise FedsimError(
            "a share of a secret was changed in transit, or is another client's."
        ) from None


def split_secret(secret: bytes, threshold: int, count: int) -> list[int]:
    """Split a secret into shares at the points 1 to ``count``.

    Any ``threshold`` shares determine the secret; fewer reveal nothing of it. Source: Shamir 1979,
    over the integers modulo `PRIME`.
    """
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    shares = []
    for point in range(1, count + 1):
        value = 0
        # Horner's rule; the constant term, added last, is the secret.
        for coefficient in coefficients:
            value = (value * point + coefficient) % PRIME
        shares.append((value * point + int.from_bytes(secret)) % PRIME)
    return shares


@lru_cache(maxsize=64)
def join_weights(points: tuple[int, ...]) -> list[int]:
    """Lagrange weights at zero: the secret is the weighted sum of shares at these points."""
    weights = []
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


def join_secret(shares: Mapping[int, int]) -> bytes:
    """Recover a secret of `KEY_BYTES` from at least ``threshold`` shares, given by their points.

    Raises
    ------
    FedsimError
        If the shares do not belong to one secret of that length.
    """
    weights = join_weights(tuple(shares))
    value = sum(w * s for w, s in zip(weights, shares.values(), strict=True)) % PRIME
    if value >= 1 << 8 * KEY_BYTES:
        raise FedsimError("shares of a secret do not fit together.")
    return value.to_bytes(KEY_BYTES)
