from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from planted import LessNoise
from rich.console import Console
from typer.testing import CliRunner

from fedsim.audit import Claim, Finding, Verdict, user_checks
from fedsim.audit.config_audit import attacked_plan, audit_config
from fedsim.audit.findings import findings
from fedsim.audit.report import tabulate
from fedsim.cli.audit import audit
from fedsim.config import RunConfig
from fedsim.errors import FedsimError
from fedsim.mechanisms import AdaClip, Clipping, Normalization, PerLayer
from fedsim.privacy.laws.fixed import FixedSize
from fedsim.privacy.laws.full import Full
from fedsim.privacy.laws.poisson import Poisson
from fedsim.privacy.noise.banded import Banded
from fedsim.privacy.noise.independent import Independent
from fedsim.privacy.plan import ReleasePlan
from fedsim.rows import Layout
from fedsim.runs import factories

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
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


@dataclass(frozen=True)
class Everybody(Poisson):
    """Draws everybody, and charges for a Poisson sample."""

    def draw(self, round: int, draws: Any, step: int = 0) -> np.ndarray:
        return np.arange(self.population or 0)


@dataclass(frozen=True)
class Half(Independent):
    """Half the noise that its multiplier says."""

    def combine(self, draws: Any, state: Any) -> Any:
        return 0.5 * draws(), state


@dataclass(frozen=True)
class Repeating(Independent):
    """The first round's noise in every round."""

    def start(self) -> Any:
        return {}

    def combine(self, draws: Any, state: Any) -> Any:
        state = state or {"first": draws()}
        return state["first"], state


def plan_of(**parts: Any) -> ReleasePlan[Any]:
    honest = {
        "level": "client",
        "sampler": Poisson(0.5, 40),
        "mechanism": Clipping(0.5),
        "noise": Independent(4.0),
        "rounds": 30,
    }
    return ReleasePlan(**{**honest, **parts})


def violations(plan: ReleasePlan[Any]) -> set[str]:
    trainer = SimpleNamespace(layout=Layout.of({"w": torch.zeros(40)}), privacy=None)
    resolved = SimpleNamespace(
        plan=plan,
        trainer=trainer,
        config=SimpleNamespace(private=True),
        devices=SimpleNamespace(schedule=None),
    )
    found = findings(user_checks.checks(resolved, seed=3))
    return {str(one) for one in found if one.refutes(1e-5)}


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"mechanism": PerLayer(Clipping(0.5))},
        {"mechanism": AdaClip()},
        {"mechanism": Normalization(2.0)},
        {"sampler": FixedSize(10, 40)},
        {"sampler": Full(40), "noise": Banded(4.0, bands=3)},
    ],
    ids=str,
)
def test_what_is_as_it_should_be_passes_all_checks(parts: dict[str, Any]) -> None:
    assert violations(plan_of(**parts)) == set()


@pytest.mark.parametrize(
    ("parts", "violation"),
    [
        ({"mechanism": LessNoise(0.5)}, "bound: what hostile rows add"),
        ({"sampler": Everybody(0.5, 40)}, "sampler: declared inclusion probabilities"),
        ({"noise": Half(4.0)}, "noise: size in each round"),
        ({"noise": Repeating(4.0)}, "noise: exact repeats"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_a_user_wrote_wrong_is_found(parts: dict[str, Any], violation: str) -> None:
    assert violation in violations(plan_of(**parts))


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
    status, output = invoke(tmp_path, "--runs", "60", "--rounds", "1")
    assert status == 1
    assert "bound: what hostile rows add" in output


def test_the_attacked_rounds_cost_what_the_whole_plan_does() -> None:
    plan = plan_of(sampler=Poisson(0.1, 1400), rounds=500).calibrated(3.0, 1e-5)
    few = attacked_plan(plan, 2, 1e-5)
    assert (few.rounds, few.sampler.population) == (2, 20)
    assert few.epsilon(1e-5) == pytest.approx(3.0, rel=1e-3)


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


@pytest.mark.parametrize("number", [{"runs": 5}, {"rounds": 0}, {"confidence": 1.0}])
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
    for option, value in (("--epsilon", "1.0"), ("--python", "python3")):
        with pytest.raises(FedsimError, match=rf"{option} belongs to --target"):
            invoke(tmp_path, option, value)
    for option, *value in (("--set", "rounds=2"),):
        with pytest.raises(FedsimError, match=rf"{option} belongs to a config"):
            target(tmp_path, "--noise-multiplier", "1.0", option, *value)
    result = CliRunner().invoke(app, [])
    assert isinstance(result.exception, FedsimError)
