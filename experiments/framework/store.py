"""Members' results on disk, so that a finished member is not run again."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from experiments.framework.base import ExperimentMember, Result
from experiments.framework.stored import StoredResult, digest
from fedsim import regular_files

__all__ = ["Store"]


class Store:
    """A directory of results, a JSON file a member.

    A result counts only for the settings that it was made with: a file of other settings, or
    one that cannot be read, is as good as none.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, member: ExperimentMember) -> Path:
        """File of a member's result."""
        slug = re.sub(r"[^A-Za-z0-9.=-]+", "_", member.name)
        digest = hashlib.sha256(member.name.encode()).hexdigest()[:8]
        return self.directory / f"{slug[:80]}-{digest}.json"

    def get(self, member: ExperimentMember) -> StoredResult | None:
        """What a finished member left."""
        try:
            content = json.loads(regular_files.read_text(self.path(member)))
        except (OSError, ValueError):
            return None
        if not isinstance(content, dict) or content.get("settings") != _plain(member.settings):
            return None
        return StoredResult(digest(member.settings), content["result"], content["seconds"])

    def put(self, member: ExperimentMember, result: Result, seconds: float | None) -> None:
        """Keep a result: the file is there whole or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.path(member)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        content = {
            "member": member.name,
            "settings": _plain(member.settings),
            "seconds": None if seconds is None else round(seconds, 2),
            "result": result,
        }
        try:
            unfinished.write_text(json.dumps(content), encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _plain(settings: object) -> object:
    """Settings as they come back from JSON."""
    return json.loads(json.dumps(settings))
