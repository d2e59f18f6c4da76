"""Results of members on disk, so that a finished member is not run again."""

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
    """A directory of results, with one JSON file per member.

    A result is valid only for the settings that it was made with: a file with other settings, or
    one that cannot be read, is ignored.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, member: ExperimentMember) -> Path:
        """File of a member's result."""
        slug = re.sub(r"[^A-Za-z0-9.=-]+", "_", member.name)
        digest = hashlib.sha256(member.name.encode()).hexdigest()[:8]
        return self.directory / f"{slug[:80]}-{digest}.json"

    def get(self, member: ExperimentMember) -> StoredResult | None:
        """Stored result of a finished member; None if there is none for its settings."""
        content = self._content(member)
        if "result" not in content:
            return None
        return StoredResult(digest(member.settings), content["result"], content["seconds"])

    def put(self, member: ExperimentMember, result: Result, seconds: float | None) -> None:
        """Store a result, with the seconds of one core that all attempts took."""
        self._write(member, {"seconds": self._total(member, seconds), "result": result})

    def interrupted(self, member: ExperimentMember, seconds: float | None) -> None:
        """Store the seconds of an attempt without a result, which may be resumed."""
        self._write(member, {"seconds": self._total(member, seconds)})

    def _total(self, member: ExperimentMember, seconds: float | None) -> float | None:
        """Seconds of all attempts, given those of the last one; None if any was on a GPU."""
        before = self._content(member).get("seconds", 0.0)
        return None if seconds is None or before is None else round(before + seconds, 2)

    def _content(self, member: ExperimentMember) -> dict[str, Any]:
        """Content of the member's file if it is of the member's settings; otherwise empty."""
        try:
            content = json.loads(regular_files.read_text(self.path(member)))
        except (OSError, ValueError):
            return {}
        matches = isinstance(content, dict) and content.get("settings") == _plain(member.settings)
        return content if matches else {}

    def _write(self, member: ExperimentMember, content: dict[str, object]) -> None:
        """Write a member's file atomically."""
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
    """Settings after a round trip through JSON, for comparison with stored ones."""
    return json.loads(json.dumps(settings))
