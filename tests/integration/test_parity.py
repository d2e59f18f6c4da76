"""One config on every engine: the same bytes, the same cohorts, the same ledger."""

from __future__ import annotations

import json

import pytest

from fedsim.apps.launch import run_deployment, run_simulation
from fedsim.artefacts import RunDirectory
from fedsim.build import Build
from fedsim.config import RunConfig
from fedsim.drive import drive
from fedsim.engines import LocalGrid
from fedsim.engines.ray import RayGrid

RUN = {
    "name": "parity",
    "seed": 11,
    "rounds": 10,
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 4},
    "model": {"name": "mlp", "widths": "16"},
    "client": {"batch-size": 16, "epochs": 1, "lr": 0.2, "momentum": 0.5},
    "cohort": {"name": "poisson", "rate": 0.6},
    "mechanism": {"name": "clipping", "clip-norm": 1.0},
    "noise": {"multiplier": 0.5, "entropy": "config"},
    "server": {"optimizer": "adam", "lr": 0.05},
}
# Different on every engine, and meant to be: when, how fast, and the chain of hashes over it.
TIMES = {"time", "hash", "previous"}
SPEEDS = {"seconds", "clients-per-second"}


def build_for(engine: str, rounds: int) -> Build:
    tree = {**RUN, "rounds": rounds, "engine": {"name": engine, "device": "cpu"}}
    return Build(RunConfig.parse(tree))


def run(engine: str, directory, rounds: int, workers: int = 1):
    build = build_for(engine, rounds)
    if engine == "simulation":
        return run_simulation(build, directory)
    if engine == "deployment":
        return run_deployment(build, directory)
    place = RunDirectory(directory)
    place.claim(build.resolved.to_toml())
    if engine == "local":
        return drive(build, LocalGrid(build.trainer), place)
    with RayGrid(build.trainer, workers=workers, cpus_per_worker=0.1) as grid:
        return drive(build, grid, place)


def ledger_of(directory) -> list[dict]:
    lines = (directory / "ledger.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def facts(result) -> tuple:
    arrays = {name: array.numpy().tobytes() for name, array in result.arrays.items()}
    rows = [{k: v for k, v in row.items() if k not in SPEEDS} for row in result.metrics]
    return arrays, rows, ledger_of(result.directory.path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    made = {}

    def of(rounds: int):
        if rounds not in made:
            made[rounds] = facts(run("local", tmp_path_factory.mktemp("local"), rounds))
        return made[rounds]

    return of


def test_cohorts_of_the_parity_run_are_partial(expected):
    _, rows, ledger = expected(10)
    asked = [row["asked"] for row in rows if "asked" in row]
    assert len(ledger) == 10
    assert 0 < min(asked) < 4


@pytest.mark.parametrize("workers", [1, 3])
def test_ray_gives_the_bytes_of_the_local_engine(workers, tmp_path, expected):
    assert facts(run("ray", tmp_path, 10, workers)) == expected(10)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["simulation", "deployment"])
def test_flowers_runtimes_give_the_bytes_of_the_local_engine(engine, tmp_path, expected):
    assert facts(run(engine, tmp_path, 10)) == expected(10)
