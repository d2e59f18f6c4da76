"""Methods with vectors, personal parameters or rows that are kept, on every engine: same bytes."""

from __future__ import annotations

import os
import sys

import pytest
from slow_cases import slow_but
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
    "client": {
        "name": "scaffold",
        "state": "client",
        "batch-size": 16,
        "epochs": 2,
        "momentum": 0.5,
    },
    "mechanism": {"name": "none", "weighting": "uniform"},
}
PRIVATE_SCAFFOLD = {
    **BASE,
    "client": {
        "name": "scaffold",
        "state": "client",
        "batch-size": 16,
        "steps": 5,
        "momentum": 0.5,
    },
    "mechanism": {"name": "normalization"},
    "noise": {"entropy": "config", "multiplier": 0.5},
}
FEDNOVA = {
    **BASE,
    "client": {"name": "fednova", "momentum": 0.5, "proximal": 0.1, "batch-size": 16},
}

PERSONAL = {
    **BASE,
    "client": {"name": "sgd", "state": "client", "batch-size": 16, "epochs": 2},
    "model": {"name": "mlp", "widths": "16", "personal": "fc2.*"},
    "evaluate": {"every": 0, "clients-every": 2},
}
FEDREP = {
    **PERSONAL,
    "client": {**PERSONAL["client"], "name": "fedrep", "head-steps": 2, "head-lr": 0.2},
}
FEDBN = {**PERSONAL, "model": {"name": "method_nets:normalised", "personal": "2.*"}}
FEDBN_STATISTICS = {
    **PERSONAL,
    "model": {"name": "method_nets:with_batch_norm", "personal": "2.*"},
}
DITTO = {
    **PERSONAL,
    "model": {"name": "mlp", "widths": "16"},
    "client": {**PERSONAL["client"], "name": "ditto", "pull": 0.5},
    "evaluate": {"every": 1, "clients-every": 2},
}
ADAFEDPROX = {
    **BASE,
    "client": {"name": "sgd", "batch-size": 16, "epochs": 2, "proximal": 0.1},
    "server": {"optimizer": "method_nets:AdaFedProx", "options": {"proximal-mu": 0.5}},
}
ROBUST = {**BASE, "cohort": {"name": "full"}}
KRUM = {**ROBUST, "mechanism": {"name": "krum", "byzantine": 0, "keep": 2}}
MEDIAN = {**ROBUST, "mechanism": {"name": "median"}}
TRIMMED = {**ROBUST, "mechanism": {"name": "trimmed-mean", "trim": 0.3}}
METHODS = {
    "scaffold": SCAFFOLD,
    "private scaffold": PRIVATE_SCAFFOLD,
    "fednova": FEDNOVA,
    "fedper": PERSONAL,
    "fedrep": FEDREP,
    "fedbn": FEDBN,
    "fedbn-statistics": FEDBN_STATISTICS,
    "ditto": DITTO,
    "adafedprox": ADAFEDPROX,
    "krum": KRUM,
    "median": MEDIAN,
    "trimmed-mean": TRIMMED,
}
NETS = """
from flwr.serverapp.strategy import FedProx
from torch import nn

class AdaFedProx(FedProx):
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None and "loss" in metrics:
            self.proximal_mu = metrics["loss"]
        return arrays, metrics

def normalised(input_shape, num_classes):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(input_shape[0], 16),
        nn.LayerNorm(16),
        nn.ReLU(),
        nn.Linear(16, num_classes),
    )

def with_batch_norm(input_shape, num_classes):
    model = normalised(input_shape, num_classes)
    model[2] = nn.BatchNorm1d(16)
    return model
"""


@pytest.fixture(autouse=True)
def nets(tmp_path, monkeypatch):
    (tmp_path / "method_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    yield
    sys.modules.pop("method_nets", None)


@pytest.mark.parametrize("method", slow_but(("private scaffold", "krum"), METHODS))
def test_a_method_has_the_same_bytes_on_several_workers(method, tmp_path):
    tree = METHODS[method]
    alone = run("local", tmp_path / "one", tree, workers=1)
    assert facts(run("local", tmp_path / "two", tree, workers=2)) == facts(alone)
    if "evaluate" in tree:
        assert alone.metrics[-1]["clients-accuracy"] > 0.3  # what clients keep was evaluated


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
@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_same_bytes_on_every_engine(engine, method, tmp_path):
    local = facts(run("local", tmp_path / "local", METHODS[method]))
    assert facts(run(engine, tmp_path / engine, METHODS[method])) == local
