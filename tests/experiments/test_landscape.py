"""The map of methods: how bounds are chosen, what that costs, and what incomplete runs say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from experiment_helpers import run_experiment, write_judgement

from experiments.framework.base import Result
from experiments.framework.run import find, load
from experiments.landscape.landscape import PRICE, Landscape
from fedsim.privacy import epsilon

SETTINGS: dict[str, Any] = {
    "experiment": "landscape.landscape:Landscape",
    "seeds": 2,
    "title": "T",
    "panel": "P",
    "epsilons": [8.0],
    "clip-norms": [0.1, 1.0, 10.0],
    "federations": [{"name": "IID"}, {"name": "shards", "keys": {"partition.name": "shards"}}],
    "methods": [
        {"name": "a", "noise": "independent"},
        {"name": "b", "noise": "banded", "keys": {"noise.name": "banded", "cohort.name": "cyclic"}},
    ],
    "claims": [
        {
            "name": "c",
            "says": "a ends above b",
            "ahead": "a",
            "behind": "b",
            "federations": ["IID"],
            "epsilons": [8.0],
        }
    ],
}
RUN = {
    "rounds": 4,
    "data": {"name": "digits", "validation": 0.1},
    "partition": {"clients": 40},
    "client": {"steps": 2},
    "cohort": {"name": "poisson", "rate": 0.25},
    "mechanism": {"name": "clipping"},
    "noise": {"target-epsilon": 8.0},
    "evaluate": {"every": 4},
}


def written(directory: Path, **changes: Any) -> Path:
    """An experiment's directory with these settings."""
    directory.mkdir()
    (directory / "experiment.toml").write_text(tomli_w.dumps(SETTINGS | changes))
    (directory / "run.toml").write_text(tomli_w.dumps(RUN))
    write_judgement(directory)
    return directory


def made(directory: Path) -> Landscape:
    experiment = load(directory, data=Path())
    assert isinstance(experiment, Landscape)
    return experiment


@pytest.mark.slow
def test_fresh_seeds_are_run_at_the_bound_that_is_best_on_validation_examples(
    tmp_path: Path,
) -> None:
    directory = written(tmp_path / "map")
    first = run_experiment(directory, tmp_path / "out", only="IID, eps=8, a *")
    # Its grid, and then its fresh seeds; the other cells are missing, and their claim is open.
    results = first.stored.results
    grid = {name: r["validation"] for name, r in results.items() if "C=" in name}
    assert len(grid) == 3
    assert set(results) == {*grid, "IID, eps=8, a seed=2", "IID, eps=8, a seed=3"}
    bound = max(sorted(grid), key=grid.__getitem__).split("C=")[1].removesuffix(" seed=1")
    experiment = made(directory)
    fresh = experiment.followers(results).values()
    bounds = [experiment.config_of(one).mechanism.clip_norm for one in fresh]
    assert bounds == [float(bound)] * 2
    assert len(first.missing) == 2 + 3 * 3
    assert first.report is not None
    (claim,) = first.report.claims
    assert (claim.reproduced, claim.measured) == (None, "not all of its runs are made")
    tables = {table.name: table for table in first.report.tables}
    assert [row[2] for row in tables["map"].rows] == ["not run", "not run"]
    tests = [results[f"IID, eps=8, a C={c} seed=1"]["test"] for c in ("0.1", "1", "10")]
    chosen = ["0.1", "1", "10"].index(bound)
    away = {0: ["-", f"{tests[2] - tests[0]:+.1f}"], 1: ["-", "-"]}
    away[2] = [f"{tests[0] - tests[2]:+.1f}", "-"]
    assert tables["misset"].rows[0][1] == ", ".join(away[chosen])
    # A cell that lacks a seed is shown with the seeds that it has, and is not judged.
    del results["IID, eps=8, a seed=3"]
    partial = made(directory).report(results)
    assert str(partial.tables[0].rows[0][1]).endswith("(1 seed)")
    assert partial.claims[0].reproduced is None
    # Without a fresh one, the seed that chose is shown as such.
    del results["IID, eps=8, a seed=2"]
    shown = f"{tests[chosen]:.2f} (seed of the choice)"
    assert made(directory).report(results).tables[0].rows[0][1] == shown


def test_price_of_a_choice_is_that_of_the_published_tables(tmp_path: Path) -> None:
    """z = 1.1, rate .01, 1,000 rounds, delta 1e-5, five runs in the mean (docs/sweeps.md)."""
    experiment = made(written(tmp_path / "map", **{"clip-norms": [0.1, 0.3, 1.0, 3.0, 10.0]}))
    keys = {"noise.multiplier": 1.1, "cohort.name": "poisson", "cohort.rate": 0.01, "rounds": 1000}
    run = {"mechanism.name": "clipping", "partition.clients": 1000, "noise.delta": 1e-5, **keys}
    price = experiment.run({PRICE: {"run": run}})
    assert price["poisson"] == pytest.approx(2.73, abs=0.005)
    assert price["logarithmic"] == pytest.approx(2.69, abs=0.005)
    cohort = experiment.config_of({"run": run}).cohort.make(population=1000)
    five = epsilon(noise_multiplier=1.1, cohort=cohort, rounds=5000, delta=1e-5)
    assert price["all"] == pytest.approx(five, rel=1e-6)
    assert price["one"] < price["logarithmic"] < price["all"]


def test_bounds_and_noise_of_examples_are_their_clients(tmp_path: Path) -> None:
    examples = {
        "name": "examples",
        "level": "example",
        "keys": {
            "client.mechanism.name": "clipping",
            "mechanism.name": "none",
            "noise.target-epsilon": "",
            "cohort.name": "full",
            "cohort.rate": "",
        },
    }
    methods = [*SETTINGS["methods"], {"name": "n", "keys": {"mechanism.name": "normalization"}}]
    experiment = made(
        written(
            tmp_path / "map",
            **{"clip-norms": [], "federations": [examples], "methods": methods, "claims": []},
        )
    )
    plans = experiment.plans()
    # Groups that take turns are a cohort's: that method is of clients alone.
    assert list(plans) == ["examples, eps=8, a", "examples, eps=8, n"]
    assert plans["examples, eps=8, n"]["client.mechanism.name"] == "normalization"
    assert plans["examples, eps=8, n"]["mechanism.name"] == "none"
    assert plans["examples, eps=8, n"]["client.noise.target-epsilon"] == 8.0
    assert [*experiment.members()] == [f"{name} seed={seed}" for seed in (1, 2) for name in plans]


def test_groups_that_take_turns_are_as_large_as_poisson_cohorts(tmp_path: Path) -> None:
    experiment = made(written(tmp_path / "map"))
    keys = experiment.plans()["IID, eps=8, b"]
    assert (keys["cohort.groups"], keys["cohort.rate"]) == (4, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["niid-private", "landscape"])
def test_every_member_is_a_run_that_is_private(name: str) -> None:
    experiment = made(find(name))
    experiment.weights = Path("model.safetensors")
    for settings in experiment.members().values():
        config = experiment.config_of(settings.get(PRICE, settings))
        assert config.protects
        assert bool(config.model.weights) == (config.data.name == "cifar10")


def test_smaller_version_makes_no_claim_of_an_epsilon_that_it_does_not_run() -> None:
    experiment = made(find("landscape"))
    experiment.settings = replace(experiment.settings, epsilons=[8.0])
    name = "Fashion-MNIST, IID, eps=8, clipping seed=2"
    report = experiment.report({name: {"test": 80.0, "epsilon": 8.0}})
    assert report.claims
    assert all(", epsilon 8:" in claim.says for claim in report.claims)


def test_a_square_is_level_with_the_best_unless_the_seeds_tell_it_apart() -> None:
    experiment = made(find("landscape"))
    results: dict[str, Result] = {}
    for method, tests in (
        ("clipping", [80.0, 80.2, 80.1, 79.9, 80.3]),
        ("normalisation", [79.9, 80.3, 80.0, 79.8, 80.3]),
        ("private SCAFFOLD", [70.0, 70.2, 70.1, 69.9, 70.4]),
        ("clipping, banded noise", [60.0, 60.2, 60.1, 59.9, 60.4]),
        ("normalisation, banded noise", [60.0, 60.2, 60.1, 59.9, 60.4]),
        ("ADADP clients", [60.0, 60.2, 60.1, 59.9, 60.4]),
    ):
        for seed, test in enumerate(tests, 2):
            name = f"Fashion-MNIST, IID, eps=8, {method} seed={seed}"
            results[name] = {"test": test, "epsilon": 8.0}
    figure = experiment.report(results).pictures["map"]
    texts = {text.get_text(): text.get_weight() for text in figure.axes[0].texts}
    assert texts["80.1"] == "bold"
    assert texts["80.1\n−0.0"] == "bold"
    assert texts["70.1\n−10.0"] == "normal"
    # One cell that lacks a seed leaves its column without a best.
    del results["Fashion-MNIST, IID, eps=8, ADADP clients seed=4"]
    figure = experiment.report(results).pictures["map"]
    assert {text.get_weight() for text in figure.axes[0].texts} == {"normal"}
