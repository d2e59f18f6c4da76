"""Reading and writing the files of a federation's parties that people may edit.

These are the parties' settings, and the roster with the client id of each registered key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import tomli_w

from fedsim import regular_files
from fedsim.deploy.certificates import write_public
from fedsim.errors import FedsimError
from fedsim.settings import REQUIRED, NotAllowedError, Text, read_setting, settings_of


def _read_names(value: Any) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return tuple(value)
    raise NotAllowedError("a list of strings")


Names = Annotated[tuple[str, ...], Text(_read_names, ", ".join)]


def write_party(path: Path, party: Any, tables: str = "") -> None:
    """Write the settings of a party (a dataclass), followed by the text ``tables``."""
    settings = {
        field.name.replace("_", "-"): getattr(party, field.name)
        for field in fields(party)
        if field.name != "directory"
    }
    write_public(path, f"{tomli_w.dumps(settings)}{tables}".encode())


def read_party(path: Path, party: type[Any]) -> dict[str, Any]:
    """Read the values of a party's fields from a file of `write_party`, which may be edited.

    Raises
    ------
    FedsimError
        If the file is missing or is not TOML, or has an unknown key or an invalid value.
    """
    try:
        tree = regular_files.read_toml(path)
    except OSError:
        raise FedsimError(f"{path} is missing; `fedsim deploy init` makes it.") from None
    except ValueError as error:
        raise FedsimError(f"{path} is not valid TOML: {error}.") from None
    tree.pop("policy", None)
    return read_table(tree, party, str(path))


def read_table(
    tree: Mapping[str, Any],
    party: type[Any],
    file: str,
    *,
    filled_in: Collection[str] = ("directory",),
) -> dict[str, Any]:
    """Read the values of the fields of ``party`` (a dataclass) from a table in an edited file.

    ``file`` names the file in errors; the fields ``filled_in`` are set by the caller.

    Raises
    ------
    FedsimError
        If a key is unknown or missing, or a value is not allowed.
    """
    settings = {s.key: s for s in settings_of(party) if s.name not in filled_in}
    if unknown := sorted(set(tree) - set(settings)):
        raise FedsimError(f"{file} has the key {unknown[0]!r}; it may have {sorted(settings)}.")
    values = {}
    for key, setting in settings.items():
        if key in tree:
            values[setting.name] = read_setting(setting, tree[key], f"{file} says {key}")
        elif setting.default is REQUIRED:
            raise FedsimError(f"{file} lacks the key {key!r}; `fedsim deploy init` writes it.")
    return values


_ROSTER_HEADER = """\
# Client id of each SuperNode's registered key: the SHA-256 of its SubjectPublicKeyInfo.
# Nodes whose key is not listed take part in nothing, whatever they say about themselves.
"""


def write_roster(path: Path, roster: Mapping[str, int]) -> None:
    """Write the client id of each key digest."""
    content = _ROSTER_HEADER + tomli_w.dumps({"clients": dict(roster)})
    write_public(path, content.encode())


def read_roster(path: Path) -> dict[str, int]:
    """Read a roster, which an operator may have edited.

    Raises
    ------
    FedsimError
        If the file is not a roster, or gives two keys the same client id.
    """
    try:
        clients = regular_files.read_toml(path)["clients"]
        if not isinstance(clients, dict):
            raise ValueError("clients is no table")
    except (OSError, ValueError, KeyError) as error:
        raise FedsimError(
            f"{path} is not a list of clients ({error}); `fedsim deploy init` writes one."
        ) from None
    for digest, client in clients.items():
        is_id = type(client) is int and 0 <= client < 2**63
        if re.fullmatch("[0-9a-f]{64}", digest) is None or not is_id:
            raise FedsimError(
                f"{path} has {digest!r:.80} = {client!r:.80}; it must have the SHA-256 of a key, "
                "64 hex digits in small letters, and a client id, an integer from 0."
            )
    if len(set(clients.values())) < len(clients):
        raise FedsimError(f"{path} gives two keys the same client id; each key needs its own.")
    return dict(clients)
