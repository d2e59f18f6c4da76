"""Where ledgers go that are not written any more: beside the new ones, where they count on.

Whoever replaces ``DIR/some/ledger.jsonl`` moves it to ``DIR/archive/NUMBER/some/ledger.jsonl``:
a run that is overwritten all its ledgers at once, a ledger of an old format itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedsim.privacy.durable import sync_directory

__all__ = ["ARCHIVE", "archive", "archived"]

ARCHIVE = "archive"
"""Name of the directory that holds predecessors."""

# A client's ledger in a run's directory: RUN/clients/client-3.jsonl, or in a directory there.
_DEEPEST = 3


def archived(path: Path) -> list[Path]:
    """What stood at ``path`` before, the oldest first; ``*`` in its name stands for anything."""
    predecessors: list[Path] = []
    path = path.absolute()
    for parent in path.parents[:_DEEPEST]:
        inside = path.relative_to(parent)
        for number in _numbers(parent / ARCHIVE):
            before = parent / ARCHIVE / str(number) / inside
            for kept in sorted(before.parent.glob(before.name)):
                # What had been replaced already when it was put away.
                predecessors += [] if parent == path.parent else _replaced_beside(kept)
                predecessors.append(kept)
    return predecessors


def archive(path: Path) -> Path:
    """Move a ledger, or a directory, into the archive beside it, and say where it is.

    What a ledger holds goes on being counted.
    """
    directory = path.parent / ARCHIVE
    directory.mkdir(exist_ok=True)
    while True:
        kept = directory / str(max([0, *_numbers(directory)]) + 1)
        try:
            kept.mkdir()
            break
        except FileExistsError:
            continue
    os.rename(path, kept / path.name)
    for changed in (kept, directory, path.parent):
        sync_directory(changed)
    return kept / path.name


def _replaced_beside(path: Path) -> list[Path]:
    directory = path.parent / ARCHIVE
    before = [directory / str(number) / path.name for number in _numbers(directory)]
    return [kept for kept in before if kept.is_file()]


def _numbers(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    names = (entry.name for entry in directory.iterdir())
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())
