"""A notebook's cell shows the run as it goes on."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field

import pytest

import fedsim
from fedsim import RunConfig
from fedsim.reports import notebook

CONFIG = RunConfig.parse(
    {
        "title": "<b>mine</b>",
        "rounds": 3,
        "partition": {"clients": 6, "max-examples": 60},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 1.0},
        "engine": {"device": "cpu"},
    }
)


@dataclass
class Cell:
    """Takes the place of IPython's display: a handle whose content is replaced."""

    pages: list[str] = field(default_factory=list)

    def display(self, html: str, *, display_id: bool) -> Cell:
        assert display_id
        self.update(html)
        return self

    def update(self, html: str) -> None:
        self.pages.append(html)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    shown = types.ModuleType("IPython.display")
    shown.display, shown.HTML = cell.display, str
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr(notebook, "BETWEEN", 0.0)
    return cell


def test_a_cell_shows_each_round_in_the_place_of_the_one_before(cell: Cell) -> None:
    result = fedsim.run(CONFIG, callbacks=[fedsim.Live()])
    assert len(cell.pages) == 1 + 4 + 1  # the start, rounds 0 to 3, the end
    for k, page in zip((0, 0, 1, 2, 3, 3), cell.pages, strict=True):
        assert f"{k} of 3" in page
    assert "left" in cell.pages[2]
    last = cell.pages[-1]
    assert "<td>finished.</td>" in last
    assert "&lt;b&gt;mine&lt;/b&gt;" in last
    assert "epsilon (simulated)" in last
    assert f"{result.metrics[-1]['epsilon']:.3f}"[:4] in last


def test_outside_a_notebook_the_run_goes_on_without_it(monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    assert fedsim.run(CONFIG, callbacks=[fedsim.Live()]).ended == "finished"
    assert "needs IPython" in caplog.text
