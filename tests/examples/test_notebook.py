"""The notebooks' cells run from top to bottom, as they stand in their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def run_cells(name: str) -> dict[str, Any]:
    notebook = json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    namespace: dict[str, Any] = {}
    for cell in notebook["cells"]:
        assert cell.keys() >= {"id", "cell_type", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # they would grow old
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    return tmp_path


def test_every_cell_of_a_first_run_runs(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = run_cells("first_run.ipynb")
    assert "differentially private" in capsys.readouterr().out
    assert namespace["result"].ended == "finished"
    assert namespace["accuracy"][-1] > 0.5
    assert namespace["saved"].predict(namespace["test"].x[:8].numpy()).shape == (8,)
    assert (directory / "runs" / "notebook" / "report.html").is_file()


def test_every_cell_of_your_flower_app_runs(capsys: pytest.CaptureFixture[str]) -> None:
    namespace = run_cells("flower_app.ipynb")
    assert "differentially private" in capsys.readouterr().out
    assert namespace["strategy"].privacy_spent().epsilon == pytest.approx(8, abs=0.01)
    accuracy = namespace["accuracy"]
    assert accuracy(namespace["result"].arrays) > 0.85
    assert accuracy(namespace["private"].arrays) > 0.5


def test_every_notebook_is_run_here() -> None:
    assert {path.name for path in NOTEBOOKS.glob("*.ipynb")} == {
        "first_run.ipynb",
        "flower_app.ipynb",
    }
