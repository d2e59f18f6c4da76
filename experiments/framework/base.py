"""What an experiment consists of: settings, independent members, and a report of their results.

A member is one training run or one computation, a function of its settings alone. Its result
is a small mapping of JSON values that is kept on disk, so that an interrupted experiment can be
continued. The report turns the results of all members into the paper's table or picture, into
figures to compare with those in the paper, and into claims, the paper's and our own, each of which
is reproduced (or confirmed) here, or not, or not decided.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from matplotlib.figure import Figure

from fedsim.config import Scalar
from fedsim.errors import FedsimError
from fedsim.settings import Constraint, Ge, Setting, read_setting, read_settings, settings_of
from fedsim.synonyms import closest

Members = dict[str, Mapping[str, Any]]
"""Settings of members by name, as JSON values: all that a result depends on, but code and data."""

Result = dict[str, Any]
"""Result of a member, as JSON values: numbers or lists of numbers by name."""

Row = Sequence[str | float | None]
"""A row of a table: texts and numbers; None is an empty cell."""

FLAT = 0.5
"""Smallest difference that matters in practice: percentage points, or decibels of an error."""

NOT_EMPTY = Constraint(bool, "a list that is not empty")

Outcome = tuple[bool | None, str]
"""Whether a claim is reproduced (None: not decided), and what was measured."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys that every ``experiment.toml`` has; subclasses add their own.

    Attributes
    ----------
    experiment : str
        Module and class of the experiment below ``experiments/``, such as ``das.tables:Das``.
    seeds : int
        Number of seeds.
    """

    experiment: str
    seeds: Annotated[int, Ge(1)] = 3


def read_table(kind: type[T], tree: Mapping[str, Any], where: str) -> T:
    """An object of a dataclass from a table of TOML, whose keys are its fields in kebab-case.

    A field is a setting (see `fedsim.settings`), or a list or dict of settings or dataclasses.

    Raises
    ------
    FedsimError
        Naming the first key of ``where`` that is unknown, missing, or has a value that is not
        allowed.
    """
    settings, entries = {setting.key: setting for setting in settings_of(kind)}, {}
    for key, value in tree.items():
        if key not in settings:
            hint = closest("key", key, settings)
            raise FedsimError(
                f"unknown key '{where}.{key}';{hint} must be one of {', '.join(settings)}."
            )
        entries[key] = _elements(settings[key], value, f"{where}.{key}")
    return kind(**read_settings(settings.values(), entries, where))


def _elements(setting: Setting, value: Any, key: str) -> Any:
    """A value with its own elements read: those of a table, a list or a dict."""
    kind: Any = setting.type
    container: Any = get_origin(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return read_table(kind, read_setting(replace(setting, type=dict), value, key), key)
    if container not in (list, dict) or not isinstance(value, container):
        return value
    one = replace(setting, type=get_args(kind)[-1], metadata=())
    read = {
        name: read_setting(one, _elements(one, element, f"{key}.{name}"), f"{key}.{name}")
        for name, element in (value.items() if container is dict else enumerate(value))
    }
    return read if container is dict else [*read.values()]


def as_table(settings: Any, *without: str) -> dict[str, Any]:
    """Fields of a dataclass by their kebab-case keys, but those ``without``."""
    values = {one.key: getattr(settings, one.name) for one in settings_of(settings)}
    return {key: value for key, value in values.items() if key not in without}


def digest(settings: Mapping[str, Any]) -> str:
    """Short hash of a member's settings, by which its result and its run are found."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes
    ----------
    name : str
        Name by which a panel in ``judgement.toml`` shows it.
    title : str
    columns : sequence of str
    rows : sequence of Row
    digits : int
        Digits of numbers.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    digits: int = 2


@dataclass(frozen=True)
class ExperimentClaim:
    """A claim, stated so that runs can decide it; `judgement.toml` says whose it is.

    Attributes
    ----------
    name : str
        Its key in ``judgement.toml``.
    panel : str
        The figure or table that it is about.
    says : str
        The claim, as a sentence.
    reproduced : bool or None
        None if it is not decided: by the spread over seeds, or because the readings differ.
    measured : str
        What was measured here.
    open : str
        What the paper does not give, or gives otherwise than its authors' code, such as "the unit
        of eta_0"; empty if there are no readings.
    readings : mapping of str to Outcome
        What came out with each reading of it. See `under`.
    """

    name: str
    panel: str
    says: str
    reproduced: bool | None
    measured: str
    open: str = ""
    readings: Mapping[str, Outcome] = field(default_factory=dict)

    @classmethod
    def under(
        cls, name: str, panel: str, says: str, open: str, readings: Mapping[str, Outcome]
    ) -> ExperimentClaim:
        """A claim whose verdict may turn with something ``open``, judged with each reading of it.

        Its verdict is that of all readings if they agree; otherwise it is not decided.
        """
        verdicts = {reproduced for reproduced, _ in readings.values()}
        texts: dict[str, list[str]] = {}
        for reading, (_, measured) in readings.items():
            texts.setdefault(measured, []).append(reading)
        all_measured = "; ".join(f"{', '.join(of)}: {text}" for text, of in texts.items())
        reproduced = verdicts.pop() if len(verdicts) == 1 else None
        return cls(name, panel, says, reproduced, all_measured, open, readings)

    @property
    def turns(self) -> bool:
        """Whether the verdict depends on the reading of what the paper leaves open."""
        return len({reproduced for reproduced, _ in self.readings.values()}) > 1


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
    claims : sequence of ExperimentClaim
    pictures : mapping of name to Figure
    choices : sequence of BestOfGrid
        Every choice from a grid on which a claim is based.
    """

    tables: Sequence[Table]
    figures: Mapping[str, float]
    claims: Sequence[ExperimentClaim]
    pictures: Mapping[str, Figure] = field(default_factory=dict)
    choices: Sequence[BestOfGrid] = ()


@dataclass(eq=False)
class Experiment(ABC):
    """Base class; a subclass annotates ``settings`` with the type that its TOML is read as.

    Attributes
    ----------
    settings : Settings
    directory : Path
        The experiment's directory: ``experiment.toml``, configs, judgement, stored results.
    data : Path
        Folder of data sets.
    engine : mapping of str to scalar
        Keys ``engine.*`` for members that are runs of a config; no result depends on them.
    """

    settings: Settings
    directory: Path
    data: Path
    engine: Mapping[str, Scalar]
    partial: ClassVar[bool] = False
    """Whether `followers` and `report` accept the results of only some of the members."""

    def prepare(self, out: Path) -> None:  # noqa: B027 - most experiments need nothing
        """Prepare what all members need, below ``out``; called before the first one is run."""

    @abstractmethod
    def members(self) -> Members:
        """All members, in the order in which they are run."""

    def followers(self, results: Mapping[str, Result]) -> Members:
        """Members that depend on the results of `members`, such as fresh seeds at chosen rates."""
        return {}

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
