"""Results stored in an experiment's directory, of all or some members, in one small JSON file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.framework.base import Experiment, ExperimentMember, Result
from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy.durable import replace

FILE = "results.json"
DIGITS = 6
"""Significant digits of a stored number; results are judged as stored."""


@dataclass(frozen=True)
class StoredResult:
    """Stored result of one member.

    Attributes
    ----------
    settings : str
        Fingerprint of the member's settings; see `digest`.
    result : Result
    seconds : float or None
        Seconds of one core; None for a run on a GPU, or if only the total of all members is known.
    """

    settings: str
    result: Result
    seconds: float | None = None


@dataclass(frozen=True)
class Stored:
    """Results of all members, or of those that have been run so far.

    Attributes
    ----------
    members : mapping of str to StoredResult
        Results by the member's name.
    untimed : float
        Total seconds of one core of the members without seconds of their own.
    """

    members: Mapping[str, StoredResult] = field(default_factory=dict)
    untimed: float = 0.0

    @property
    def seconds(self) -> float:
        """Total seconds of one core."""
        return self.untimed + sum(member.seconds or 0.0 for member in self.members.values())

    @property
    def on_gpu(self) -> int:
        """Number of runs on a GPU, which have no seconds of a core."""
        return 0 if self.untimed else sum(one.seconds is None for one in self.members.values())

    @property
    def mean_seconds(self) -> float | None:
        """Mean seconds of one core per member; None if all were run on a GPU."""
        on_cores = len(self.members) - self.on_gpu
        return self.seconds / on_cores if on_cores else None

    @property
    def ledgers(self) -> int:
        """Number of runs with a ledger, which was verified before the result was stored."""
        return sum("ledger" in member.result for member in self.members.values())

    @classmethod
    def load(cls, directory: Path) -> Stored:
        """Read the results stored in an experiment's directory; empty if there are none.

        Raises
        ------
        FedsimError
            If the file is there and cannot be read.
        """
        path = directory / FILE
        if not path.is_file():
            return cls()
        try:
            tree = json.loads(regular_files.read_text(path))
            members = {name: StoredResult(**member) for name, member in tree["members"].items()}
            return cls(members, float(tree["seconds"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise FedsimError(f"{path} cannot be read: {error!r}.") from None

    @property
    def fingerprint(self) -> str:
        """Hash of all results and their settings, in twelve digits."""
        results = {name: member.result for name, member in self.members.items()}
        digests = {name: member.settings for name, member in self.members.items()}
        content = [shortened(results), digests]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def save(self, directory: Path) -> None:
        """Write the file, with one line per member."""
        lines = [
            f"  {json.dumps(name)}: " + json.dumps(_written(member), separators=(",", ":"))
            for name, member in sorted(self.members.items())
        ]
        text = f'{{"seconds": {round(self.untimed)}, "members": {{\n' + ",\n".join(lines) + "\n}}\n"
        replace(directory / FILE, text.encode())

    def get(self, member: ExperimentMember) -> StoredResult | None:
        """Stored result of a member; None if there is none for its present settings."""
        stored = self.members.get(member.name)
        return stored if stored and stored.settings == digest(member.settings) else None


def gathered(
    experiment: Experiment, result_of: Callable[[ExperimentMember], StoredResult | None]
) -> tuple[dict[str, StoredResult], list[ExperimentMember]]:
    """Existing results of an experiment's members, and all members that are known.

    Followers are known once the members on which they depend have been run.
    """
    members = experiment.members()
    results = {m.name: result for m in members if (result := result_of(m)) is not None}
    if len(results) == len(members) or experiment.partial:
        followers = experiment.followers({name: one.result for name, one in results.items()})
        members = [*members, *followers]
        results |= {m.name: result for m in followers if (result := result_of(m)) is not None}
    return results, members


def _written(member: StoredResult) -> dict[str, Any]:
    content = {"settings": member.settings, "result": shortened(member.result)}
    return content if member.seconds is None else content | {"seconds": round(member.seconds, 1)}


def digest(settings: Mapping[str, Any]) -> str:
    """Short fingerprint of a member's settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def shortened(value: Any) -> Any:
    """Round all numbers to `DIGITS` significant digits, in lists and mappings of any depth."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: shortened(inner) for name, inner in value.items()}
    return [shortened(inner) for inner in value] if isinstance(value, list | tuple) else value
