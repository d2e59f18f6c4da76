"""What robust means have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NoReturn

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.base import Guarantee, Mechanism
from fedsim.rows.layout import Layout

__all__ = ["RobustMean", "column_chunks"]

CHUNK = 2**22
"""Numbers that are sorted at a time."""


class RobustMean(Mechanism):
    """A centre of a round's rows that is no function of their sum.

    Every usable client counts once, whatever its examples. The strategy keeps the rows of the
    round: memory is cohort times parameters, where a sum takes that of one row. What one client
    moves it by depends on the others' rows, so that no noise in units of a plan's C protects it:
    noise is refused. Subclasses are frozen dataclasses of their settings that give `center`.
    """

    protects_nobody: ClassVar[bool] = True
    guarantee: ClassVar[Guarantee] = "none"

    @abstractmethod
    def center(self, rows: Tensor) -> Tensor:
        """Of finite rows ``[n, d]``, n at least 1, in the order of client ids: float64 ``[d]``."""

    def check(self, expected: float) -> None:
        """Refuse a cohort of this ``expected`` size that is too small for the settings.

        Raises
        ------
        FedsimError
        """

    def cover(self, layout: Layout) -> NoReturn:
        """Nothing: there is no sum whose columns could have bounds.

        Raises
        ------
        FedsimError
        """
        raise FedsimError(
            f"{self} takes a round's rows whole; mechanism.per-layer and mechanism.private-scalar "
            "must be unset with it, and client.mechanism.name another."
        )


def column_chunks(rows: Tensor) -> Iterator[Tensor]:
    """Columns of rows ``[n, d]`` as float64, so many that they can be sorted in little memory."""
    size = max(1, CHUNK // len(rows))
    for first in range(0, rows.shape[1], size):
        yield rows[:, first : first + size].to(torch.float64)
