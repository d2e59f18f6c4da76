from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from planted import LessNoise
from rich.console import Console
from typer.testing import CliRunner

from fedsim.audit import Claim, Finding, Verdict
from fedsim.audit.config_audit import audit_config
from fedsim.audit.report import tabulate
from fedsim.cli.audit import audit
from fedsim.config import RunConfig
from fedsim.errors import FedsimError
from fedsim.runs import factories

pytestmark = pytest.mark.usefixtures("few_system_rounds")

CONFIG = """
name = "audited"
rounds = 20
[partition]
clients = 40
[mechanism]
name = "clipping"
clip-norm = 0.5
[noise]
multiplier = 4.0
"""

NONE = [
    item
    for setting in ("mechanism.name=none", "mechanism.clip-norm=", "noise.multiplier=")
    for item in ("--set", setting)
]

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(audit)


def invoke(tmp_path: Path, *options: str) -> tuple[int, str]:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    out = ("--out", str(tmp_path / "audit.png"))
    result = CliRunner().invoke(app, [str(path), *out, *options])
    if isinstance(result.exception, FedsimError):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.slow
def test_a_config_that_keeps_its_claim_ends_with_status_0_and_a_picture(tmp_path: Path) -> None:
    status, output = invoke(tmp_path, "--runs", "40", "--rounds", "1")
    assert status == 0
    assert "No violation of" in output
    assert "A test detects a violation where p is at most" in output
    assert "40 canaries, each in or out by a coin, 20 rounds" in output
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_is_brief_unless_everything_is_asked_for() -> None:
    expected = "noise in every release"
    honest = Finding(
        "2 x 20 releases", expected, lambda _: expected, 1.0, part="noise", name="presence"
    )
    broken = replace(honest, measured="8 values occur again", p_value=0.0, name="exact repeats")
    broken = replace(broken, cause="noise is used again")
    idle = replace(honest, measured="too few rounds", tested=False, part="sampler", name="periods")
    verdict = Verdict(Claim.gaussian(1.0), (), (honest, broken, idle), 0.99)

    def text(*, everything: bool) -> str:
        console = Console(width=200, file=io.StringIO(), record=True)
        console.print(tabulate(verdict, {"claim": "one"}, everything=everything))
        return " ".join(console.export_text().split())

    brief = text(everything=False)
    assert "noise 2 0 1 found a violation" in brief
    assert "exact repeats 2 x 20 releases 8 values occur again" in brief
    assert "noise: exact repeats: the likely cause: noise is used again." in brief
    assert "sampler: periods: not tested, too few rounds." in brief
    assert "presence" not in brief
    assert "presence 2 x 20 releases" in text(everything=True)


@pytest.mark.slow
def test_a_refuted_claim_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factories, "mechanism", lambda settings: LessNoise(settings.clip_norm))
    status, output = invoke(tmp_path, "--runs", "60", "--canaries", "0", "--rounds", "1")
    assert status == 1
    assert "detected by alone" in output


@pytest.mark.slow
def test_the_few_rounds_cost_what_the_config_does() -> None:
    config = RunConfig.parse(
        {
            "rounds": 500,
            "partition": {"clients": 1400},
            "cohort": {"name": "poisson", "rate": 0.1},
            "mechanism": {"name": "clipping"},
            "noise": {"target-epsilon": 3.0},
        }
    )
    verdict, assumptions = audit_config(config, rounds=2, runs=20, canaries=0, checks=False)
    assert verdict.claim.epsilon == pytest.approx(3.0, rel=1e-3)
    assert verdict.claim.releases == 2
    assert assumptions["federation"].startswith("1,000 clients, poisson cohort of 100 expected")


def test_a_config_without_a_claim_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match=r"noise.multiplier = 0.0 claims no privacy"):
        invoke(tmp_path, "--set", "noise.multiplier=0.0")
    with pytest.raises(FedsimError, match=r"mechanism.name = 'none' claims no"):
        invoke(tmp_path, *NONE)
    # What `fedsim run` would refuse is refused before any work.
    with pytest.raises(FedsimError, match=r"mechanism.private-scalar = 'nothing'; it must be"):
        invoke(
            tmp_path,
            *("--set", "mechanism.private-scalar=nothing"),
            *("--set", "mechanism.private-scalar-high=1.0"),
        )
    with pytest.raises(FedsimError, match=r"must be a file that ends in .png"):
        invoke(tmp_path, "--out", "x.svg")


@pytest.mark.parametrize("number", [{"runs": 5}, {"canaries": -5}, {"confidence": 1.0}])
def test_numbers_that_no_audit_can_have_are_refused_at_both_levels(
    number: dict[str, Any],
) -> None:
    protected = {"mechanism": {"name": "clipping"}, "noise": {"multiplier": 1.0}}
    for tree in (protected, {"client": protected}):
        with pytest.raises(FedsimError, match=f"{next(iter(number))} is .* it must"):
            audit_config(RunConfig.parse(tree), **number)


def target(tmp_path: Path, *options: str) -> tuple[int, str]:
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\n"
        "def without_noise(federation):\n"
        "    return np.cumsum([federation.rows.mean(0)] * federation.rounds, axis=0)\n"
    )
    out = ("--out", str(tmp_path / "audit.png"), "--runs", "30")
    named = ("--target", f"{path}:without_noise", *out, *options)
    result = CliRunner().invoke(app, list(named))
    if isinstance(result.exception, FedsimError):
        raise result.exception
    return result.exit_code, result.output


def test_a_target_that_breaks_its_claim_ends_with_status_1_and_a_picture(tmp_path: Path) -> None:
    (tmp_path / "claim.toml").write_text('noise-multiplier = 1.0\nsource = "its page"\n')
    status, output = target(tmp_path, "--claim", str(tmp_path / "claim.toml"))
    assert status == 1
    words = " ".join(output.split())
    assert "noise is left out" in words
    assert "its page" in words
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")
    status, output = target(tmp_path, "--noise-multiplier", "1.0", "--json")
    assert status == 1
    assert json.loads(output)["violations"][0]["likely-cause"] == "noise is left out"


def test_a_target_whose_process_has_ended_is_an_error_and_no_violation(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match=r"could not be run: its process has ended\.$"):
        target(tmp_path, "--noise-multiplier", "1.0", "--python", "/bin/false")


def test_what_is_audited_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match="there is nothing to audit"):
        target(tmp_path)
    for option, value in (("--epsilon", "1.0"), ("--python", "python3"), ("--seconds", "25.0")):
        with pytest.raises(FedsimError, match=rf"{option} belongs to --target"):
            invoke(tmp_path, option, value)
    for option, *value in (("--deep",), ("--canaries", "512"), ("--set", "rounds=2")):
        with pytest.raises(FedsimError, match=rf"{option} belongs to a config"):
            target(tmp_path, "--noise-multiplier", "1.0", option, *value)
    result = CliRunner().invoke(app, [])
    assert isinstance(result.exception, FedsimError)
