"""One config on every engine: the same bytes, the same cohorts, the same ledger."""

from __future__ import annotations

import json

import pytest

import fedsim
from fedsim.config import RunConfig

RUN = {
    "name": "parity",
    "seed": 11,
    "rounds": 10,
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 4},
    "model": {"name": "mlp", "widths": "16"},
    "client": {"name": "adadp-lr", "state": "client", "batch-size": 16, "epochs": 2, "lr": 0.1},
    "cohort": {"name": "poisson", "rate": 0.6},
    "mechanism": {"name": "clipping", "clip-norm": 1.0},
    "noise": {"multiplier": 0.5, "entropy": "config"},
    "server": {"optimizer": "adam", "lr": 0.05},
}
# Who replies, which examples are in a batch, who evaluates: all by chance, and none of it noise.
WITHOUT_PRIVACY = {
    **RUN,
    "mechanism": {"name": "none"},
    "noise": {},
    "evaluate": {"clients-every": 1, "fraction": 0.5},
}
# Different on every engine, and meant to be: how fast, and when and where, which no hash covers.
SPEEDS = {"seconds", "clients-per-second"}


def run(engine: str, directory, tree=RUN, **settings):
    engine_section = {"name": engine, "device": "cpu", **settings}
    return fedsim.run(RunConfig.parse({**tree, "engine": engine_section}), out=directory / "out")


def ledger_of(directory) -> list[dict]:
    lines = (directory / "ledger.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "noted"} for line in lines]


def facts(result) -> tuple:
    arrays = {name: array.numpy().tobytes() for name, array in result.arrays.items()}
    rows = [{k: v for k, v in row.items() if k not in SPEEDS} for row in result.metrics]
    clients = result.directory.client_metrics
    of_clients = clients.read_bytes() if clients.exists() else b""
    return arrays, rows, ledger_of(result.directory.path), of_clients


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return facts(run("local", tmp_path_factory.mktemp("local")))


def test_cohorts_of_the_parity_run_are_partial(expected):
    _, rows, ledger, _ = expected
    asked = [row["asked"] for row in rows if "asked" in row]
    releases = [release["kind"] for line in ledger[1:] for release in line["entry"]["releases"]]
    assert releases == 10 * ["release"]
    assert min(asked) < 4
    assert max(asked) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("ray_runtime")
def test_ray_gives_the_bytes_of_the_local_engine(tmp_path, expected):
    ray = run("ray", tmp_path, workers=3, **{"cpus-per-worker": 0.1})
    assert facts(ray) == expected


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["simulation", "deployment"])
def test_flowers_runtimes_give_the_bytes_of_the_local_engine(engine, tmp_path, expected):
    assert facts(run(engine, tmp_path)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["simulation", "deployment"])
def test_without_privacy_the_seed_gives_the_local_engines_bytes_with_default_entropy(
    engine, tmp_path
):
    rounds = {**WITHOUT_PRIVACY, "rounds": 4}
    expected = facts(run("local", tmp_path / "local", rounds))
    assert facts(run(engine, tmp_path / engine, rounds)) == expected
    assert facts(run("local", tmp_path / "other", {**rounds, "seed": 12}))[0] != expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["simulation", "deployment"])
def test_on_flowers_runtimes_a_clients_budget_ends_the_run_as_on_the_local_engine(engine, tmp_path):
    private = {
        **RUN,
        "partition": {"name": "iid", "clients": 3},
        "client": {
            "name": "sgd",
            "batch-size": 64,
            "mechanism": {"name": "clipping"},
            "noise": {"multiplier": 1.5},
        },
        "cohort": {"name": "full"},
        "mechanism": {"name": "none"},
        "noise": {"entropy": "config"},
    }
    spent = run("local", tmp_path / "one", {**private, "rounds": 2}).privacy.epsilon
    private["client"]["noise"]["max-epsilon"] = spent * 1.001
    expected = facts(run("local", tmp_path / "local", private))
    result = run(engine, tmp_path / engine, private)
    assert result.ended == "budget"
    found = facts(result)
    if engine == "deployment":  # what clients spent is in the ledgers of their nodes
        for row in expected[1]:
            for column in ("example-epsilon", "simulated", "declared"):
                row.pop(column, None)
    assert found == expected
    assert len(expected[1]) == 3  # round 0, in which nothing is released, and two
