"""Members' results on disk, so that a finished member is not run again."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from experiments.framework.base import ExperimentMember, Result
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

    def get(self, member: ExperimentMember) -> Result | None:
        """The result of a finished member."""
        result = self._read(member).get("result")
        return result if isinstance(result, dict) else None

    def seconds(self, member: ExperimentMember) -> float:
        """How long a finished member took."""
        return float(self._read(member).get("seconds", 0.0))

    def _read(self, member: ExperimentMember) -> dict[str, Any]:
        try:
            stored = json.loads(regular_files.read_text(self.path(member)))
        except (OSError, ValueError):
            return {}
        usable = isinstance(stored, dict) and stored.get("settings") == _plain(member.settings)
        return stored if usable else {}

    def put(self, member: ExperimentMember, result: Result, seconds: float) -> None:
        """Keep a result: the file is there whole or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.path(member)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        content = {
            "member": member.name,
            "settings": _plain(member.settings),
            "seconds": round(seconds, 2),
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
