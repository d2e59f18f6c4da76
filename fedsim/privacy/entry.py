"""Entries: what one line of a ledger says."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from fedsim.privacy.events import Event, Level

__all__ = ["Entropy", "Entry", "event_in"]

Entropy = Literal["config", "system"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a ledger.

    Attributes
    ----------
    kind : "release" or "torn"
        Torn: stands for an unreadable last line, counted at the cost of ``event``.
    round : int or None
    event : Event
    level : "client" or "example"
        What a row of the released sum is.
    entropy : "config" or "system"
        Where noise and cohort came from: the seed, or the operating system.
    mechanism : str
    clip_norm : float or None
    draws : str or None
        Names the draws of a run whose entropy is its config's: two records of one round with
        the same draws are the same release.
    client : int or None
        Whose ledger this is, at example level.
    settles : bool
        Whether this is the release that the torn line just before it began.
    fragment : str
        What was legible of a torn line.
    time : str
        UTC, ISO 8601.
    """

    kind: Literal["release", "torn"] = "release"
    round: int | None = None
    event: Event
    level: Level = "client"
    entropy: Entropy = "system"
    mechanism: str = ""
    clip_norm: float | None = None
    draws: str | None = None
    client: int | None = None
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    settles: bool = False
    fragment: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe mapping with kebab-case keys, in the order of the fields."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["event"] = self.event.to_dict()
        if self.clip_norm is not None and math.isinf(self.clip_norm):
            data["clip_norm"] = "inf"
        return {name.replace("_", "-"): value for name, value in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        """Inverse of `to_dict`."""
        fields = {name.replace("-", "_"): value for name, value in data.items()}
        fields["event"] = Event.from_dict(fields["event"])
        if fields["clip_norm"] is not None:
            fields["clip_norm"] = float(fields["clip_norm"])
        return cls(**fields)

    @property
    def release(self) -> tuple[object, ...]:
        """What makes two records one release, when their draws are the config's."""
        return (self.round, self.draws, self.client, self.event, self.mechanism, self.clip_norm)


def event_in(fragment: str) -> Event | None:
    """The event of a torn line, if all of it is legible."""
    _, found, tail = fragment.partition('"event":')
    if not found:
        return None
    try:
        data, _ = json.JSONDecoder().raw_decode(tail)
        return Event.from_dict(data)
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
