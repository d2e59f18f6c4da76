"""Which ports of this machine are free."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

from fedsim.errors import FedsimError


def free_ports(count: int) -> list[int]:
    """Different ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]


def is_busy(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a port is in use at this address.

    Raises
    ------
    FedsimError
        If this machine has no such address.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise FedsimError(f"this machine has no address {host} (--host).") from None
            return error.errno == errno.EADDRINUSE
    return False
