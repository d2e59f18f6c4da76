"""Members' results on disk, so that a finished member is not run again."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from experiments.framework.base import ExperimentMember, Result
from experiments.framework.stored import StoredResult, digest
from fedsim import regular_files


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
        content = self._content(member)
        if "result" not in content:
            return None
        return StoredResult(digest(member.settings), content["result"], content["seconds"])

    def put(self, member: ExperimentMember, result: Result, seconds: float | None) -> None:
        """Keep a result, and the seconds of one core with those of interrupted attempts."""
        self._write(member, {"seconds": self._total(member, seconds), "result": result})

    def interrupted(self, member: ExperimentMember, seconds: float | None) -> None:
        """Keep the seconds of an attempt that left no result, and may be resumed."""
        self._write(member, {"seconds": self._total(member, seconds)})

    def _total(self, member: ExperimentMember, seconds: float | None) -> float | None:
        """Seconds of all attempts, of which the last took so many; None if one was on a GPU."""
        before = self._content(member).get("seconds", 0.0)
        return None if seconds is None or before is None else round(before + seconds, 2)

    def _content(self, member: ExperimentMember) -> dict[str, Any]:
        """What is kept of a member with these settings."""
        try:
            content = json.loads(regular_files.read_text(self.path(member)))
        except (OSError, ValueError):
            return {}
        matches = isinstance(content, dict) and content.get("settings") == _plain(member.settings)
        return content if matches else {}

    def _write(self, member: ExperimentMember, content: dict[str, object]) -> None:
        """Write a member's file: it is there whole or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.path(member)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        about = {"member": member.name, "settings": _plain(member.settings)}
        try:
            unfinished.write_text(json.dumps(about | content), encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _plain(settings: object) -> object:
    """Settings as they come back from JSON."""
    return json.loads(json.dumps(settings))
