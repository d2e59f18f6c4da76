"""What an experiment is: members that run on their own, and a report of all of them.

A member is one training run or one computation, a function of its settings alone. Its result
is a small mapping of JSON values that is kept on disk, so that an experiment that was
interrupted goes on where it stopped. The report turns the results of all members into the
paper's table or picture, into figures that `expected.toml` speaks about, and into claims of
the paper, each of which holds here or does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from fedsim.config.keys import Section

__all__ = [
    "Context",
    "Experiment",
    "ExperimentMember",
    "PaperClaim",
    "Report",
    "Result",
    "Settings",
    "Table",
    "over_seeds",
    "seeds_text",
]

Result = dict[str, Any]
"""What a member leaves: names to numbers or lists of numbers, as JSON has them."""

S = TypeVar("S", bound="Settings")


class Settings(Section):
    """The keys that every ``experiment.toml`` has."""

    experiment: str
    seeds: int = Field(3, ge=1)


@dataclass(frozen=True)
class Context:
    """Where an experiment finds things.

    Attributes
    ----------
    directory : Path
        The experiment's own: ``experiment.toml``, configs, ``expected.toml``.
    data : Path
        Where data sets are kept.
    """

    directory: Path
    data: Path


@dataclass(frozen=True)
class ExperimentMember:
    """One independent piece of an experiment.

    Attributes
    ----------
    name : str
        Unique; names its file.
    settings : mapping of JSON values
        Everything that the result is a function of, beside the code and the data.
    """

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A table for the terminal and, under ``name``, for a CSV.

    Attributes
    ----------
    columns : sequence of str
    rows : sequence of rows
        Texts and numbers; None is an empty cell.
    digits : int
        Of numbers in the terminal; a CSV has all of them.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    digits: int = 2
    shown: bool = True


@dataclass(frozen=True)
class PaperClaim:
    """Something that a paper says, put so that a run can decide it."""

    name: str
    says: str
    holds: bool
    measured: str


@dataclass(frozen=True)
class Report:
    """What came of an experiment.

    Attributes
    ----------
    figures : mapping of name to float
        Numbers that ``expected.toml`` may speak about.
    """

    tables: Sequence[Table]
    figures: Mapping[str, float]
    claims: Sequence[PaperClaim]
    pictures: Mapping[str, Figure] = field(default_factory=dict)


class Experiment(ABC):
    """Subclasses declare `settings_type`, and annotate ``settings`` with it."""

    settings_type: ClassVar[type[Settings]]

    def __init__(self, settings: Settings, context: Context) -> None:
        self.settings = settings
        self.context = context

    def prepare(self, out: Path) -> None:  # noqa: B027 - most experiments need nothing
        """Make what all members need, below ``out``; called before the first one is run."""

    @abstractmethod
    def members(self) -> list[ExperimentMember]:
        """All members; their order is that of the work."""

    @abstractmethod
    def run(self, settings: Mapping[str, Any]) -> Result:
        """Result of the member with these settings."""

    @abstractmethod
    def report(self, results: Mapping[str, Result]) -> Report:
        """Report of all members' results, by the members' names."""


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (with n - 1; 0 for one value) over seeds."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else 0.0


def seeds_text(count: int) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{count} seed{'s' * (count != 1)}"
