"""Results that are kept beside an experiment's settings: one small file of JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.framework.base import Experiment, ExperimentMember, Result
from fedsim import regular_files
from fedsim.errors import FedsimError

__all__ = ["FILE", "Stored", "digest"]

FILE = "results.json"
DIGITS = 6
"""Significant digits of a stored number; every judgement is of the stored ones."""


@dataclass(frozen=True)
class Stored:
    """Results by member, what settings they are of, and how long they took.

    Attributes
    ----------
    results : mapping of str to Result
    digests : mapping of str to str
        Of the settings of each member; see `digest`.
    seconds : float
        On one core, all members together.
    """

    results: Mapping[str, Result]
    digests: Mapping[str, str]
    seconds: float

    @classmethod
    def load(cls, directory: Path) -> Stored | None:
        """What is stored in an experiment's directory; None where nothing is.

        Raises
        ------
        FedsimError
            If the file is there and cannot be read.
        """
        path = directory / FILE
        if not path.is_file():
            return None
        try:
            tree = json.loads(regular_files.read_text(path))
            members = tree["members"]
            return cls(
                {name: member["result"] for name, member in members.items()},
                {name: member["settings"] for name, member in members.items()},
                float(tree["seconds"]),
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise FedsimError(f"{path} cannot be read: {error!r}.") from None

    @property
    def fingerprint(self) -> str:
        """Of all results and what settings they are of, in twelve digits."""
        content = [shortened(self.results), self.digests]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def save(self, directory: Path) -> None:
        """Write the file, a line a member."""
        lines = [
            f"  {json.dumps(name)}: "
            + json.dumps(
                {"settings": self.digests[name], "result": shortened(result)},
                separators=(",", ":"),
            )
            for name, result in sorted(self.results.items())
        ]
        text = f'{{"seconds": {round(self.seconds)}, "members": {{\n' + ",\n".join(lines) + "\n}}\n"
        (directory / FILE).write_text(text, encoding="utf-8")

    def of(self, experiment: Experiment) -> tuple[dict[str, Result], list[str]]:
        """Results of an experiment's members and followers, and the names of those missing."""
        results, missing = self._those_of(experiment.members())
        if missing:
            return results, missing
        more, missing = self._those_of(experiment.followers(results))
        return {**results, **more}, missing

    def _those_of(self, members: list[ExperimentMember]) -> tuple[dict[str, Result], list[str]]:
        there = [m for m in members if self.digests.get(m.name) == digest(m.settings)]
        names = {member.name for member in there}
        return (
            {name: self.results[name] for name in names},
            [member.name for member in members if member.name not in names],
        )


def digest(settings: Mapping[str, Any]) -> str:
    """Short fingerprint of a member's settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def shortened(value: Any) -> Any:
    """Numbers with few digits, in lists and mappings of any depth."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: shortened(inner) for name, inner in value.items()}
    return [shortened(inner) for inner in value] if isinstance(value, list | tuple) else value
