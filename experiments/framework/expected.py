"""What to expect of an experiment: the paper's figures, and those of the committed settings."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments.framework.base import Report, Table
from fedsim.errors import FedsimError

__all__ = ["Expected", "Figure"]


@dataclass(frozen=True)
class Figure:
    """One number to expect.

    Attributes
    ----------
    paper : float or None
        As printed in the paper.
    measured : float or None
        Of a run of the committed settings, or a closed form.
    within : float
        How far from it a run of the same settings may end.
    """

    paper: float | None = None
    measured: float | None = None
    within: float = 0.0


@dataclass(frozen=True)
class Expected:
    """Figures and claims of an ``expected.toml``.

    Attributes
    ----------
    claims : mapping of name to bool
        Whether each of the paper's claims held when the committed settings were run.
    """

    figures: Mapping[str, Figure] = field(default_factory=dict)
    claims: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Expected:
        """Read a file; nothing is expected where there is none.

        Raises
        ------
        FedsimError
            If it cannot be read, or a figure has other keys than those of `Figure`.
        """
        if not path.is_file():
            return cls()
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
            figures = {name: Figure(**figure) for name, figure in tree.get("figures", {}).items()}
        except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
            raise FedsimError(f"{path} cannot be read: {error}.") from None
        return cls(figures, tree.get("claims", {}))

    def agrees(self, name: str, value: float) -> bool | None:
        """Whether a figure is what was measured; None if nothing was."""
        figure = self.figures.get(name, Figure())
        if figure.measured is None:
            return None
        # Of numbers as they are printed, the last digit may be rounded.
        return abs(value - figure.measured) <= figure.within + 1e-9

    def table(self, report: Report) -> Table:
        """Figures of a report beside what was expected of them."""
        rows: list[list[str | float | None]] = []
        for name, value in report.figures.items():
            figure = self.figures.get(name, Figure())
            agrees = self.agrees(name, value)
            verdict = "" if agrees is None else "as measured" if agrees else "differs"
            rows.append([name, figure.paper, figure.measured, figure.within, value, verdict])
        columns = ["figure", "paper", "measured", "within", "here", "verdict"]
        return Table("figures", "Figures", columns, rows, digits=4)

    def brief(self, report: Report) -> Table:
        """The rows of `table` that a paper gives or that differ from what was measured."""
        table = self.table(report)
        rows = [row for row in table.rows if row[1] is not None or row[5] == "differs"]
        verdicts = [row[5] for row in table.rows if row[5]]
        agreeing = sum(verdict == "as measured" for verdict in verdicts)
        title = (
            f"Against the paper ({agreeing} of {len(verdicts)} figures are as they were measured)"
        )
        return replace(table, title=title, rows=rows, shown=bool(rows), digits=3)
