"""The first line of a ledger: its format, and what it is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from fedsim.errors import FedsimError
from fedsim.privacy.chain import GENESIS, HEADER, opened, sealed
from fedsim.privacy.events import Level

__all__ = ["VERSION", "Header"]

VERSION: Literal[2] = 2
"""Of the format that is written."""


@dataclass(frozen=True)
class Header:
    """What all lines of a ledger have in common.

    Attributes
    ----------
    level : "client" or "example"
        What a row of its releases is.
    client : int or None
        Whose examples, at example level.
    """

    level: Level
    client: int | None = None

    def sealed(self) -> tuple[bytes, str]:
        """The line with its newline, and its hash."""
        about = {"level": self.level, "client": self.client}
        return sealed({"kind": "ledger", "version": VERSION, **about}, GENESIS)

    @classmethod
    def of(cls, line: bytes) -> tuple[Header, str]:
        """The header that a line is, and its hash.

        Raises
        ------
        FedsimError
            If it is none, or of a format that this fedsim does not know.
        """
        if not line.startswith(HEADER):
            raise FedsimError(
                "it is not a ledger; a ledger is a file that fedsim wrote, such as "
                "runs/NAME/ledger.jsonl."
            )
        data, _, head = opened(line, GENESIS)
        version = data.pop("version", None)
        if version != VERSION:
            raise FedsimError(
                f"its format is {version}; this fedsim reads formats 1 and {VERSION}: read it "
                "with the fedsim that wrote it."
            )
        return cls._checked(data), head

    @classmethod
    def _checked(cls, data: dict[str, Any]) -> Header:
        level, client = data.get("level"), data.get("client")
        known = set(data) == {"kind", "level", "client"} and level in get_args(Level)
        if not known or isinstance(client, bool) or not isinstance(client, int | None):
            raise FedsimError("its header is not one that fedsim wrote.")
        return cls(cast(Level, level), client)
