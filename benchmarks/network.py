"""Bytes through this machine's loopback interface, which emulated machines use as a network."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <linux/sched.h>


def alone_on_loopback() -> bool:
    """Give this process and its children a loopback of their own; False if that needs root."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


def loopback_bytes() -> int:
    """Bytes sent through the loopback interface so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("there is no loopback interface; traffic is measured on Linux only.")
