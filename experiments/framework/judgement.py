"""The written judgement of an experiment, and checks that it agrees with the results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from experiments.framework.base import Experiment, PaperClaim, Report, Verdict
from experiments.framework.schema import Section
from fedsim import regular_files
from fedsim.errors import FedsimError

FEWEST_SEEDS = 3

_PLACE = re.compile(r"\{(.+?)(?::([^:{}]+))?\}")

Cause = Literal["", "setting", "scale", "unit", "seeds", "printed", "paper", "unrun"]


class Panel(Section):
    """One figure or table of a paper.

    Attributes
    ----------
    name : str
        Its name in the paper, such as "Fig. 2".
    shows : str
        What the paper shows there and says about it.
    setting : str
        The setting here, and how it differs from the paper's.
    pictures, tables : list of str
        Names of the report's pictures and tables that belong to it.
    """

    name: str
    shows: str
    setting: str
    pictures: list[str] = Field(default_factory=list)
    tables: list[str] = Field(default_factory=list)


class Claimed(Section):
    """How a claim was judged.

    Attributes
    ----------
    verdict : "reproduced", "not reproduced" or "not decided"
    cause : str
        Why a claim is not reproduced or not decided. Conjectures, which no run here shows:
        "setting" (the setting here), "scale" (the smaller scale here), "printed" (the algorithm as
        printed). Facts: "unit" (it depends on the unit of a rate, which the paper does not give),
        "seeds" (the spread over seeds), "paper" (a calculation shows that the cause is in the
        paper), "unrun" (runs are missing).
    why : str
        An explanation in words.
    """

    verdict: Verdict
    cause: Cause = ""
    why: str = ""


class Judgement(Section):
    """``judgement.toml``: text, verdicts, and the numbers that a paper prints.

    In all sentences but those on the paper (``shows``), ``{name}`` or ``{name:.2f}`` is replaced
    by a figure of the report, and ``{seeds}`` by the number of seeds, so that no sentence
    contradicts the results.

    Attributes
    ----------
    about : str
        What is run, and how; a paragraph of Markdown.
    not_run : str
        Why runs are missing; empty if none is.
    run_seconds : float
        Expected seconds of a run on one core, used if no run is stored; 0 if unknown.
    remarks : list of str
    panels : list of Panel
    claims : mapping of str to Claimed
        Judgements by the claim's name.
    paper : mapping of str to float
        Figures printed in the paper, by the name of the report's figure.
    earlier : mapping of str to float
        Figures of an earlier run whose single results are not kept, shown if no others are stored;
        no verdict is based on them.
    """

    title: str
    paper_of: Literal["koskela", "xu", "das", "pichapati", "plans", "niid", "landscape"]
    about: str
    not_run: str = ""
    run_seconds: float = 0.0
    remarks: list[str] = Field(default_factory=list)
    panels: list[Panel] = Field(min_length=1)
    claims: dict[str, Claimed] = Field(default_factory=dict)
    paper: dict[str, float] = Field(default_factory=dict)
    earlier: dict[str, float] = Field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Judgement:
        """Read an experiment's ``judgement.toml``.

        Raises
        ------
        FedsimError
            If it is missing, cannot be read, or has other keys.
        """
        path = directory / "judgement.toml"
        try:
            return cls.read(regular_files.read_toml(path))
        except FedsimError as error:
            raise FedsimError(f"{path}: {error}") from None
        except (OSError, ValueError) as error:
            raise FedsimError(f"{path} cannot be read: {error}.") from None

    def sentences(self) -> Iterator[str]:
        """The sentences in which figures may be inserted."""
        yield from (self.about, *self.remarks)
        yield from (panel.setting for panel in self.panels)
        yield from (claimed.why for claimed in self.claims.values())


def filled(sentence: str, figures: Mapping[str, float]) -> str:
    """Insert figures into a sentence; places that name no figure are left unchanged."""
    return _PLACE.sub(
        lambda place: (
            format(figures[place[1]], place[2] or "g") if place[1] in figures else place[0]
        ),
        sentence,
    )


def faults(experiment: Experiment, report: Report, judgement: Judgement | None) -> list[str]:
    """Reasons why a report is not valid, as sentences; empty if it is.

    These are: a best value at its grid's edge, a verdict from too few seeds, and, with a judgement,
    claims with another verdict, claims without a cause, and names that do not exist.
    """
    seeds = experiment.settings.seeds
    wrong = [
        f"{choice.of}: the best of {', '.join(f'{value:g}' for value in sorted(choice.scores))} is "
        f"{choice.value:g}, at the grid's edge; the grid must go on beyond it."
        for choice in report.choices
        if choice.at_edge
    ]
    if seeds < FEWEST_SEEDS:
        wrong.append(f"seeds = {seeds}; a verdict needs {FEWEST_SEEDS} or more.")
    return wrong if judgement is None else wrong + _against(report, judgement)


def _placeholders(judgement: Judgement) -> list[str]:
    """Names of the figures that the judgement's sentences use, without the number of seeds."""
    names = [place[1] for text in judgement.sentences() for place in _PLACE.finditer(text)]
    return [name for name in names if name != "seeds"]


def _against(report: Report, judgement: Judgement) -> list[str]:
    claims = {claim.name: claim for claim in report.claims}
    wrong = [
        *_unknown("claims", judgement.claims, list(claims)),
        *_unknown("paper", judgement.paper, list(report.figures)),
        *_unknown("sentences", _placeholders(judgement), list(report.figures)),
        *(f"claims.{name} is missing." for name in claims if name not in judgement.claims),
    ]
    panels = [panel.name for panel in judgement.panels]
    for panel in judgement.panels:
        wrong += _unknown(f"{panel.name}: pictures", panel.pictures, list(report.pictures))
        wrong += _unknown(f"{panel.name}: tables", panel.tables, [t.name for t in report.tables])
    for name, claimed in judgement.claims.items():
        if name in claims:
            wrong += _judged(claims[name], claimed, panels)
    return wrong


def _judged(claim: PaperClaim, claimed: Claimed, panels: Sequence[str]) -> list[str]:
    wrong = []
    if claim.verdict != claimed.verdict:
        wrong.append(
            f"claims.{claim.name} is judged '{claimed.verdict}' and came out '{claim.verdict}': "
            f"{claim.measured}."
        )
    if (claimed.verdict == "reproduced") == bool(claimed.cause):
        wrong.append(
            f"claims.{claim.name}.cause is {claimed.cause!r}; it says what a claim that is not "
            "reproduced, or not decided, is put down to, and only there."
        )
    if claim.panel not in panels:
        wrong.append(f"claims.{claim.name} is about {claim.panel!r}, which is no panel.")
    return wrong


def _unknown(
    what: str, named: Sequence[str] | Mapping[str, object], known: Sequence[str]
) -> list[str]:
    return [f"{what}: there is no {name!r} in the report." for name in named if name not in known]
