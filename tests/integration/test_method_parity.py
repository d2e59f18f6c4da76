"""Algorithms with vectors beside the update, on every engine: the same bytes."""

from __future__ import annotations

import pytest
from test_parity import facts, run

import fedsim
from fedsim.config import RunConfig

BASE = {
    "name": "methods",
    "seed": 11,
    "rounds": 4,
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 4},
    "model": {"name": "mlp", "widths": "16"},
    "cohort": {"name": "poisson", "rate": 0.6},
    "server": {"optimizer": "sgd", "lr": 0.9},
    "noise": {"entropy": "config"},
}
SCAFFOLD = {
    **BASE,
    "client": {"name": "scaffold", "state": "client", "batch-size": 16, "epochs": 2},
    "mechanism": {"name": "none", "weighting": "uniform"},
}
FEDNOVA = {
    **BASE,
    "client": {"name": "fednova", "momentum": 0.5, "proximal": 0.1, "batch-size": 16},
}


KRUM = {
    **BASE,
    "mechanism": {"name": "krum", "byzantine": 0, "keep": 2},
    "cohort": {"name": "full"},
}


@pytest.mark.parametrize("tree", [SCAFFOLD, KRUM], ids=["scaffold", "krum"])
def test_vectors_and_robust_means_are_the_same_on_several_workers(tree, tmp_path):
    alone = facts(run("local", tmp_path / "one", tree, workers=1))
    assert facts(run("local", tmp_path / "two", tree, workers=2)) == alone


@pytest.mark.slow
def test_a_run_resumed_on_ray_ends_with_the_bytes_of_a_whole_one(tmp_path):
    settings = {"workers": 2, "cpus-per-worker": 0.1}
    whole = facts(run("local", tmp_path / "whole", SCAFFOLD))
    out = tmp_path / "ray"
    run("ray", out, {**SCAFFOLD, "rounds": 2}, **settings)
    section = {"name": "ray", "device": "cpu", **settings}
    config = RunConfig.parse({**SCAFFOLD, "engine": section})
    resumed = fedsim.run(config, out=out / "out", resume=True)
    assert facts(resumed) == whole


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "simulation", "deployment"])
@pytest.mark.parametrize("tree", [SCAFFOLD, FEDNOVA, KRUM], ids=["scaffold", "fednova", "krum"])
def test_vectors_beside_the_update_are_the_same_on_every_engine(engine, tree, tmp_path):
    local = facts(run("local", tmp_path / "local", tree))
    assert facts(run(engine, tmp_path / engine, tree)) == local
