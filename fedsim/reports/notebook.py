"""Progress of a run in a notebook: a table that is updated in place."""

from __future__ import annotations

import time
from typing import Any

from fedsim.errors import FedsimError
from fedsim.federation.round_report import describe_reasons, reasons_in
from fedsim.reports.page import ProgressBar, render
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.metrics import display_name, duration, format_metric, row_marks

BETWEEN = 0.2  # least seconds between two updates: rounds can be faster than a browser


class Live(Callback):
    """Shows a run in the output of a notebook's cell: rounds, time left, numbers, failures.

    ``fedsim.run(config, callbacks=[fedsim.Live()])``. The output is updated in place with IPython's
    display handles, which every notebook supports, without widgets or browser extensions.
    """

    def __init__(self) -> None:
        self._shown: Any = None
        self._values: dict[str, float | int] = {}
        self._failures: dict[str, float] = {}
        self._first = 0
        self._since = self._last = 0.0

    def on_start(self, status: RunStatus) -> None:
        """Show the table.

        Raises
        ------
        FedsimError
            If IPython is not installed.
        """
        try:
            from IPython.display import HTML, display
        except ImportError:
            raise FedsimError("fedsim.Live() needs IPython; give it in a notebook.") from None
        self._first, self._since = status.round, time.monotonic()
        self._shown = display(HTML(self._html(status)), display_id=True)

    def on_round(self, status: RunStatus) -> None:
        """Update the table, at most once in `BETWEEN` seconds."""
        row = status.row
        self._values |= {
            name: value
            for name, value in row.items()
            if name.startswith(("test-", "validation-")) or name.endswith("epsilon")
        }
        for name, value in row.items():
            if name.startswith("failed-"):
                self._failures[name] = self._failures.get(name, 0) + value
        if time.monotonic() - self._last >= BETWEEN:
            self._show(status)

    def on_end(self, status: RunStatus) -> None:
        """Show how the run ended."""
        self._show(status)

    def _show(self, status: RunStatus) -> None:
        from IPython.display import HTML

        if self._shown is not None:
            self._shown.update(HTML(self._html(status)))
        self._last = time.monotonic()

    def _html(self, status: RunStatus) -> str:
        config = status.config
        cells: dict[str, object] = {"run": config.title or config.name}
        reached = f"{status.round:,} of {config.rounds:,}{self._time_left(status)}"
        cells["round"] = ProgressBar(status.round, config.rounds, reached)
        for name, value in self._values.items():
            marks = row_marks(status.row) if name.endswith("epsilon") else ""
            cells[display_name(name) + marks] = format_metric(name.partition("-")[2], value)
        if any(self._failures.values()):
            cells["clients failed"] = describe_reasons(reasons_in([self._failures]))
        if status.ended is not None:
            cells["ended"] = f"{status.ended}. {status.why}".strip()
        return render("facts.html", facts=cells)

    def _time_left(self, status: RunStatus) -> str:
        done = status.round - self._first
        if status.ended is not None or done < 1:
            return ""
        seconds = (time.monotonic() - self._since) / done * (status.config.rounds - status.round)
        return f", {duration(seconds)} left"
