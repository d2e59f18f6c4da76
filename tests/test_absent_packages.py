"""fedsim without the packages of its extras: what a base installation can do, and what it says."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from slow_cases import slow_but

import fedsim
from fedsim import optional_packages
from fedsim.errors import FedsimError

ROOT = Path(__file__).parents[1]
BASE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from fedsim.cli import main
main()
"""


OPTIONAL = ("ray", "torchvision", "matplotlib", "opacus")


def base(*arguments: str, absent: tuple[str, ...] = OPTIONAL) -> tuple[int, str]:
    code = BASE.replace("{ABSENT}", repr(absent))
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    return ran.returncode, " ".join((ran.stdout + ran.stderr).split())


@pytest.mark.slow
def test_a_base_installation_trains_reports_and_accounts(tmp_path: Path) -> None:
    config, out = str(ROOT / "experiments/demo.toml"), str(tmp_path / "run")
    status, words = base("run", config, "--out", out, "--set", "rounds=2")
    assert status == 0, words
    assert (tmp_path / "run/report.html").exists()
    assert base("verify", out)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    slow_but(
        1,
        [
            (["partition", "{config}", "--out", "{out}.png"], "matplotlib", "plots"),
            (["run", "{config}", "--set", "engine.name=ray"], "ray", "ray"),
            (["run", "{config}", "--set", "engine.name=simulation"], "ray", "ray"),
            (["run", "{config}", "--set", "data.name=mnist"], "torchvision", "vision"),
        ],
    ),
)
def test_what_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, arguments: list[str], package: str, extra: str
) -> None:
    names = {"config": str(ROOT / "experiments/demo.toml"), "out": str(tmp_path / "run")}
    status, words = base(*(argument.format(**names) for argument in arguments))
    assert status == 2
    assert f"needs {package}, which is not installed; `pip install 'fedsim-dp[{extra}]'`" in words
    assert "Traceback" not in words


def test_accounting_needs_neither_torch_nor_flower(tmp_path: Path) -> None:
    config, run = str(ROOT / "experiments/demo.toml"), tmp_path / "run"
    absent = (*OPTIONAL, "torch", "flwr", "grpc")
    fedsim.run(fedsim.RunConfig.load(config).replace(rounds=2), out=run)
    for arguments in (["privacy", config], ["privacy", str(run)], ["verify", str(run)]):
        status, words = base(*arguments, absent=absent)
        assert status == 0, words
    status, words = base("run", config, "--out", str(tmp_path / "other"), absent=absent)
    assert status == 2
    assert "needs torch, which is not installed; `pip install 'fedsim-dp'` has it." in words


def test_a_package_that_lacks_is_refused_before_it_is_used() -> None:
    optional_packages.require("this test", "ray")
    with pytest.raises(FedsimError, match=r"this test needs wandb, .*fedsim-dp\[wandb\]"):
        optional_packages.require("this test", "wandb")
    assert (
        optional_packages.missing_package_message(ModuleNotFoundError("none", name="other_package"))
        is None
    )


def test_every_extra_is_one_of_the_package() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*optional_packages.EXTRAS.values()} <= {*known["optional-dependencies"]}
    names = {*optional_packages.EXTRAS.values(), *optional_packages.EXTRAS}
    assert not [one for one in known["dependencies"] if one.split(">")[0] in names]


def test_another_package_of_the_name_is_refused(tmp_path: Path) -> None:
    """Two of them in one directory would be mixed, file by file."""
    (tmp_path / "fedsim").symlink_to(Path(fedsim.__file__).parent)
    (tmp_path / "fedsim-0.0.3.dist-info").mkdir()
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fedsim"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ran.returncode == 1
    assert "pip uninstall fedsim" in ran.stderr.splitlines()[-1]


def test_a_package_of_it_needs_no_import_of_its_own() -> None:
    """Sentences and pages say ``fedsim.datasets.from_table``."""
    script = "import fedsim; fedsim.datasets.from_table; fedsim.strategies.DPFedAvg; fedsim.no"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ran.stderr.splitlines()[-1] == "AttributeError: module 'fedsim' has no attribute 'no'"
