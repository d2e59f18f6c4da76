from __future__ import annotations

from pathlib import Path

import pytest
import typer
from planted import LessNoise
from typer.testing import CliRunner

from fedsim.audit.config_audit import audit_config
from fedsim.cli.planning import audit
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


def test_a_config_that_keeps_its_claim_ends_with_status_0_and_a_picture(tmp_path: Path) -> None:
    status, output = invoke(tmp_path, "--runs", "40", "--rounds", "1")
    assert status == 0
    assert "No violation of" in output
    assert "A test detects a violation where p is at most" in output
    assert "40 canaries, each in or out by a coin, 20 rounds" in output
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_a_refuted_claim_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factories, "aggregated", lambda settings: LessNoise(settings.clip_norm))
    status, output = invoke(tmp_path, "--runs", "60", "--canaries", "0", "--rounds", "1")
    assert status == 1
    assert "detected by alone" in output


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
    verdict, assumed = audit_config(config, rounds=2, runs=20, canaries=0, checks=False)
    assert verdict.claim.epsilon == pytest.approx(3.0, rel=1e-3)
    assert verdict.claim.releases == 2
    assert assumed["federation"].startswith("1,000 clients, poisson cohort of 100 expected")


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
