"""What somebody sees who runs fedsim for the first time, and mistypes."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedsim.cli import main

TOML = """
name = "small"
rounds = 2
[partition]
clients = 20
"""


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(TOML)
    log = logging.getLogger("fedsim")
    before, handlers = log.level, list(log.handlers)
    yield
    log.setLevel(before)
    log.handlers[:] = handlers


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def output_text(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).replace("│", " ").split())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_at_once_that_imports_take_their_time(monkeypatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert status("run", "c.toml", "--set", "client.lr=-1") == 2
    assert terminal.getvalue() == "importing\r"


@pytest.mark.parametrize("option", ["--quiet", "--json", "--help"])
def test_nobody_else_is_told(option: str, monkeypatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert status("run", "c.toml", "--set", "client.lr=-1", option) in (0, 2)
    assert "importing" not in terminal.getvalue()


def test_a_quiet_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("run", "c.toml", "--quiet") == 0
    assert output_text(capsys) == ""


def test_json_is_one_object_a_line_and_the_last_says_how_it_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    private = ("--set", "mechanism.name=clipping", "--set", "noise.multiplier=1.0")
    assert status("run", "c.toml", "--json", *private) == 0
    *rounds, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["round"] for line in rounds] == [0, 1, 2]
    assert {line["event"] for line in rounds} == {"round"}
    assert (end["event"], end["ended"], end["directory"]) == ("end", "finished", "runs/small")
    assert (end["status"], end["why"]) == (0, "")
    assert end["privacy"]["level"] == "client"
    assert end["privacy"]["epsilon"] == pytest.approx(rounds[-1]["epsilon"])


@pytest.mark.parametrize(
    ("change", "expected", "made", "directory", "why"),
    [
        ("client.lr=1e30", 1, [0, 1, 2], "runs/small", "the run failed: every client that was"),
        ("client.lr=-1", 2, [], None, "client.lr"),
        ("nothing", 2, [], None, "nothing"),
    ],
)
def test_json_says_of_a_run_that_failed_why_and_with_which_status(
    change: str,
    expected: int,
    made: list[int],
    directory: str | None,
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = ("--set", "rounds=5", "--set", change)
    assert status("run", "c.toml", "--json", *changes) == expected
    printed = capsys.readouterr()
    *rounds, end = map(json.loads, printed.out.splitlines())
    assert [line["round"] for line in rounds] == made
    assert (end["event"], end["ended"], end["status"]) == ("end", "failed", expected)
    assert end["directory"] == directory
    assert why in end["why"]
    assert printed.err.endswith(f"fedsim: {end['why']}\n")


def test_json_says_that_the_users_own_code_has_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: object, *arguments: object) -> None:
        raise ZeroDivisionError("of mine")

    monkeypatch.setattr("fedsim.runs.session.Session.rounds", broken)
    assert status("run", "c.toml", "--json") == 1
    (end,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (end["ended"], end["why"], end["status"]) == ("failed", "ZeroDivisionError: of mine", 1)


@pytest.mark.parametrize(
    ("arguments", "level"),
    [((), logging.WARNING), (("-v",), logging.INFO), (("--log-level", "debug"), logging.DEBUG)],
)
def test_the_log_begins_at_the_level_asked_for(arguments: tuple[str, ...], level: int) -> None:
    assert status("run", "c.toml", "--quiet", "--overwrite", *arguments) == 0
    assert logging.getLogger("fedsim").level == level


def test_another_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("run", "c.toml", "--log-level", "loud") == 2
    assert "--log-level is loud; it must be debug, info, warning, error." in output_text(capsys)


def test_a_run_without_a_mechanism_says_that_it_claims_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status("run", "c.toml") == 0
    summary = output_text(capsys)
    assert "No privacy is claimed: mechanism.name" in summary
    assert "epsilon" not in summary
    assert "private release" not in summary


@pytest.mark.parametrize(
    ("change", "blamed"),
    [
        ("client.lr=-1", "client.lr = -1"),
        ("model.name=nope", "model.name = 'nope'"),
        ("data.name=nowhere", "data.name is 'nowhere'"),
        ("data.name=", "data.name is ''; it must be one of celeba, cifar10"),
        ("stop.metric=test-nonsense", "stop.metric = 'test-nonsense'"),
    ],
)
def test_a_mistake_is_blamed_before_a_directory_that_is_taken(
    change: str, blamed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("run", "c.toml", "--quiet") == 0
    assert status("run", "c.toml", "--set", change) == 2
    assert blamed in output_text(capsys)
    assert status("run", "c.toml") == 2
    assert "already holds a run" in output_text(capsys)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("client.learning-rate", "lr"),
        ("mechanism.max-grad-norm", "clip-norm"),
        ("noise.epsilon", "target-epsilon"),
        ("noise.sigma", "multiplier"),
        ("num-rounds", "rounds"),
        ("client.batchsize", "batch-size"),
    ],
)
def test_a_key_of_another_name_is_recognised(
    key: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("--set", "mechanism.name=clipping", "--set", "noise.multiplier=1.0")
    assert status("run", "c.toml", *changes, "--set", f"{key}=3") == 2
    assert f"did you mean '{meant}'?" in output_text(capsys)


def test_a_directory_of_another_version_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("run", "c.toml", "--quiet") == 0
    config = tmp_path / "runs" / "small" / "config.toml"
    config.write_text(config.read_text().replace("[client]\n", "[client]\nolden = 3\n"))
    assert status("run", "runs/small", "--resume") == 2
    sentence = output_text(capsys)
    assert "runs/small/config.toml belongs to a run of another version of fedsim" in sentence
    assert "'client.olden'" in sentence
    assert "Choose another --out" in sentence


@pytest.mark.parametrize(
    "command",
    [
        "config show RUN",
        "partition RUN --out p.png",
        "stats RUN --epsilon 1 --inputs 0,1 --together",
        "tune RUN --set client.momentum=2",
        "sweep RUN --over client.lr=0",
        "audit RUN --runs 10 --set mechanism.name=clipping --set noise.multiplier=1",
    ],
)
def test_what_takes_a_config_takes_a_run_for_its_config(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("run", "c.toml", "--quiet") == 0
    told = []
    for source in ("runs/small/config.toml", "runs/small"):
        ended = status(*command.replace("RUN", source).split())
        told.append((ended, output_text(capsys)))
    assert told[0] == told[1]
    assert "cannot read" not in told[0][1]
    assert status(*command.replace("RUN", ".").split()) == 2
    assert output_text(capsys).endswith(
        ". is not a run's directory: it has no config.toml; give a config, or a run's directory."
    )
    Path("runs/small/.fedsim-run").unlink()  # hidden, so that `cp -r runs/small/* here` leaves it
    assert status(*command.replace("RUN", "runs/small").split()) == 2
    assert "small is not a run's directory: it has no .fedsim-run; give" in output_text(capsys)


def test_explaining_a_table_fits_on_a_screen_and_names_the_way_to_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status("config", "explain", "mechanism") == 0
    table = capsys.readouterr().out
    assert len(table.splitlines()) < 40
    assert "fedsim config explain mechanism.adaclip" in table
    assert status("config", "explain", "mechanism.adaclip") == 0
    assert "mechanism.gamma" in capsys.readouterr().out
    assert status("config", "explain", "client") == 0
    assert "client.mechanism, client.noise" in output_text(capsys)


def test_clients_without_an_owner_are_spoken_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(60, 4)), generator.integers(2, size=60)
    np.savez(
        tmp_path / "mine.npz", x_train=x.astype(np.float32), y_train=y,
        x_test=x[:10].astype(np.float32), y_test=y[:10], owner_train=np.arange(60) % 12,
    )  # fmt: skip
    dealt = ("--set", "data.name=mine.npz", "--set", "partition.name=by-owner")
    assert status("run", "c.toml", *dealt, "--quiet") == 0
    assert "the last 8 clients have no examples, unless partition.clients is 12." in caplog.text
    report = (tmp_path / "runs" / "small" / "report.html").read_text()
    assert "held by their owners," in report
