"""Methods at example level side by side."""

from __future__ import annotations

import math
import shutil
import tomllib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from experiment_helpers import run_experiment

from experiments.framework.run import load
from fedsim.cohorts import PoissonCohort
from fedsim.config import RunConfig
from fedsim.privacy import epsilon

COMMITTED = Path(__file__).parents[2] / "experiments" / "comparisons" / "example-level-mnist"


@pytest.mark.slow
def test_every_method_runs_and_only_raw_statistics_have_no_epsilon(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    y = np.arange(60) % 10
    x = (20 * y[:, None, None] + draws.integers(0, 40, (60, 28, 28))).astype(np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    tree = tomllib.loads((COMMITTED / "experiment.toml").read_text())
    tree |= {"seeds": 1, "rates": [0.01, 0.1]}
    directory = tmp_path / "experiment"
    directory.mkdir()
    (directory / "experiment.toml").write_text(tomli_w.dumps(tree))
    few = {"rounds": 1, "partition.max-examples": 60, "client.batch-size": 30}
    base = RunConfig.load(COMMITTED / "run.toml").replace(**few)
    (directory / "run.toml").write_text(base.to_toml())
    shutil.copy(COMMITTED / "judgement.toml", directory)
    judged = run_experiment(directory, tmp_path / "out", data=tmp_path)
    assert (tmp_path / "out" / "accuracy.png").is_file()
    assert judged.report is not None
    (table,) = judged.report.tables
    spent = {str(row[0]): float(str(row[1])) for row in table.rows}
    assert [name for name, each in spent.items() if math.isinf(each)] == [
        "Xu as printed, not private"
    ]
    expected = epsilon(noise_multiplier=1.735, cohort=PoissonCohort(0.5), rounds=2, delta=1e-5)
    finite = [each for each in spent.values() if math.isfinite(each)]
    assert finite == pytest.approx([expected] * 4, abs=1e-3)


def test_committed_noise_is_that_of_epsilon_1() -> None:
    config = RunConfig.load(COMMITTED / "run.toml")
    batch, size = config.client.batch_size, config.partition.max_examples
    releases = config.rounds * math.ceil(size / batch)
    z = config.client.noise.multiplier
    assert z is not None
    spent = epsilon(
        noise_multiplier=z, cohort=PoissonCohort(batch / size), rounds=releases, delta=1e-5
    )
    assert spent == pytest.approx(1.0, abs=1e-3)


def test_claims_name_only_methods_that_there_are() -> None:
    settings = asdict(load(COMMITTED, data=Path()).settings)
    methods = {method["name"] for method in settings["methods"]}
    claims = settings["claims"]
    assert {claim[side] for claim in claims for side in ("ahead", "behind")} <= methods
