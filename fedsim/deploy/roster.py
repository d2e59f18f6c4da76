"""Which registered key is which client: a file on the operator's side that no node can change."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from fedsim import regular_files
from fedsim.deploy.certificates import write_public
from fedsim.errors import FedsimError

__all__ = ["CLIENTS", "read_roster", "write_roster"]

CLIENTS = "FEDSIM_CLIENTS"
"""Environment variable: where a ServerApp finds the roster; empty where nodes have no keys."""

_HEADER = """\
# Client id of each SuperNode's registered key: the SHA-256 of its SubjectPublicKeyInfo.
# Nodes whose key is not listed take part in nothing, whatever they say about themselves.
"""


def write_roster(path: Path, roster: Mapping[str, int]) -> None:
    """Write client ids by key digest."""
    content = _HEADER + tomli_w.dumps({"clients": dict(roster)})
    write_public(path, content.encode())


def read_roster(path: Path) -> dict[str, int]:
    """Read what `write_roster` wrote, or an operator has edited.

    Raises
    ------
    FedsimError
        If the file is none, or gives two keys one client id.
    """
    try:
        clients = tomllib.loads(regular_files.read_text(path))["clients"]
        if not isinstance(clients, dict):
            raise ValueError("clients is no table")
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise FedsimError(
            f"{path} is no list of clients ({error}); `fedsim deploy init` writes one."
        ) from None
    for digest, client in clients.items():
        is_id = type(client) is int and 0 <= client < 2**63
        if re.fullmatch("[0-9a-f]{64}", digest) is None or not is_id:
            raise FedsimError(
                f"{path} says {digest!r:.80} = {client!r:.80}; it must say the SHA-256 of a key, "
                "64 hex digits in small letters, and a client id, an integer from 0."
            )
    if len(set(clients.values())) < len(clients):
        raise FedsimError(f"{path} gives two keys one client id; each key is another client.")
    return dict(clients)
