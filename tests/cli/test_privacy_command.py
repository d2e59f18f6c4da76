from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from fedsim import RunConfig
from fedsim.cli.privacy import privacy
from fedsim.cohorts import CyclicCohort, FixedCohort, PoissonCohort
from fedsim.errors import FedsimError
from fedsim.privacy import Entry, Event, Ledger, calibrate, epsilon, rounds_within
from fedsim.runs.preflight import warnings
from fedsim.runs.resolve import resolve

CONFIG = """
name = "plan"
rounds = 40
[partition]
clients = 200
[cohort]
name = "poisson"
rate = 0.2
[mechanism]
name = "clipping"
[noise]
delta = 1e-4
"""


def ask(*arguments: str) -> str:
    app = typer.Typer(rich_markup_mode="markdown")
    app.command()(privacy)
    result = CliRunner().invoke(app, list(arguments), terminal_width=200)
    if result.exception is not None:
        raise result.exception
    return result.output


def answer(output: str, name: str) -> float:
    found = re.search(rf"^{name} +([\d.,]+)", output, re.MULTILINE)
    assert found, output
    return float(found[1].replace(",", ""))


def table(output: str) -> list[list[float]]:
    rows = [line.replace(",", "").split() for line in output.splitlines()]
    numeric = re.compile(r"\d+(\.\d+)?")
    return [
        [float(cell) for cell in row] for row in rows if row and all(map(numeric.fullmatch, row))
    ]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG + "multiplier = 1.5\n")
    return str(path)


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for t in range(1, 21):
        ledger.record(Entry(round=t, event=Event.of(PoissonCohort(0.2, 200), 1.5), clip_norm=1.0))
    return ledger


USELESS = "Warning: delta = 0.01 is at least 1 / 200, the population"
EXAMPLES = """
rounds = 2
[partition]
name = "iid"
clients = 30
[client.mechanism]
name = "clipping"
[client.noise]
multiplier = 1.0
"""


def test_a_delta_at_which_a_row_could_be_published_is_said_before_any_round(
    config, ledger, tmp_path
):
    assert "Warning: delta" not in ask(config)
    useless = (config, "--set", "noise.delta=0.01")
    for options in ((), ("--over", "rounds=10,20"), ("--noises",)):
        assert USELESS in ask(*useless, *options)
    for options in ((config,), (str(ledger.path), "--rounds", "5")):
        assert USELESS in ask(*options, "--delta", "0.01")
    assert USELESS in ask(config, "--over", "delta=1e-4,0.01,0.006")
    assert USELESS in ask(
        *("--rate", "0.1", "--population", "200", "--rounds", "5", "-z", "1", "--delta", "0.01")
    )
    # 1,437 training images of 30 clients: the smallest has 47.
    examples = tmp_path / "examples.toml"
    examples.write_text(EXAMPLES + "delta = 0.2\n")
    sentence = "Warning: delta = 0.2 is at least 1 / 47, a client's examples"
    assert sentence in ask(str(examples))
    assert "Warning: delta" not in ask(str(examples), "--delta", "1e-3")
    both = {"mechanism.name": "clipping", "noise.multiplier": 1.0, "noise.delta": 0.5, "rounds": 1}
    resolved = resolve(RunConfig.load(examples).replace(**both))
    # Where whole clients are protected too, their numbers of examples are theirs.
    (said,) = warnings(resolved)
    assert said.startswith("Warning: delta = 0.5 is at least 1 / 30,")


def test_two_of_noise_rounds_and_epsilon_determine_the_third():
    said = ask("--rate", "0.01", "--rounds", "1000", "-z", "1.1")
    assert said.startswith("epsilon")
    assert answer(said, "epsilon") == pytest.approx(1.5154, abs=1e-4)
    assert answer(said, "Rényi accounting says") == pytest.approx(1.7118, abs=1e-3)
    said = ask("--rate", "0.1", "--rounds", "100", "--target-epsilon", "5")
    assert said.startswith("noise multiplier")
    assert answer(said, "noise multiplier") == pytest.approx(1.2105, abs=1e-3)
    said = ask("--rate", "0.01", "-z", "1.1", "--max-epsilon", "2")
    assert said.startswith("rounds")
    assert answer(said, "rounds") == rounds_within(
        max_epsilon=2.0, noise_multiplier=1.1, cohort=PoissonCohort(0.01), delta=1e-5
    )


def test_a_fixed_size_is_accounted_for_replacement_beside_poisson():
    said = ask(
        "--sampling", "fixed", "--size", "300", "--population", "3000", "--rounds", "100",
        "-z", "1.2104",
    )  # fmt: skip
    assert answer(said, "epsilon") == pytest.approx(36.88, abs=0.01)
    assert answer(said, "Poisson would cost") == pytest.approx(5.0007, abs=1e-3)
    assert "replace-one" in said


def test_example_level_steps_and_adadps_two_invocations():
    arguments = ["--level", "example", "--rate", "0.01", "-z", "2", "--rounds"]
    once, twice = ask(*arguments, "1000"), ask(*arguments, "500", "--invocations", "2")
    assert answer(once, "epsilon") == answer(twice, "epsilon")
    assert "example, zero-out" in once


def test_shuffled_passes():
    said = ask("--sampling", "shuffle", "--rounds", "100", "-z", "8", "--adjacency", "replace-one")
    assert answer(said, "epsilon") == pytest.approx(13.2067, abs=1e-3)


def test_a_config_says_what_it_costs(config):
    spent = epsilon(noise_multiplier=1.5, cohort=PoissonCohort(0.2), rounds=40, delta=1e-4)
    assert answer(ask(config), "epsilon") == pytest.approx(spent, abs=1e-4)
    changed = ask(config, "--set", "cohort.name=full", "--set", "cohort.rate=")
    assert "everybody" in changed


def test_what_is_the_users_own_is_said_before_a_run_too(config, tmp_path, monkeypatch):
    (tmp_path / "believed.py").write_text(
        "from fedsim.cohorts import PoissonCohort\nfrom fedsim.mechanisms import Clipping\n"
        "class Mine(PoissonCohort):\n    pass\nclass Tight(Clipping):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    assert "Declared by the user" not in ask(config)
    sampler = ("--set", "cohort.name=believed:Mine", "--set", "cohort.rate=")
    said = ask(config, *sampler, "--set", "cohort.options.rate=0.2")
    assert "Declared by the user: that the sampler" in said
    bound = ("--set", "mechanism.name=believed:Tight", "--set", "mechanism.clip-norm=")
    said = ask(config, *bound)
    assert "Declared by the user: that the mechanism" in said


def test_options_replace_what_a_config_says(config):
    cohort = PoissonCohort(0.2)
    said = ask(config, "--target-epsilon", "2", "--rounds", "10")
    wanted = calibrate(target_epsilon=2.0, cohort=cohort, rounds=10, delta=1e-4)
    assert answer(said, "noise multiplier") == pytest.approx(wanted, abs=1e-4)
    said = ask(config, "--sampling", "fixed", "--size", "40")
    spent = epsilon(noise_multiplier=1.5, cohort=FixedCohort(40, 200), rounds=40, delta=1e-4)
    assert answer(said, "epsilon") == pytest.approx(spent, abs=1e-3)


def test_a_configs_target_fixes_the_noise_that_a_budget_is_asked_of(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG + "target-epsilon = 4.0\n")
    assert answer(ask(str(path)), "rounds") == 40
    assert answer(ask(str(path), "--max-epsilon", "4"), "rounds") == 40
    assert answer(ask(str(path), "--max-epsilon", "2"), "rounds") < 20


def test_tables_run_over_rounds_noise_and_targets(config):
    rows = table(ask(config, "--over", "rounds=10,20,40"))
    assert [row[0] for row in rows] == [10, 20, 40]
    assert rows[0][2] < rows[1][2] < rows[2][2]
    rows = table(ask(config, "--over", "noise-multiplier=1,2,4"))
    assert [row[0] for row in rows] == [1, 2, 4]
    rows = table(ask(config, "--over", "target-epsilon=1,2"))
    assert [(row[0], row[3]) for row in rows] == [(1, 1.0), (2, 2.0)]
    rows = table(ask(config, "--over", "max-epsilon=1,2"))
    assert rows[0][1] < rows[1][1]


def test_a_ledger_says_what_was_spent(ledger):
    said = ask(str(ledger.path), "--delta", "1e-4")
    spent = ledger.epsilon(1e-4)
    assert f"({spent:.4g}, 0.0001)" in said
    assert "client level" in said
    assert table(said)[-1] == pytest.approx([20, 20, spent], abs=1e-4)


def test_a_ledger_is_a_beginning(ledger):
    cohort, path = PoissonCohort(0.2), str(ledger.path)
    said = ask(path, "--rounds", "20", "--delta", "1e-4")
    spent = epsilon(noise_multiplier=1.5, cohort=cohort, rounds=40, delta=1e-4)
    assert answer(said, "epsilon") == pytest.approx(spent, abs=1e-4)
    said = ask(path, "--max-epsilon", "6", "--delta", "1e-4")
    bought = rounds_within(max_epsilon=6.0, noise_multiplier=1.5, cohort=cohort, delta=1e-4)
    assert answer(said, "rounds") == bought - 20
    # Noise chosen after looking at releases is accounted for by RDP.
    said = ask(path, "--target-epsilon", "6", "--rounds", "20", "--delta", "1e-4")
    assert answer(said, "epsilon") == answer(said, "Rényi accounting says") <= 6.0


def test_a_runs_directory_is_read_with_its_own_delta(ledger, tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG + "multiplier = 1.5\n")
    assert f"({ledger.epsilon(1e-4):.4g}, 0.0001)" in ask(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rounds", "3"], "noise multiplier is not set"),
        (["-z", "1"], "rounds is not set"),
        (["-z", "1", "--rounds", "0"], "rounds is 0"),
        (["--rate", "2", "--rounds", "3", "-z", "1"], "rate is 2.0"),
        (["--rounds", "3", "-z", "1", "--target-epsilon", "2"], "must be unset"),
        (["--target-epsilon", "1", "--max-epsilon", "2"], "give the first"),
        (["--sampling", "grid"], "--sampling is 'grid'"),
        (["--sampling", "poisson"], "needs --rate"),
        (["--sampling", "full", "--rate", "0.1"], "neither --rate nor --size"),
        (["--over", "x=1"], "--over is 'x'"),
        (["--over", "rounds=many"], "KEY=A,B,C"),
        (["--level", "server"], "--level is 'server'"),
        (
            ["--level", "example", "--adjacency", "add-remove", "-z", "1", "--rounds", "1"],
            "at example level it must be zero-out",
        ),
        (["--set", "rounds=3"], "name the config first"),
        (["--picture", "a.png", "-z", "1", "--rounds", "1"], "what --noises compares"),
        (["nowhere.jsonl"], "there is no file or folder nowhere.jsonl"),
        (["nowhere.toml"], "nowhere.toml"),
    ],
)
def test_mistakes_get_a_sentence(arguments, named):
    with pytest.raises(FedsimError, match=re.escape(named)):
        ask(*arguments)


def test_a_source_has_its_own_level(config):
    with pytest.raises(FedsimError, match=r"--level is 'example', and .* is about client level"):
        ask(str(config), "--level", "example")
    assert ask(str(config), "--level", "client") == ask(str(config))


def test_a_run_without_guarantee_says_so(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[mechanism]\nname = "none"\n')
    with pytest.raises(FedsimError, match="epsilon is infinite"):
        ask(str(path))


def test_the_command_loads_neither_torch_nor_flower():
    script = (
        "import sys, fedsim.cli.privacy;"
        "bad = {'torch', 'flwr', 'scipy.stats'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_kinds_of_noise_are_compared_at_one_epsilon(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    config, picture = tmp_path / "plan.toml", tmp_path / "noises.png"
    text = CONFIG.replace('"poisson"\nrate = 0.2', '"cyclic"\ngroups = 8\nrate = 0.5')
    config.write_text(text + 'target-epsilon = 3.0\nname = "blt"\n')
    shown = ask(str(config), "--noises", "--picture", str(picture))
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.split()}
    assert set(rows) >= {"independent", "banded", "blt", "lambda-cgd", "tree"}
    # Independent noise costs one Poisson-sampled Gaussian a turn of all groups.
    z = calibrate(
        target_epsilon=3.0, cohort=CyclicCohort(8, 0.5, population=200), rounds=40, delta=1e-4
    )
    error = z * math.sqrt(41 / 2)
    assert float(rows["independent"][1]) == pytest.approx(error, rel=1e-3)
    assert rows["banded"][4] == rows["tree"][4] == "yes"
    assert rows["blt"][4] == rows["lambda-cgd"][4] == "no"
    assert float(rows["banded"][1]) < float(rows["tree"][1]) < error
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FedsimError, match=r"must be a \.toml"):
        ask("--noises")
    config.write_text(text.replace('"clipping"', '"none"'))
    with pytest.raises(FedsimError, match="must claim privacy for clients"):
        ask(str(config), "--noises")
