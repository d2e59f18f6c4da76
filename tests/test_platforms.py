"""Where fedsim cannot run it says so as it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedsim

SENTENCE = "fedsim runs on Linux and macOS, and on Windows in WSL: it locks its files."

# What Python runs before anything else: a system that is called Windows, and has no `fcntl`.
WINDOWS = """
import sys
sys.modules["fcntl"] = None
sys.platform = "win32"
"""


def on_windows(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "sitecustomize.py").write_text(WINDOWS)
    paths = [str(directory), str(Path(fedsim.__file__).parents[1])]
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", ["module", "script"])
def test_the_command_says_on_windows_in_one_sentence_where_fedsim_runs(
    command: str, tmp_path: Path
) -> None:
    script = tmp_path / "fedsim.exe"
    script.write_text("from fedsim.cli import main\nmain()\n")
    started = ["-m", "fedsim"] if command == "module" else [str(script)]
    done = on_windows(tmp_path, *started, "run", "digits.toml")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"fedsim: {SENTENCE}\n")


def test_who_imports_fedsim_on_windows_gets_an_import_error_that_can_be_caught(
    tmp_path: Path,
) -> None:
    catching = "try: import fedsim.privacy\nexcept ImportError as error: print(error)"
    done = on_windows(tmp_path, "-c", catching)
    assert (done.returncode, done.stdout) == (0, f"{SENTENCE}\n"), done.stderr
