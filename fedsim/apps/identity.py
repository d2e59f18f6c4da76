"""Which client a node is. Nothing heavy is imported: a process is started to answer this."""

from __future__ import annotations

from collections.abc import Mapping

from fedsim.errors import FedsimError


def client_id(node_config: Mapping[str, bool | int | float | str]) -> int:
    """A node's client id: its node config's ``partition-id``.

    Raises
    ------
    FedsimError
        If it has none.
    """
    client = node_config.get("partition-id")
    if not isinstance(client, int) or isinstance(client, bool):
        raise FedsimError(
            f"node-config 'partition-id' is {client!r}; it must be this client's id, an integer."
        )
    return client
