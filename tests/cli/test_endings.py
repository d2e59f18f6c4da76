"""How the command ends when somebody or something else ends it, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FILES = [
    ".fedsim-run",
    "checkpoint",
    "config.toml",
    "fingerprint.key",
    "ledger.jsonl",
    "manifest.json",
    "metrics.csv",
    "model.safetensors",
]
OF_ITS_END = ["done", "report.html", "summary.json"]

TOML = """
name = "small"
title = "Größe [/bold]"
rounds = 3
[partition]
clients = 20
[mechanism]
name = "clipping"
[noise]
multiplier = 1.0
"""

# Signals its own process when a module is about to be imported, or a round has been reported.
SIGNAL_AT_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and not hasattr(sys, "signalled"):
            sys.signalled = True
            os.kill(os.getpid(), signal.{signal})
sys.meta_path.insert(0, Finder())
from fedsim.cli import main
main()
"""
SIGNAL_IN_ROUND = """
import os, signal
from fedsim.runs.metrics import MetricsFile
append = MetricsFile.append
def then_signal(self, row):
    append(self, row)
    if row["round"] == 2:
        os.kill(os.getpid(), signal.{signal})
MetricsFile.append = then_signal
from fedsim.cli import main
main()
"""
PLAIN = "from fedsim.cli import main; main()"


def start(code: str, directory: Path, *redirections: str) -> subprocess.CompletedProcess[str]:
    """``fedsim run`` in a shell that redirects its output."""
    (directory / "c.toml").write_text(TOML)
    (directory / "code.py").write_text(code)
    line = " ".join([sys.executable, "code.py", "run", "c.toml", "--out", "run", *redirections])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "100"}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=directory,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def left(directory: Path) -> list[str]:
    run = directory / "run"
    return sorted(path.name for path in run.iterdir()) if run.exists() else []


@pytest.mark.parametrize(
    ("name", "module"), [("SIGINT", "torch"), ("SIGTERM", "torch"), ("SIGINT", "typer")]
)
def test_a_signal_during_imports_ends_the_command_with_a_word(
    name: str, module: str, tmp_path: Path
) -> None:
    done = start(SIGNAL_AT_IMPORT.format(signal=name, module=module), tmp_path)
    assert done.returncode == 128 + getattr(signal, name)
    assert done.stderr == "fedsim: interrupted.\n"
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_in_a_round_keeps_the_model_that_was_reached(name: str, tmp_path: Path) -> None:
    done = start(SIGNAL_IN_ROUND.format(signal=name), tmp_path)
    assert done.returncode == 128 + getattr(signal, name)
    assert done.stderr == "ending after this round; ask again to end at once.\n"
    assert done.stdout.splitlines()[-1] == (
        "Interrupted after round 2; the model of this round is saved. "
        "`fedsim run run --resume` continues the run, and `fedsim report run` writes its page."
    )
    assert left(tmp_path) == FILES
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 4


@pytest.mark.parametrize(("code", "rounds"), [(SIGNAL_IN_ROUND, [0, 1, 2]), (SIGNAL_AT_IMPORT, [])])
def test_json_says_that_the_run_was_terminated(
    code: str, rounds: list[int], tmp_path: Path
) -> None:
    done = start(code.format(signal="SIGTERM", module="torch"), tmp_path, "--json")
    *lines, end = map(json.loads, done.stdout.splitlines())
    assert [line["round"] for line in lines] == rounds
    assert (end["event"], end["ended"]) == ("end", "interrupted")
    assert end["status"] == done.returncode == 143


def test_a_limit_on_the_size_of_files_ends_a_run_with_what_is_kept(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(PLAIN)
    (tmp_path / "c.toml").write_text(TOML + '[model]\nname = "mlp"\nwidths = "200"\n')
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 40; {sys.executable} code.py run c.toml --out run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "fedsim: run/model.safetensors: File too large. run keeps metrics.csv, ledger.jsonl, "
        "fingerprint.key; `fedsim run run --resume` resumes it from its first round.\n"
    )


@pytest.mark.parametrize(
    ("redirection", "status", "sentence"),
    [
        (">&-", 0, ""),
        ("> /dev/full", 1, "fedsim: the output: No space left on device.\n"),
        ("| head -n 1", 1, "fedsim: nobody reads the output any more.\n"),
    ],
)
def test_a_run_goes_on_whatever_becomes_of_its_output(
    redirection: str, status: int, sentence: str, tmp_path: Path
) -> None:
    done = start(PLAIN, tmp_path, redirection)
    assert (done.returncode, done.stderr) == (status, sentence)
    assert left(tmp_path) == sorted([*FILES, *OF_ITS_END])


def test_what_the_outputs_encoding_lacks_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = start(PLAIN, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Gr??e [/bold]" in done.stdout or "Gr?e [/bold]" in done.stdout


def can_mount() -> bool:
    """Whether this user may mount file systems that nobody else sees."""
    if shutil.which("unshare") is None:
        return False
    line = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        ("ro", 2, "cannot be used (Read-only file system); it must be a directory that can be"),
        ("size=12k", 1, "No space left on device."),
        ("size=16k", 1, "model.safetensors: No space left on device."),
    ],
)
def test_a_disk_that_is_full_or_read_only_ends_the_run_in_a_sentence(
    options: str, status: int, sentence: str, tmp_path: Path
) -> None:
    if not can_mount():
        pytest.skip("needs a mount of its own")
    (tmp_path / "c.toml").write_text(TOML)
    disk = tmp_path / "disk"
    disk.mkdir()
    command = f"{sys.executable} -m fedsim run c.toml --out {disk}/run"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o {options} tmpfs {disk} && {command}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        check=False,
    )
    assert done.returncode == status
    assert done.stderr.startswith("fedsim: ")
    assert done.stderr.count("\n") == 1
    assert sentence in done.stderr
