"""What robust means have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Literal

from fedsim.lazy import Tensor, torch
from fedsim.settings import check_settings

CHUNK = 2**22
"""Numbers that are sorted at a time."""


class RobustMean(ABC):
    """A centre of a round's rows that is no function of their sum.

    Every usable client counts once, whatever its examples. The rows of a round are kept: memory is
    cohort times parameters, where a sum takes that of one row. What one client moves it by depends
    on the others' rows, so that no noise in units of a plan's C protects it: noise is refused.
    Subclasses are frozen dataclasses of their settings that give `center`; a config names them
    where it names a mechanism, and a strategy takes them as one.
    """

    protects_nobody: ClassVar[bool] = True
    guarantee: ClassVar[Literal["gaussian", "none"]] = "none"
    weighting: ClassVar[Literal["uniform", "num-examples"]] = "uniform"

    def __post_init__(self) -> None:
        check_settings(self)

    @abstractmethod
    def center(self, rows: Tensor) -> Tensor:
        """Of finite rows ``[n, d]``, n at least 1, in the order of client ids: float64 ``[d]``."""

    def check(self, expected: float) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse a cohort of this ``expected`` size that is too small for the settings.

        Raises
        ------
        FedsimError
        """


def column_chunks(rows: Tensor) -> Iterator[Tensor]:
    """Columns of rows ``[n, d]`` as float64, so many that they can be sorted in little memory."""
    size = max(1, CHUNK // len(rows))
    for first in range(0, rows.shape[1], size):
        yield rows[:, first : first + size].to(torch.float64)
