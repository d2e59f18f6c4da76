"""Things that are closed when the ``with`` that they stand in is left."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Closed"]


class Closed(ABC):
    """What `close` ends; ``with thing:`` calls it, however it is left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End what was begun."""
