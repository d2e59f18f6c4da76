"""Every experiment end to end in a small version, and what a second run does."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tomli_w
import typer
from experiment_helpers import run_experiment, write_judgement
from slow_cases import slow_but
from typer.testing import CliRunner

from experiments.command import experiment
from experiments.framework import config_runs
from experiments.framework import run as running
from experiments.framework.base import (
    Experiment,
    ExperimentClaim,
    Members,
    Report,
    Result,
    digest,
)
from experiments.framework.config_runs import ConfigRuns
from experiments.framework.judge import NOTHING, Judgement, judge
from experiments.framework.run import (
    MARKER,
    Stored,
    directories,
    find,
    keep,
    load,
    run_members,
    shortened,
)
from fedsim.cli import main
from fedsim.config import RunConfig
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.reports.verification import verify_run

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "experiments"

SMALL: dict[str, dict[str, Any]] = {
    "quadratic": {"clients": 8, "dimension": 12, "columns": 3, "rounds": 6, "steps": 3},
    "das-fmnist": {"epsilons": [8.0], "clip-norms": [1.0, 20.0]},
    "adaclip-regression": {
        "dimensions": [3, 100],
        "steps": 30,
        "rates": [0.01, 0.1],
        "h2": [1e-4, 1.0],
    },
    "adaclip-mnist": {
        "epsilons": [1.0],
        "epochs": [2],
        "batch": 20.0,
        "curves-at": 1.0,
        "rates": [0.1, 0.3],
        "whitened-rates": [1.0],
    },
    "adaclip-pca": {
        "epsilons": [2.0],
        "rates": [0.1, 0.3],
        "epochs": 1,
        "batch": 10.0,
        "directions": 5,
        "hidden": 8,
        "examples": 100,
    },
    "adaclip-whitening": {
        "epsilons": [1.0],
        "epochs": [2],
        "batch": 20.0,
        "rates": [0.1, 0.3],
        "whitened-rates": [1.0],
    },
    "das-local-steps": {
        "clients": 8,
        "dimension": 12,
        "columns": 3,
        "rounds": 6,
        "local-steps": [1, 20],
        "lengths": [0.03, 0.1],
    },
    "adaclip-theory": {"draws": 200, "dimensions": [3], "steps": 5},
    "xu": {"digits": 1, "steps": 10},
    "xu-mnist": {"examples": 100, "batch": 20.0, "epochs": 1, "betas": [5.0, 20.0]},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with noise in MNIST's shape."""
    directory = tmp_path_factory.mktemp("data")
    draws = np.random.default_rng(0)
    np.savez(
        directory / "mnist.npz",
        x_train=draws.integers(0, 256, (200, 28, 28), dtype=np.uint8),
        y_train=(np.arange(200) % 10).astype(np.uint8),  # as the files have them
        x_test=draws.integers(0, 256, (40, 28, 28), dtype=np.uint8),
        y_test=(np.arange(40) % 10).astype(np.uint8),
    )
    return directory


def small(name: str, directory: Path) -> Path:
    """A copy of a committed experiment, made small."""
    tree = tomllib.loads((find(name) / "experiment.toml").read_text())
    tree |= {"seeds": 2, **SMALL[name]}
    if name == "quadratic":
        tree["cases"] = tree["cases"][:1]
    if name == "das-fmnist":
        base = tomllib.loads((find(name) / "run.toml").read_text())
        base["data"]["name"], base["rounds"] = "digits", 6
        base["partition"]["clients"] = 40
        (directory / "run.toml").write_text(tomli_w.dumps(base))
    (directory / "experiment.toml").write_text(tomli_w.dumps(tree))
    shutil.copy(find(name) / "judgement.toml", directory)
    return directory


@pytest.mark.parametrize("name", slow_but(("adaclip-regression", "quadratic"), SMALL))
def test_experiment_leaves_a_page_and_pictures(name: str, tmp_path: Path, data: Path) -> None:
    directory, out = tmp_path / "experiment", tmp_path / "out"
    directory.mkdir()
    judged = run_experiment(small(name, directory), out, data=data)
    assert judged.report.claims
    assert all(np.isfinite(value) for value in judged.report.figures.values())
    assert (out / "README.md").read_text() == judged.page
    pictures = {path.stem for path in out.glob("*.png") if path.stat().st_size > 0}
    assert pictures == set(judged.report.pictures)
    # A second time nothing is run again, and the same comes out.
    again = load(directory, data=data)
    assert Stored.load(out).of(again.members()).keys() == again.members().keys()
    assert run_experiment(directory, out, data=data).page == judged.page


@pytest.mark.parametrize(
    "name",
    slow_but(
        ("adapters-text", "das-fmnist", "koskela-rate", "koskela-scale", "niid-mnist", "xu"),
        sorted(path.parent.name for path in COMMITTED.rglob("experiment.toml")),
    ),
)
def test_committed_experiment_is_valid(name: str, data: Path) -> None:
    directory = find(name)
    assert load(directory, data=data).members()
    assert (directory / "README.md").is_file()
    Judgement.load(directory)


class Counting(Experiment):
    """Counts how often it is run."""

    runs: ClassVar[list[int]] = []
    breaks_at: ClassVar[int] = -1

    def members(self) -> Members:
        return {f"member {k}": {"k": k} for k in range(self.settings.seeds)}

    def run(self, settings: Mapping[str, Any]) -> Result:
        if settings["k"] == self.breaks_at:
            raise KeyboardInterrupt
        self.runs.append(settings["k"])
        return {"value": settings["k"]}

    def report(self, results: Mapping[str, Result]) -> Report:
        total = float(sum(result["value"] for result in results.values()))
        return Report(
            [], {"total": total}, [ExperimentClaim("c", "Fig. 1", "it adds up", total > 0, "")]
        )


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        running,
        "import_module",
        lambda name: _Module if name == "experiments.das.tables" else import_module(name),
    )
    monkeypatch.setattr(Counting, "runs", [])
    monkeypatch.setattr(Counting, "breaks_at", -1)
    directory = tmp_path / "counting"
    directory.mkdir()
    (directory / "experiment.toml").write_text(f'experiment = "{COUNTING}"\nseeds = 4\n')
    write_judgement(directory)
    return directory


COUNTING = "das.tables:Counting"  # a module that there is, in whose place is this one


class _Module:
    Counting = Counting


def stored_as(settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What is stored of a member."""
    return {"settings": digest(settings), "result": more.pop("value", {"value": 1}), **more}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_member_that_is_refused_is_named(
    workers: int, counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Counting, settings: object) -> Result:
        raise FedsimError("noise-multiplier is 6.46; it must be below 5.")

    monkeypatch.setattr(Counting, "run", refused)
    monkeypatch.setattr(running, "ProcessPoolExecutor", _Here)
    with pytest.raises(FedsimError, match=r"^member \d: noise-multiplier is 6\.46"):
        run_experiment(counting, tmp_path / "out", workers=workers)


class _Here:
    """A pool whose work is done in this process."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, call: Callable[..., object], *arguments: object) -> Future[object]:
        future: Future[object] = Future()
        try:
            future.set_result(call(*arguments))
        except FedsimError as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None: ...


def test_interrupted_experiment_goes_on_where_it_stopped(
    counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "breaks_at", 2)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(counting, tmp_path / "out")
    assert Counting.runs == [0, 1]
    monkeypatch.setattr(Counting, "breaks_at", -1)
    shown = list(run_members(load(counting), tmp_path / "out", workers=1))
    assert Counting.runs == [0, 1, 2, 3]
    assert shown == [("", 2, 4), ("member 2", 3, 4), ("member 3", 4, 4)]
    judged = run_experiment(counting, tmp_path / "out")
    assert Counting.runs == [0, 1, 2, 3]
    assert judged.report.figures == {"total": 6.0}


def test_stored_members_are_not_run_again_unless_they_are_to_be(
    counting: Path, tmp_path: Path
) -> None:
    first = run_experiment(counting, tmp_path / "a", only="* [01]")
    assert (Counting.runs, first.report, len(first.missing)) == ([0, 1], NOTHING, 2)
    first.stored.save(counting)
    second = run_experiment(counting, tmp_path / "b", only="* 3")
    assert (Counting.runs, len(second.missing)) == ([0, 1, 3], 1)
    second.stored.save(counting)
    third = run_experiment(counting, tmp_path / "c")
    assert Counting.runs == [0, 1, 3, 2]
    assert third.report.figures == {"total": 6.0}
    for one in third.stored.members.values():
        assert isinstance(one["seconds"], float)
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", one["date"])
        assert re.fullmatch(r"[0-9a-f]{12}\+?|", one["commit"])
    third.stored.save(counting)
    for _ in range(2):  # the second time --out has it
        run_experiment(counting, tmp_path / "d", only="* 0", again=True)
        assert Counting.runs == [0, 1, 3, 2, 0]
    # What the members are has changed, and no stored result is of that.
    (counting / "experiment.toml").write_text(f'experiment = "{COUNTING}"\nseeds = 5\n')
    run_experiment(counting, tmp_path / "e")
    assert Counting.runs == [0, 1, 3, 2, 0, 4]


def test_page_estimates_what_was_not_run_from_what_was(
    counting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = load(counting, data=tmp_path)
    Stored({"member 0": stored_as({"k": 0}, seconds=7200.0)}).save(counting)
    write_judgement(counting, 'not-run = "No time."\n')
    judged = judge(experiment, Stored.load(counting))
    judged.write(counting)
    assert [*judged.faults(), *judged.faults_of_page()] == []
    assert "Not measured: nothing here is judged." in judged.page
    assert "No time. 3 of 4 runs are missing: an estimated 6.0 hours of one core" in judged.page
    with pytest.raises(SystemExit):
        main(["experiment", str(counting), "--check"])
    assert "an estimated 6.0 hours of one core" in capsys.readouterr().out
    whole = run_experiment(counting, tmp_path / "out")
    assert "0 results are missing, none, and not-run says 'No time.'." in [*whole.faults()]


def test_private_member_has_a_run_directory_whose_ledger_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "das-fmnist"
    directory.mkdir()
    made = load(small("das-fmnist", directory), data=tmp_path)
    made.prepare(tmp_path)
    free, private = [*made.members().values()][:2]
    assert "ledger" not in made.run(free)
    result = made.run(private)
    run = tmp_path / "runs" / digest(private)
    assert Ledger.read(run / "ledger.jsonl").head == result["ledger"]
    assert all(one.passed for one in verify_run(run))
    assert made.run(private) == result  # resumed at its end
    lines = (run / "ledger.jsonl").read_text().splitlines()
    (run / "ledger.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    monkeypatch.setattr(config_runs, "run_config", lambda *_, **__: RunConfig)
    monkeypatch.setattr(RunConfig, "ended", "finished", raising=False)
    monkeypatch.setattr(RunConfig, "metrics", [], raising=False)
    with pytest.raises(FedsimError, match="ledger"):
        made.run(private)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("das-fmnist", "client.lr=1", "must be engine.KEY=VALUE"),
        ("das-fmnist", "engine.name=slow", "engine.name = 'slow'"),
        ("quadratic", "engine.device=cpu", "of an experiment whose members are runs of a config"),
    ],
)
def test_only_the_engine_of_members_can_be_set(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FedsimError, match=message):
        load(find(name), data=tmp_path, engine=[text])
    made = load(find("das-fmnist"), data=tmp_path, engine=["engine.device=cuda"])
    assert isinstance(made, ConfigRuns)
    engine = made.config_of(next(iter(made.members().values()))).engine
    assert engine.device == "cuda"
    assert engine.workers == 1  # members are processes of their own
    made = load(find("das-fmnist"), data=tmp_path, engine=["engine.name=ray"])
    assert isinstance(made, ConfigRuns)
    assert made.config_of(next(iter(made.members().values()))).engine.workers == 0


def test_a_gpus_runs_count_no_seconds_of_a_core(counting: Path, tmp_path: Path) -> None:
    experiment = load(counting, data=tmp_path)
    write_judgement(counting, 'not-run = "No time."\n')

    def page(*seconds: float | None, untimed: float = 0.0) -> str:
        results = {
            f"member {k}": stored_as({"k": k}, **({} if each is None else {"seconds": each}))
            for k, each in enumerate(seconds)
        }
        return judge(experiment, Stored(results, untimed)).page

    mixed = page(30.0, None, None)
    assert "3 runs, 2 of them on a GPU, 30 seconds on one core of a busy machine for the" in mixed
    assert "an estimated 30 seconds of one core" in mixed
    alone = page(None, None, None)
    assert "3 runs, on a GPU. " in alone
    assert "1 of 4 runs are missing." in alone
    assert "1 runs, 30 seconds on one core of a busy machine. " in page(30.0)
    # Of results that are kept with the seconds of all together none was on a GPU.
    assert "an estimated 50 seconds of one core" in page(None, None, untimed=50.0)


def test_what_is_somebodys_own_is_not_overwritten(counting: Path, tmp_path: Path) -> None:
    somebodys = tmp_path / "somebodys"
    somebodys.mkdir()
    (somebodys / "README.md").write_text("mine")
    with pytest.raises(FedsimError, match="no experiment's marker"):
        run_experiment(counting, somebodys)
    assert [path.name for path in somebodys.iterdir()] == ["README.md"]
    assert (somebodys / "README.md").read_text() == "mine"


@pytest.mark.slow
def test_killed_process_is_a_sentence_and_what_has_finished_is_kept(tmp_path: Path) -> None:
    members: Members = {name: {"name": name} for name in ("short", "killed", "long")}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MARKER).touch()
    with pytest.raises(FedsimError, match="was killed, perhaps for want of memory"):
        list(running._work(Waiting(), members, 2, tmp_path / "out"))
    assert [*Stored.load(tmp_path / "out").members] == ["short"]


class Waiting:
    """Members that end at once, kill their process, or take an hour."""

    def run(self, settings: Mapping[str, Any]) -> Result:
        if settings["name"] == "killed":
            time.sleep(3)  # until the short one has been stored
            os.kill(os.getpid(), signal.SIGKILL)
        if settings["name"] == "long":
            time.sleep(3600)
        return {}


ENDED = """
import sys, time
from pathlib import Path

from experiments.framework.run import MARKER, _work
from fedsim.cli.boundary import guarded


class Waiting:
    def run(self, settings):
        name = Path(settings["name"])
        name.touch()
        while name.name != "short":
            time.sleep(0.01)
        return {}


def command():
    members = {name: {"name": name} for name in sys.argv[2:]}
    Path("out").mkdir()
    Path("out", MARKER).touch()
    for name in _work(Waiting(), members, int(sys.argv[1]), Path("out")):
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(command))
"""


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["SIGINT to all", "SIGTERM to the first"])
@pytest.mark.parametrize(
    "arguments", ["3 short one two", "2 one two three four"], ids=["one idle", "some left"]
)
def test_an_experiment_that_is_asked_to_end_ends_with_all_its_processes(
    arguments: str, asked: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(ENDED)
    process = subprocess.Popen(
        [sys.executable, "program.py", *arguments.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        if "short" in arguments:
            assert process.stdout.readline() == "short\n"
        while not ((tmp_path / "one").exists() and (tmp_path / "two").exists()):
            assert process.poll() is None
            time.sleep(0.05)
        if asked == "SIGINT to all":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == (130 if asked == "SIGINT to all" else 143)
    begun = {path.name for path in tmp_path.iterdir()} - {"program.py", "short", "out"}
    assert begun == {"one", "two"}
    assert "Traceback" not in errors


def test_result_of_other_settings_counts_as_none_and_a_torn_file_is_refused(
    counting: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert [*run_experiment(counting, out, only="* 1").stored.members] == ["member 1"]
    keep(out, "member 1", stored_as({"k": 1}, value=shortened({"value": 1 / 3}), seconds=0.1))
    (found,) = Stored.load(out).of({"member 1": {"k": 1}}).values()
    assert (found["result"], found["seconds"]) == ({"value": 0.333333}, 0.1)
    assert Stored.load(out).of({"member 1": {"x": [1, 2.6]}}) == {}
    empty = '{"members": {"member 1": {"settings": ""}}}'
    for torn in ('{"members": "', "[]", "3", '{"members": 3}', '{"seconds": "a"}', empty):
        (out / "results.json").write_text(torn)
        with pytest.raises(FedsimError, match="cannot be read"):
            run_experiment(counting, out)


def test_processes_that_share_a_directory_keep_each_others_results(tmp_path: Path) -> None:
    (tmp_path / MARKER).touch()
    with ThreadPoolExecutor(4) as pool:
        for k in range(40):
            pool.submit(keep, tmp_path, f"member {k}", stored_as({"k": k}))
    assert {*Stored.load(tmp_path).members} == {f"member {k}" for k in range(40)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('experiment = "nothing"\n', "must be a module and a class"),
        ('experiment = "das.tables:METHODS"\n', "must be a module and a class"),
        ('experiment = "os:Counting"\n', "must be a module and a class"),
        ("seeds = 4\n", "must be a module and a class"),
        ('experiment = "das.tables:Counting"\nseeds = 0\n', "seeds"),
        ('experiment = "das.tables:Counting"\nseedz = 1\n', "seedz"),
        ("experiment = ", "is not valid TOML"),
    ],
)
def test_mistake_in_an_experiment_is_one_sentence(counting: Path, text: str, message: str) -> None:
    (counting / "experiment.toml").write_text(text)
    with pytest.raises(FedsimError, match=message):
        load(counting, data=Path("data"))


def test_its_files_may_begin_with_a_byte_order_mark(counting: Path) -> None:
    (counting / "experiment.toml").write_text(
        'experiment = "das.tables:Counting"\nseeds = 4\n', "utf-8-sig"
    )
    (counting / "judgement.toml").write_text(
        'title = "T"\npaper-of = "das"\nabout = "A"\n'
        '[[panels]]\nname = "Fig. 1"\nshows = "s"\nsetting = "s"\n',
        "utf-8-sig",
    )
    assert len(load(counting, data=Path("data")).members()) == 4
    assert Judgement.load(counting).about == "A"


def test_command_shows_verdicts(counting: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(experiment)
    out = tmp_path / "out"
    write_judgement(counting, "[claims.c]\nsource = 'Fig. 1'\nverdict = 'reproduced'\n")
    result = CliRunner().invoke(app, [str(counting), "--out", str(out), "--workers", "1"])
    assert result.exit_code == 0, result.output
    assert "reproduced      Fig. 1: it adds up" in result.output
    assert "4/4" in result.output
    assert "README.md" in result.output


def test_command_without_a_name_lists_the_experiments() -> None:
    app = typer.Typer()
    app.command()(experiment)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in directories())


def test_unknown_experiment_is_one_sentence() -> None:
    with pytest.raises(FedsimError, match="there is no experiment 'nothing'"):
        find("nothing")
