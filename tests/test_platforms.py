"""Where fedsim cannot run it says so as it is imported."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import fedsim


def test_windows_is_told_at_once_where_fedsim_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="Linux and macOS, and on Windows in WSL"):
        runpy.run_path(str(Path(fedsim.__file__)))
