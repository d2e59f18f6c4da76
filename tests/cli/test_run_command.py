from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from fedsim.cli import main
from fedsim.cli.app import app
from fedsim.cli.progress import Progress
from fedsim.config import RunConfig
from fedsim.rows.block import Block
from fedsim.training import Trainer

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it has said."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def fedsim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """The command, in this process and in the test's directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return run


SMALL = """
name = "small"
rounds = 2
[partition]
clients = 40
[cohort]
name = "poisson"
rate = 0.2
[mechanism]
name = "clipping"
[noise]
target-epsilon = 2.0
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["task.metrics=top-k(k=2),f1"], ["test top k 2", "test F1", "test loss"]),
        (
            ["mechanism.name=none", "evaluate.every=0", "evaluate.clients-every=1"],
            ["clients' accuracy", "clients' loss"],
        ),
    ],
)
def test_the_summary_has_every_metric_whatever_it_is_called(
    settings: list[str], says: list[str], config: Path, fedsim: Command
) -> None:
    if "mechanism.name=none" in settings:
        config.write_text(SMALL.replace("clipping", "none").split("[noise]")[0])
        settings = settings[1:]
    options = [word for setting in settings for word in ("--set", setting)]
    done = fedsim("run", "small.toml", *options)
    assert done.returncode == 0, done.stderr
    for name in says:
        assert re.search(rf"{name} +[\d.]+( %)? +after round 2", done.stdout), name


def test_run_trains_and_says_what_it_reached(config: Path, tmp_path: Path, fedsim: Command) -> None:
    done = fedsim("run", "small.toml", "--set", "client.lr=0.2")
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert "add-remove" in done.stdout
    assert "runs/small/model.safetensors" in done.stdout
    assert "lr = 0.2" in (tmp_path / "runs" / "small" / "config.toml").read_text()
    again = fedsim("run", "small.toml")
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    changed = ("--overwrite", "--set", "client.lr=0.3")
    assert fedsim("run", "small.toml", *changed).returncode == 0
    assert "lr = 0.3" in (tmp_path / "runs" / "small" / "config.toml").read_text()


def test_a_run_without_evaluation_says_so(config: Path, fedsim: Command) -> None:
    done = fedsim("run", "small.toml", "--set", "evaluate.every=0")
    assert done.returncode == 0, done.stderr
    assert "Nothing was evaluated." in done.stdout


def test_a_mistake_is_one_sentence_and_status_2_and_writes_nothing(
    config: Path, tmp_path: Path, fedsim: Command
) -> None:
    done = fedsim("run", "small.toml", "--set", "cohort.rate=2.0")
    assert done.returncode == 2
    assert done.stderr.strip() == "fedsim: cohort.rate = 2.0; it must be at most 1."
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.toml"]


def test_help_teaches_with_an_example(fedsim: Command) -> None:
    done = fedsim("run", "--help")
    assert done.returncode == 0
    assert "target-epsilon" in done.stdout


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("run", "The TOML file that describes the run"),
        ("privacy", "a ledger (ledger.jsonl)"),
        ("experiment", "a directory with an experiment.toml."),
        ("deploy init", "The federation's directory."),
        ("deploy up", "The federation's directory."),
    ],
)
def test_help_says_what_the_argument_is(command: str, says: str) -> None:
    told = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "150"})
    assert told.exit_code == 0
    assert says in told.output


def every_command(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every_command(command, *path, name)
        else:
            yield (*path, name), command.help or ""


@pytest.mark.parametrize(
    ("path", "text"), [*every_command(cast(click.Group, typer.main.get_command(app)))]
)
def test_each_line_of_an_example_is_a_line_of_the_help(path: tuple[str, ...], text: str) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "120"}).output.splitlines()
    examples = {line.strip() for line in text.splitlines() if line.startswith("    ")}
    assert examples - {line.strip() for line in shown} == {""} & examples


def test_a_private_run_whose_clients_all_fail_ends_well_and_its_summary_says_it(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    honest = Trainer.train

    def diverge(self: Trainer, *arguments: Any) -> Iterator[Block]:
        for block in honest(self, *arguments):
            yield replace(block, rows=torch.full_like(block.rows, torch.nan))

    monkeypatch.setattr(Trainer, "train", diverge)
    five = ("--set", "rounds=5")
    result = CliRunner().invoke(app, ["run", str(config), *five, "--out", str(tmp_path / "x")])
    assert result.exit_code == 0
    said = " ".join(result.output.replace("│", " ").split())
    assert "another learning rate may be too high), all that were asked in 5 rounds." in said
    assert "In 5 rounds no client was usable: noise alone was released, and charged." in said
    columns, *rows = (tmp_path / "x" / "metrics.csv").read_text().splitlines()
    last = dict(zip(columns.split(","), rows[-1].split(","), strict=True))
    assert last["failed-non-finite"] == last["asked"] == last["failed"] != "0"
    plain = ("--set", "mechanism.name=none", "--set", "noise.target-epsilon=")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(config), *five, *plain, "--out", str(tmp_path / "y")])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "the run failed: every client that was asked failed in 3 rounds in a row" in said
    assert "client.lr, server.lr or another learning rate" in said


@pytest.mark.parametrize("found", ["None", "types.ModuleType('experiments')"])
def test_experiments_of_an_installed_package_need_a_source_checkout(found):
    code = (
        f"import sys, types; sys.modules['experiments'] = {found}; "
        "from fedsim.cli import main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "experiment", "quadratic", "--again"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("fedsim: `fedsim experiment` needs a source checkout")


def test_a_pipe_gets_no_boxes_and_epsilon_stands_before_the_loss(fedsim: Command) -> None:
    ran = fedsim("run", str(ROOT / "experiments" / "demo.toml"), "--set", "rounds=2")
    assert ran.returncode == 0, ran.stderr
    assert not re.search("[\u2500-\u257f]", ran.stdout)
    line = next(line for line in ran.stdout.splitlines() if line.startswith("round    2/2"))
    assert line.index("accuracy") < line.index("eps ") < line.index("loss")


def test_a_narrow_terminal_shows_epsilon_whole():
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True, color_system=None)
    progress = Progress(console, RunConfig.parse({"rounds": 40}))
    row = {"round": 12, "test-accuracy": 0.912, "test-loss": 0.31234, "epsilon": 2.314}
    with progress:
        progress.on_round(SimpleNamespace(row={**row, "simulated": 1, "clients-per-second": 910}))
    assert "eps 2.31 (simulated)" in shown.getvalue()


def test_a_line_that_stays_has_the_numbers_of_its_own_round():
    shown = io.StringIO()
    progress = Progress(Console(file=shown, width=200), RunConfig.parse({"rounds": 10}))
    with progress:
        for row in (
            {"round": 4, "test-loss": 71147100.95, "test-accuracy": 0.911},
            {"round": 5, "clients-per-second": 910},
        ):
            progress.on_round(SimpleNamespace(row=row))
    # The oldest rich that is supported ends with an empty line.
    assert list(filter(None, shown.getvalue().splitlines())) == [
        "round    4/10  accuracy 91.10 %  loss 71,147,101",
        "round    5/10  clients/s 910",
    ]
