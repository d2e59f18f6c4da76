"""Keys that have one legal value beside what a config chooses, and take it where they are not set.

What allows only one value is said by the thing itself: an algorithm's ``evaluates``,
``requires_client_state`` and ``requires_plain_means`` (`fedsim.clients.base.LocalAlgorithm`). A
user's own (``module:Class``) says so when it is made, since reading a config imports no code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedsim import registry
from fedsim.config.privacy_sections import MechanismSection
from fedsim.config.sections import ClientSection

Tree = dict[str, Any]


def implied_values(tree: Tree) -> Iterator[tuple[str, str, str]]:
    """Table, key and only legal value of such keys, given what else a config's tree chooses."""
    client, mechanism = _table(tree, "client"), _table(tree, "mechanism")
    name = ClientSection.selected_in(client)
    known = name in registry.names("client")
    algorithm = registry.find("client", name, "client.name") if known else None
    keeps = ("evaluates", "requires_client_state")
    if _table(tree, "model").get("personal") or any(_says(algorithm, what) for what in keeps):
        yield "client", "state", "client"
    if (
        _says(algorithm, "requires_plain_means")
        and MechanismSection.selected_in(mechanism) == "none"
    ):
        yield "mechanism", "weighting", "uniform"


def drop_implied(tree: Tree, changes: Mapping[str, Any]) -> None:
    """Drop keys that have one legal value from a changed tree, unless they are among the changes.

    A config that is changed has all keys, so that one at its default need not have been set.
    """
    for table, key, _ in implied_values(tree):
        if f"{table}.{key}" not in changes:
            _table(tree, table).pop(key, None)


def _table(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = tree.get(name, {})
    return table if isinstance(table, dict) else {}


def _says(algorithm: Any, what: str) -> bool:
    value = getattr(algorithm, what, False)
    return isinstance(value, bool | str) and bool(value)
