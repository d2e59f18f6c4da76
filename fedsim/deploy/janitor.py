"""Ends what a parent process started, whatever becomes of the parent.

Run as ``python -m fedsim.deploy.janitor SECONDS``. Standard input is a pipe that the parent holds;
its lines are ``start PID``, ``stop PID`` and ``remove DIRECTORY``. When the pipe closes,
because the parent is done with it or is dead, every process group that was started and not
stopped gets SIGTERM, SIGKILL if it is there so many seconds later, and the directories are
removed.

Nothing outside the standard library is imported here: it must be there at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress


def main(grace: float) -> None:
    """Listen until the pipe closes, then clean up."""
    # Ctrl-C goes to the whole foreground group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    groups: list[int] = []
    directories: list[str] = []
    for line in sys.stdin:
        verb, _, argument = line.rstrip("\n").partition(" ")
        if verb == "start":
            groups.append(int(argument))
        elif verb == "stop":
            end_groups([int(argument)], grace)
            groups.remove(int(argument))
            print("stopped", flush=True)
        elif verb == "remove":
            directories.append(argument)
    end_groups(groups, grace)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def end_groups(groups: Iterable[int], grace: float) -> None:
    """End process groups: SIGTERM, and SIGKILL for what is there ``grace`` seconds later."""
    alive = [group for group in groups if _signal(group, signal.SIGTERM)]
    deadline = time.monotonic() + grace
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = [group for group in alive if _signal(group, 0)]
    for group in alive:
        _signal(group, signal.SIGKILL)
    while alive:
        time.sleep(0.01)
        alive = [group for group in alive if _signal(group, 0)]


def _signal(group: int, number: int) -> bool:
    """Signal a group; False when there is nobody left in it."""
    with suppress(PermissionError):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return False
    return not _only_zombies(group)


def _only_zombies(group: int) -> bool:
    # A parent that has not looked keeps a dead child in the process table for ever.
    try:
        entries = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return False
    states = []
    for name in entries:
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
            if int(fields[2]) == group:
                states.append(fields[0])
    return bool(states) and set(states) <= {"Z", "X"}


if __name__ == "__main__":
    main(float(sys.argv[1]))
