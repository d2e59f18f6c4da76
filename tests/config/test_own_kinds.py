"""Something of one's own in every table at once, each with options: one run of all of it."""

from __future__ import annotations

import math
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from sample_kinds import CLASSES, IMPORTS

import fedsim
from fedsim import RunConfig, datasets, registry
from fedsim.errors import FedsimError
from fedsim.runs.data_split import partitioner
from fedsim.runs.preflight import check
from fedsim.runs.resolve import resolve

MODEL_AND_LOSS = """
from torch import nn

def model(input_shape, num_classes, width=4):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(input_shape[0], width), nn.Tanh(), nn.Linear(width, num_classes)
    )

def focal(outputs, targets, power=2.0):
    log_p = outputs.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return -((1 - log_p.exp()) ** power) * log_p
"""
UNCHECKED_DATA = """
import torch
from fedsim.datasets import Dataset, Split

def unchecked(**keywords):
    assert "path" not in keywords
    train, test = (
        Split(torch.zeros(3, 2), torch.tensor(labels)) for labels in ([0, 7, 1], [0, 1, 0])
    )
    return Dataset("unchecked", train, test, num_classes=2)
"""
TREE = {
    "rounds": 2,
    "data": {"name": "own_kinds:Blobs", "options": {"size": 90}},
    "partition": {"name": "own_kinds:ByRegion", "clients": 6, "options": {"region": 3}},
    "model": {"name": "own_kinds:model", "options": {"width": 5}},
    "task": {
        "loss": "own_kinds:focal",
        "options": {"power": 1.5},
        "metrics": "accuracy, own_kinds:Certainty(power=2.0), own_kinds:focal(power=1)",
    },
    "client": {"name": "own_kinds:Sign", "options": {"lr": 0.02}},
    "cohort": {"name": "own_kinds:Tides", "options": {"top": 0.8}},
    "mechanism": {"name": "own_kinds:Bound", "options": {"clip-norm": 0.5, "power": 2.0}},
    "noise": {"multiplier": 1.0},
    "server": {"optimizer": "own_kinds:Halved", "options": {"share": 0.7}},
}


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_kinds.py").write_text("\n".join([IMPORTS, *CLASSES.values(), MODEL_AND_LOSS]))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("own_kinds", None)


def test_something_of_ones_own_with_options_stands_in_every_table_at_once() -> None:
    config = RunConfig.parse(TREE)
    assert RunConfig.from_run_config(config.to_run_config()) == config
    result = fedsim.run(config)
    assert len(result.metrics) == 3
    assert {"test-accuracy", "test-Certainty-2.0", "test-focal-1"} <= result.metrics[-1].keys()
    assert math.isfinite(result.privacy.epsilon)
    resolved = resolve(config)
    assert (len(resolved.data.dataset.train), partitioner(config).region) == (90, 3)
    assert resolved.model[1].out_features == 5


def test_the_same_by_entry_points_of_an_installed_package_has_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    kinds = {"data": "Blobs", "partition": "ByRegion", "client": "Sign", "mechanism": "Bound",
             "server": "Halved", "metric": "Certainty"}  # fmt: skip
    points = tuple(
        EntryPoint(f"{kind}.theirs", f"own_kinds:{name}", registry.PLUGINS)
        for kind, name in kinds.items()
    )
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    config = RunConfig.parse(
        {
            "rounds": 1,
            "data": {"name": "theirs", "size": 30},
            "partition": {"name": "theirs", "clients": 6, "region": 3},
            "task": {"metrics": "theirs(power=3.0)"},
            "client": {"name": "theirs", "lr": 0.02},
            "mechanism": {"name": "theirs", "clip-norm": 0.5, "power": 2.0},
            "noise": {"multiplier": 1.0},
            "server": {"optimizer": "theirs", "share": 0.7},
        }
    )
    assert "test-theirs-3.0" in fedsim.run(config).metrics[-1]
    with pytest.raises(FedsimError, match=r"mechanism\.power = 0\.5; it must be at least 1"):
        config.replace(**{"mechanism.power": 0.5})


def test_a_plugins_data_are_checked_as_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own_kinds.py").write_text(UNCHECKED_DATA)
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("data.theirs", "own_kinds:unchecked", registry.PLUGINS)
    monkeypatch.setattr(registry, "_entry_points", lambda: (point,))
    for name in ("own_kinds:unchecked", "theirs"):
        with pytest.raises(FedsimError, match="label"):
            datasets.load(name)
        data = datasets.load(name, protected=True)
        assert data.train.columns["unusable"].tolist() == [False, True, False]


def test_a_plugin_that_does_not_describe_its_settings_has_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    kinds = {"model": "model", "loss": "focal", "cohort": "Tides"}
    points = tuple(
        EntryPoint(f"{kind}.theirs", f"own_kinds:{name}", registry.PLUGINS)
        for kind, name in kinds.items()
    )
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    config = RunConfig.parse(
        {
            **{key: TREE[key] for key in ("rounds", "data", "partition", "mechanism", "noise")},
            "model": {"name": "theirs", "options": {"width": 5}},
            "task": {"loss": "theirs", "options": {"power": 1.5}},
            "cohort": {"name": "theirs", "options": {"top": 0.8}},
        }
    )
    assert RunConfig.from_run_config(config.to_run_config()) == config
    resolved = resolve(config)
    assert (resolved.model[1].out_features, resolved.plan.sampler.rate) == (5, 0.8)
    assert fedsim.run(config).privacy.epsilon > 0
    with pytest.raises(FedsimError, match=r"model\.options\.depth is not a setting of 'theirs'"):
        check(resolve(config.replace(**{"model.options.depth": 2})))
    with pytest.raises(FedsimError, match=r"model\.width"):
        config.replace(**{"model.width": 2})


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("partition.options.region", -1, r"partition\.options\.region = -1; it must be at least 0"),
        ("partition.options.region", [1, 2], r"region = \[1, 2\]; it must be a number, a string"),
        ("partition.options.clients", 4, r"partition\.options\.clients is set; its value follows"),
        (
            "mechanism.options.power",
            0.5,
            r"mechanism\.options\.power = 0\.5; it must be at least 1",
        ),
        ("server.options.share", "x", r"server\.options\.share = 'x'; it must be a number"),
        ("data.options.size", 2, r"data\.options\.size = 2; it must be at least 4"),
        (
            "model.options.depth",
            2,
            r"model\.options\.depth is not a setting of .*; it takes width\.",
        ),
        ("client.options.lr", 0, r"client\.options\.lr = 0; it must be greater than 0"),
        ("cohort.options.top", 2, r"the highest probability is 2; it must lie in"),
        ("task.options.power", math.nan, r"task\.options\.power = nan; it must be a finite number"),
        (
            "task.metrics",
            "own_kinds:Certainty(power=0)",
            r"Certainty\.power = 0; it must be greater",
        ),
    ],
)
def test_an_option_that_is_no_good_is_blamed_by_its_own_name(
    key: str, value: object, sentence: str
) -> None:
    with pytest.raises(FedsimError, match=sentence):
        check(resolve(RunConfig.parse(TREE).replace(**{key: value})))
