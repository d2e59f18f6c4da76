"""Base classes of experiments: independent members, and a report of all of them.

A member is one training run or one computation, a function of its settings alone. Its result
is a small mapping of JSON values that is kept on disk, so that an interrupted experiment can be
continued. The report turns the results of all members into the paper's table or picture, into
figures to compare with those in the paper, and into claims of the paper, each of which is
reproduced here, not reproduced, or not decided.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from matplotlib.figure import Figure
from pydantic import Field

from experiments.framework.schema import Section
from fedsim.config import Scalar

Result = dict[str, Any]
"""Result of a member, as JSON values: numbers or lists of numbers by name."""

FLAT = 0.5
"""Smallest difference that matters in practice: percentage points, or decibels of an error."""

Verdict = Literal["reproduced", "not reproduced", "not decided"]
_VERDICTS: dict[bool | None, Verdict] = {
    True: "reproduced",
    False: "not reproduced",
    None: "not decided",
}

S = TypeVar("S", bound="Settings")


class Settings(Section):
    """The keys that every ``experiment.toml`` has.

    Attributes
    ----------
    experiment : str
        The kind of experiment, a key of `directories.KINDS`.
    seeds : int
        Number of seeds.
    """

    experiment: str
    seeds: int = Field(3, ge=1)


@dataclass(frozen=True)
class Context:
    """Paths of an experiment, and the engine that it uses.

    Attributes
    ----------
    directory : Path
        The experiment's directory: ``experiment.toml``, configs, judgement, stored results.
    data : Path
        Folder of data sets.
    engine : mapping of str to scalar
        Keys ``engine.*`` for members that are runs of a config; no result depends on them.
    """

    directory: Path
    data: Path
    engine: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class ExperimentMember:
    """One independent piece of an experiment.

    Attributes
    ----------
    name : str
        Unique name; its file is named by it.
    settings : mapping of JSON values
        Everything that the result depends on, except the code and the data.
    cell : str, optional
        The cell of a table to which it belongs; by default its name without the seed. A member's
        name equals its cell's name, or starts with it and a space.
    """

    name: str
    settings: Mapping[str, Any]
    cell: str = ""

    def __post_init__(self) -> None:
        if not self.cell:
            object.__setattr__(self, "cell", re.sub(r" seed=\d+$", "", self.name))


@dataclass(frozen=True)
class Table:
    """A table for the terminal and for a CSV file.

    Attributes
    ----------
    name : str
        Name of the CSV file, without its ending.
    title : str
    columns : sequence of str
    rows : sequence of rows
        Texts and numbers; None is an empty cell.
    digits : int
        Digits of numbers in the terminal; a CSV has all of them.
    shown : bool
        Whether it is printed on the terminal.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    digits: int = 2
    shown: bool = True


@dataclass(frozen=True)
class PaperClaim:
    """A claim of a paper, stated so that runs can decide it.

    Attributes
    ----------
    name : str
    panel : str
        The paper's figure or table that it is about.
    says : str
        The claim, as a sentence.
    reproduced : bool or None
        None if it is not decided, because of the spread over seeds or because it depends on a
        setting that the paper does not give.
    measured : str
        What was measured here.
    """

    name: str
    panel: str
    says: str
    reproduced: bool | None
    measured: str

    @property
    def verdict(self) -> Verdict:
        """The verdict in words."""
        return _VERDICTS[self.reproduced]


@dataclass(frozen=True)
class BestOfGrid:
    """The choice of the best value of a grid.

    Attributes
    ----------
    of : str
        What was chosen, and for which method.
    scores : mapping of float to float
        Score of each value of the grid, higher is better: accuracies (%), or decibels.
    """

    of: str
    scores: Mapping[float, float]

    @property
    def value(self) -> float:
        """The value with the highest score; the smallest of several."""
        return max(sorted(self.scores), key=self.scores.__getitem__)

    @property
    def at_edge(self) -> bool:
        """Whether the best value is an end of the grid, so that values beyond it may be better.

        This also holds for a flat grid: scores that hardly change on the grid may change beyond it.
        """
        return len(self.scores) > 1 and self.value in (min(self.scores), max(self.scores))

    @property
    def flat_ends(self) -> list[float]:
        """Ends whose score is within `FLAT` of the best, so that values beyond may be as good."""
        ends = sorted({min(self.scores), max(self.scores)})
        return [end for end in ends if self.scores[self.value] - self.scores[end] <= FLAT]


@dataclass(frozen=True)
class Report:
    """The evaluated results of an experiment.

    Attributes
    ----------
    tables : sequence of Table
    figures : mapping of name to float
        Numbers to compare with the paper's.
    claims : sequence of PaperClaim
    pictures : mapping of name to Figure
    choices : sequence of BestOfGrid
        Every choice from a grid on which a claim is based.
    """

    tables: Sequence[Table]
    figures: Mapping[str, float]
    claims: Sequence[PaperClaim]
    pictures: Mapping[str, Figure] = field(default_factory=dict)
    choices: Sequence[BestOfGrid] = ()


class Experiment(ABC):
    """Base class; subclasses declare `settings_type`, and annotate ``settings`` with it."""

    settings_type: ClassVar[type[Settings]]
    partial: ClassVar[bool] = False
    """Whether `followers` and `report` accept the results of only some of the members."""

    def __init__(self, settings: Settings, context: Context) -> None:
        self.settings = settings
        self.context = context

    def prepare(self, out: Path) -> None:  # noqa: B027 - most experiments need nothing
        """Prepare what all members need, below ``out``; called before the first one is run."""

    @abstractmethod
    def members(self) -> list[ExperimentMember]:
        """All members, in the order in which they are run."""

    def followers(self, results: Mapping[str, Result]) -> list[ExperimentMember]:
        """Members that depend on the results of `members`, such as fresh seeds at chosen rates."""
        return []

    @property
    def has_followers(self) -> bool:
        """Whether there may be members beyond those of `members`."""
        return type(self).followers is not Experiment.followers

    @abstractmethod
    def run(self, settings: Mapping[str, Any]) -> Result:
        """Result of the member with these settings."""

    @abstractmethod
    def report(self, results: Mapping[str, Result]) -> Report:
        """Report of the results of all members and followers, by their names.

        With `partial`, some results may be missing: a cell that lacks a seed is not judged.
        """


def seeds_text(count: int) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{count} seed{'s' * (count != 1)}"
