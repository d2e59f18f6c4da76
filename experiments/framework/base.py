"""What an experiment is: members that run on their own, and a report of all of them.

A member is one training run or one computation, a function of its settings alone. Its result
is a small mapping of JSON values that is kept on disk, so that an experiment that was
interrupted goes on where it stopped. The report turns the results of all members into the
paper's table or picture, into figures that stand beside those in the paper, and into claims of
the paper, each of which is reproduced here, not reproduced, or not decided.
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
"""What a member leaves: names to numbers or lists of numbers, as JSON has them."""

FLAT = 0.5
"""Points of accuracy, or decibels of an error, that are a difference in practice."""

Verdict = Literal["reproduced", "not reproduced", "not decided"]
_VERDICTS: dict[bool | None, Verdict] = {
    True: "reproduced",
    False: "not reproduced",
    None: "not decided",
}

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
        The experiment's own: ``experiment.toml``, configs, ``judgement.toml``, stored results.
    data : Path
        Where data sets are kept.
    engine : mapping of str to scalar
        Keys ``engine.*`` of members that are runs of a config: where they run, which no result
        depends on.
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
        Unique; names its file.
    settings : mapping of JSON values
        Everything that the result is a function of, beside the code and the data.
    cell : str, optional
        The cell of a table that it is for; by default its name without its seed. A member's name
        is that of its cell, or goes on after a space.
    """

    name: str
    settings: Mapping[str, Any]
    cell: str = ""

    def __post_init__(self) -> None:
        if not self.cell:
            object.__setattr__(self, "cell", re.sub(r" seed=\d+$", "", self.name))


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
    """Something that a paper says, put so that a run can decide it.

    Attributes
    ----------
    panel : str
        The paper's figure or table that it is about.
    reproduced : bool or None
        None where it is not decided: by the spread over seeds, or since it turns with a setting
        that the paper does not give.
    """

    name: str
    panel: str
    says: str
    reproduced: bool | None
    measured: str

    @property
    def verdict(self) -> Verdict:
        """In words."""
        return _VERDICTS[self.reproduced]


@dataclass(frozen=True)
class BestOfGrid:
    """The best value of a grid, by what each gave.

    Attributes
    ----------
    of : str
        What was chosen for whom.
    scores : mapping of float to float
        Accuracies (%) by the grid's values.
    """

    of: str
    scores: Mapping[float, float]

    @property
    def value(self) -> float:
        """The best; the smallest of equal ones."""
        return max(sorted(self.scores), key=self.scores.__getitem__)

    @property
    def at_edge(self) -> bool:
        """Whether the grid ends at the best, and what lies beyond might be better.

        However flat the grid is: a method that nothing changes on a grid may change beyond it.
        """
        return len(self.scores) > 1 and self.value in (min(self.scores), max(self.scores))

    @property
    def flat_ends(self) -> list[float]:
        """Ends within `FLAT` of the best, beyond which a value may be as good."""
        ends = sorted({min(self.scores), max(self.scores)})
        return [end for end in ends if self.scores[self.value] - self.scores[end] <= FLAT]


@dataclass(frozen=True)
class Report:
    """What came of an experiment.

    Attributes
    ----------
    figures : mapping of name to float
        Numbers that a paper's may stand beside.
    choices : sequence of BestOfGrid
        Every best value that a claim rests on.
    """

    tables: Sequence[Table]
    figures: Mapping[str, float]
    claims: Sequence[PaperClaim]
    pictures: Mapping[str, Figure] = field(default_factory=dict)
    choices: Sequence[BestOfGrid] = ()


class Experiment(ABC):
    """Subclasses declare `settings_type`, and annotate ``settings`` with it."""

    settings_type: ClassVar[type[Settings]]
    partial: ClassVar[bool] = False
    """Whether `followers` and `report` take the results of some of the members."""

    def __init__(self, settings: Settings, context: Context) -> None:
        self.settings = settings
        self.context = context

    def prepare(self, out: Path) -> None:  # noqa: B027 - most experiments need nothing
        """Make what all members need, below ``out``; called before the first one is run."""

    @abstractmethod
    def members(self) -> list[ExperimentMember]:
        """All members; their order is that of the work."""

    def followers(self, results: Mapping[str, Result]) -> list[ExperimentMember]:
        """Members that the results of `members` ask for, such as fresh seeds at chosen rates."""
        return []

    @property
    def has_followers(self) -> bool:
        """Whether there are members that `members` does not know of."""
        return type(self).followers is not Experiment.followers

    @abstractmethod
    def run(self, settings: Mapping[str, Any]) -> Result:
        """Result of the member with these settings."""

    @abstractmethod
    def report(self, results: Mapping[str, Result]) -> Report:
        """Report of the results of all members and followers, by their names.

        Where it is `partial`, of those that there are: a cell that lacks a seed is not judged.
        """


def seeds_text(count: int) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{count} seed{'s' * (count != 1)}"
