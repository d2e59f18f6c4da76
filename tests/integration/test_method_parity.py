"""Algorithms with vectors beside the update, on every engine: the same bytes."""

from __future__ import annotations

import pytest
from test_parity import facts, run

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


def test_scaffolds_variates_are_the_same_on_ray(tmp_path):
    local = facts(run("local", tmp_path / "local", SCAFFOLD))
    settings = {"workers": 2, "cpus-per-worker": 0.1}
    assert facts(run("ray", tmp_path / "ray", SCAFFOLD, **settings)) == local


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "simulation", "deployment"])
@pytest.mark.parametrize("tree", [SCAFFOLD, FEDNOVA], ids=["scaffold", "fednova"])
def test_vectors_beside_the_update_are_the_same_on_every_engine(engine, tree, tmp_path):
    local = facts(run("local", tmp_path / "local", tree))
    assert facts(run(engine, tmp_path / engine, tree)) == local
