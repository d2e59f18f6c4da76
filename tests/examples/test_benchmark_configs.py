"""Each benchmark's config trains on small files of the format that it names."""

from __future__ import annotations

import csv
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import benchmark_files as files
import numpy as np
import pytest
import torch
from slow_cases import slow_but

from fedsim import RunConfig
from fedsim.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples" / "benchmarks"
SMALL: dict[str, tuple[Callable[[Path], None], int]] = {
    "heart": (files.heart, 4),
    "tcga-brca": (files.tcga_brca, 6),
    "femnist": (files.tff_femnist, 3),
    "celeba": (files.leaf_celeba, 2),
    "shakespeare": (files.tff_shakespeare, 2),
    "shakespeare-leaf": (files.leaf_shakespeare, 2),
    "stackoverflow": (files.tff_stackoverflow, 2),
    "cifar100": (files.tff_cifar100, 2),
}
"""What writes a config's files, and their owners."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("nets", None)  # another example has another module of this name


def test_every_config_has_its_files_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == {*SMALL, "hub"}


@pytest.mark.parametrize("name", slow_but(3, SMALL))
def test_a_config_trains_on_small_files(name: str, place: Path) -> None:
    if name not in ("heart", "tcga-brca", "celeba", "shakespeare-leaf"):
        pytest.importorskip("h5py")
    write, owners = SMALL[name]
    write(place / "data")
    small = {"rounds": 1, "partition.clients": owners, "evaluate.every": 1}
    config = RunConfig.load(f"{name}.toml")
    if config.cohort.name == "fixed":
        small["cohort.size"] = 2
    if config.client.steps:
        small["client.steps"] = 2
    if config.data.test:
        small["data.test"] = ":4"
    changes = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    with pytest.raises(SystemExit) as ended:
        main(["run", f"{name}.toml", *changes])
    assert not ended.value.code
    with next(Path("runs").glob("*/metrics.csv")).open(newline="") as file:
        assert math.isfinite(float(list(csv.DictReader(file))[-1]["test-loss"]))


def test_the_hubs_config_is_one() -> None:
    config = RunConfig.load(EXAMPLES / "hub.toml")
    assert config.data.columns == "x=image,y=character,owner=writer_id"


def test_coxs_loss_is_minus_the_logarithm_of_the_partial_likelihood(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    import nets

    generator = np.random.default_rng(0)
    risks, times = generator.normal(size=6), generator.permutation(6) + 1.0
    deaths = np.array([1.0, 0, 1, 1, 0, 1])
    expected = [
        death * -np.log(np.exp(risk) / np.exp(risks[times >= time]).sum())
        for risk, time, death in zip(risks, times, deaths, strict=True)
    ]
    targets = torch.tensor(np.stack([times, deaths], 1))
    loss = nets.cox(-torch.tensor(risks)[:, None], targets)
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-12, atol=1e-12)
