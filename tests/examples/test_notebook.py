"""The notebook's cells run from top to bottom, as they stand in its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "first_run.ipynb"


def test_every_cell_of_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    namespace: dict[str, Any] = {}
    for cell in notebook["cells"]:
        assert cell.keys() >= {"id", "cell_type", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # they would grow old
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
    assert "differentially private" in capsys.readouterr().out
    assert namespace["result"].ended == "finished"
    assert namespace["accuracy"][-1] > 0.5
    assert namespace["saved"].predict(namespace["test"].x[:8].numpy()).shape == (8,)
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()
