"""A sampler with a law of its own, and a noise, of a file that fedsim has never seen."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from outside_laws import Couples
from typer.testing import CliRunner

from fedsim.cli.app import app
from fedsim.privacy import epsilon

HERE = Path(__file__).parent
CONFIG = """
name = "outside"
rounds = 3
[partition]
clients = 40
[cohort]
name = "outside_laws:Couples"
options = "rate=0.25"
[mechanism]
name = "clipping"
[noise]
name = "outside_laws:Loud"
options = "factor=1.5"
multiplier = 0.8
delta = 1e-3
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outside") / "outside.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(autouse=True)
def _beside_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("COLUMNS", "200")


def fedsim(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    out = config.parent / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(HERE)
        fedsim("run", config, "--out", out)
    return out


def test_a_run_costs_what_the_laws_say_and_says_whose_word_that_is(config: Path, run: Path) -> None:
    statement = json.loads(fedsim("privacy", run, "--json"))[0]
    told = fedsim("privacy", config)
    expected = epsilon(noise_multiplier=1.5 * 0.8, cohort=Couples(0.25, 40), rounds=3, delta=1e-3)
    assert statement["epsilon"] == pytest.approx(expected, rel=1e-3)
    assert f"{statement['epsilon']:.4f}" in told
    assert (statement["samplers"], statement["declared"]) == (["louder"], True)
    for said in (told, " ".join(statement["public"])):
        said = " ".join(said.split())
        assert "Declared by the user: that the sampler" in said
        assert "Declared by the user: that the noise" in said
    assert "couples, rate 0.25, 1.5 times the noise" in told
    assert "as the user declares" in " ".join(fedsim("privacy", run).split())


def test_fedsims_noises_are_compared_at_the_epsilon_of_an_outside_one(config: Path) -> None:
    table = fedsim("privacy", config, "--noises")
    assert re.search(r"independent .* 1\.2 ", table)  # 1.5 times 0.8


def test_the_page_says_how_clients_were_drawn_and_that_epsilon_is_declared(run: Path) -> None:
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "couples, rate 0.25, 1.5 times the noise; about 10 of 40" in page
    assert "epsilon (simulated, declared by the user)" in page
    assert "couples of clients that come together, at 1.5 times the noise multiplier" in page


def test_progress_and_a_sweeps_table_mark_epsilon_as_declared(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    assert "(simulated, declared by the user)" in fedsim("run", config, "--out", tmp_path / "run")
    sweep = fedsim("sweep", config, "--over", "client.lr=0.1,0.2", "--out", tmp_path / "sweep")
    table, found = sweep.replace("\n", " "), (tmp_path / "sweep" / "sweep.csv").read_text()
    assert "declared" in table
    assert "epsilon,simulated,declared\n" in found
    assert found.count(",1,1\n") == 2


def test_a_run_is_verified_without_the_code_that_it_named(run: Path) -> None:
    script = (
        "import sys\nfrom fedsim.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    assert 'outside_laws' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", str(run)],
        cwd=run.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILS" not in done.stdout
    assert re.search(r"passes +metrics +4 rows", done.stdout)


def test_a_law_stands_once_in_a_ledger(run: Path) -> None:
    _header, *lines = (run / "ledger.jsonl").read_text().splitlines()
    entries = [entry for line in lines for entry in json.loads(line)["entry"]["releases"]]
    laws = [entry["event"]["law"] for entry in entries]
    assert len(laws[0]["curve"]) > 100
    assert all(set(law) == {"name", "as"} for law in laws[1:])
    assert entries[0]["declared-by-user"] is True


@pytest.mark.slow
def test_an_audit_of_an_outside_law_and_noise_finds_no_violation(config: Path) -> None:
    assert "No violation" in " ".join(fedsim("audit", config, "--runs", "30").split())


def test_correlated_noise_of_an_outside_file_costs_what_fedsims_own_of_its_kind_does(
    tmp_path: Path,
) -> None:
    def epsilon_of(name: str, *options: str) -> float:
        out = tmp_path / name.rpartition(":")[2]
        settings = (
            "rounds=4", "partition.clients=20", "mechanism.name=clipping", f"noise.name={name}",
            "noise.multiplier=4.0", *options,
        )  # fmt: skip
        (tmp_path / "empty.toml").write_text("")
        changes = [word for setting in settings for word in ("--set", setting)]
        fedsim("run", tmp_path / "empty.toml", "--out", out, *changes)
        return json.loads(fedsim("privacy", out, "--json"))[0]["epsilon"]

    assert epsilon_of("outside_laws:Cancelling", "noise.options.buffers=1") == epsilon_of(
        "blt", "noise.buffers=1"
    )
