"""How the command ends when somebody or something else ends it.

What a process has from its beginning (its streams, what interrupts its imports, its limits) is
tested in processes of their own; the rest in this one.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_but

from fedsim.cli import main
from fedsim.runs.metrics import MetricsFile, Row

ROOT = Path(__file__).parent.parent.parent
FILES = [
    ".fedsim-run",
    "checkpoint",
    "config.toml",
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

# Signals its own process when a module is about to be imported.
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
PLAIN = "from fedsim.cli import main; main()"


def start(code: str, directory: Path, *redirections: str) -> subprocess.CompletedProcess[str]:
    """``fedsim run`` in a shell that redirects its output."""
    (directory / "c.toml").write_text(TOML)
    (directory / "program.py").write_text(code)
    line = " ".join([sys.executable, "program.py", "run", "c.toml", "--out", "run", *redirections])
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


@pytest.fixture
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(TOML)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def status(*options: str) -> int:
    """That of ``fedsim run`` in this process."""
    with pytest.raises(SystemExit) as ended:
        main(["run", "c.toml", "--out", "run", *options])
    return int(ended.value.code or 0)


def signal_in_round_2(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process send itself a signal when the round has been reported."""
    append = MetricsFile.append

    def then_signal(self: MetricsFile, row: Row) -> None:
        append(self, row)
        if row["round"] == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(MetricsFile, "append", then_signal)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_round_keeps_the_model_that_was_reached(
    number: signal.Signals,
    in_a_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    signal_in_round_2(number, monkeypatch)
    assert status() == 128 + number
    assert caplog.messages == ["ending after this round; interrupt again to end at once."]
    assert capsys.readouterr().out.splitlines()[-1] == (
        "Interrupted after round 2; the model of this round is saved. "
        "`fedsim run run --resume` continues the run, and `fedsim report run` writes its page."
    )
    assert left(in_a_directory) == FILES
    assert (in_a_directory / "run" / "metrics.csv").read_text().count("\n") == 4


def test_json_says_that_the_run_was_terminated(
    in_a_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signal_in_round_2(signal.SIGTERM, monkeypatch)
    ended_with = status("--json")
    *lines, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["round"] for line in lines] == [0, 1, 2]
    assert (end["event"], end["ended"]) == ("end", "interrupted")
    assert end["status"] == ended_with == 143


def test_json_says_that_the_run_was_terminated_before_it_began(tmp_path: Path) -> None:
    done = start(SIGNAL_AT_IMPORT.format(signal="SIGTERM", module="torch"), tmp_path, "--json")
    end = json.loads(done.stdout)
    assert (end["event"], end["ended"]) == ("end", "interrupted")
    assert end["status"] == done.returncode == 143


@pytest.mark.parametrize(
    ("redirection", "status", "sentence"),
    slow_but(
        1,
        [
            ("| head -n 1", 1, "fedsim: the output was closed by its reader.\n"),
            ("> /dev/full", 1, "fedsim: the output: No space left on device.\n"),
            (">&-", 0, ""),
        ],
    ),
)
def test_a_run_goes_on_whatever_becomes_of_its_output(
    redirection: str, status: int, sentence: str, tmp_path: Path
) -> None:
    done = start(PLAIN, tmp_path, redirection)
    assert (done.returncode, done.stderr) == (status, sentence)
    assert left(tmp_path) == sorted([*FILES, *OF_ITS_END])


def test_what_the_outputs_encoding_lacks_is_replaced(
    in_a_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert status() == 0
    assert b"Gr??e [/bold]" in printed.getvalue() or b"Gr?e [/bold]" in printed.getvalue()


def can_mount() -> bool:
    """Whether this user may mount file systems that nobody else sees."""
    if shutil.which("unshare") is None:
        return False
    line = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


def test_a_file_that_does_not_fit_on_the_disk_is_left_as_it_was(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["sweep", "c.toml", "--out", "sweep", "--over", "seed=1,2"]
    for arguments in (["run", "c.toml", "--out", "run"], sweep):
        with pytest.raises(SystemExit):
            main(arguments)
    before = {path: path.read_bytes() for path in in_a_directory.rglob("*") if path.is_file()}
    capsys.readouterr()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for arguments in (
        ["export", "run", "--to", "safetensors", "--out", "model.safetensors"],
        ["export", "run", "--public", "--out", "public"],
        ["config", "init", "--out", "new.toml"],
        sweep,
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, unlimited[1]))
        try:
            with pytest.raises(SystemExit) as ended:
                main(arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert ended.value.code == 1, arguments
        assert "File too large" in capsys.readouterr().err
    after = {path: path.read_bytes() for path in in_a_directory.rglob("*") if path.is_file()}
    assert after == before


# Runs once for each kind of disk, and once with a limit on the size of files; torch and Flower are
# imported once for all.
LIMITED = """
import io, json, os, resource, subprocess, sys
from contextlib import redirect_stderr, redirect_stdout
from fedsim.cli import main

def end(directory):
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            main(["run", "c.toml", "--out", directory])
    except SystemExit as ended:
        return ended.code, said.getvalue()

ends = {}
for options in sys.argv[1:]:
    os.mkdir(options)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", options], check=True)
    ends[options] = end(f"{options}/run")
with open("c.toml", "a") as config:
    config.write('[model]\\nname = "mlp"\\nwidths = "200"\\n')
resource.setrlimit(resource.RLIMIT_FSIZE, (40960, 40960))
ends["file size"] = end("run")
print(json.dumps(ends))
"""
Ends = dict[str, list[Any]]
DISKS = ("ro", "size=12k", "size=16k")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Statuses and sentences of runs that may not write what they want to."""
    directory = tmp_path_factory.mktemp("limited")
    (directory / "c.toml").write_text(TOML)
    line = [sys.executable, "-c", LIMITED]
    done = subprocess.run(
        ["unshare", "-rm", *line, *DISKS] if can_mount() else line,
        cwd=directory,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        check=True,
    )
    ends: Ends = json.loads(done.stdout)
    return ends


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_ends_a_run_with_what_is_kept(
    ends: Ends,
) -> None:
    assert ends["file size"] == [
        1,
        "fedsim: run/model.safetensors: File too large. run keeps metrics.csv, ledger.jsonl; "
        "`fedsim run run --resume` resumes it from its first round.\n",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        ("ro", 2, "cannot be used (Read-only file system); it must be a directory that can be"),
        ("size=12k", 1, "No space left on device."),
        ("size=16k", 1, "model.safetensors: No space left on device."),
    ],
)
def test_a_disk_that_is_full_or_read_only_ends_the_run_in_a_sentence(
    options: str, status: int, sentence: str, ends: Ends
) -> None:
    if options not in ends:
        pytest.skip("needs a mount of its own")
    ended_with, said = ends[options]
    assert ended_with == status
    assert said.startswith("fedsim: ")
    assert said.count("\n") == 1
    assert sentence in said
