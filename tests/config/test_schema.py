"""The JSON schema says of a config what the parser does."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fedsim import RunConfig
from fedsim.config.describe import schema
from fedsim.errors import FedsimError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(
    [
        *(path for path in (ROOT / "examples").rglob("*.toml") if path.name != "pyproject.toml"),
        *(ROOT / "experiments").rglob("run.toml"),
        ROOT / "experiments" / "demo.toml",
    ]
)


@pytest.fixture(scope="module")
def validator() -> jsonschema.protocols.Validator:
    said = schema()
    jsonschema.Draft202012Validator.check_schema(said)
    return jsonschema.Draft202012Validator(said)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_configs_that_are_here_fit_the_schema(
    path: Path, validator: jsonschema.protocols.Validator
) -> None:
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    assert [error.message for error in validator.iter_errors(tree)] == []


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["client.name=adadp-lr", "client.state=client"],
        ["model.name=mlp", "model.widths=64,32"],
        ["cohort.name=poisson", "mechanism.name=quantile-clipping", "noise.target-epsilon=2.0"],
        ["server.optimizer=fedadam", "server.schedule=cosine(length=10)"],
        ["partition.name=dirichlet", "partition.alpha=0.1", "engine.name=ray"],
        ["devices.availability=0.5", "client.work='whole(1,5)'", "data.validation=0.1"],
        ["client.name='mine:Own'", "client.options='a=1'"],
    ],
    ids=" ".join,
)
def test_a_whole_resolved_config_fits_the_schema(
    overrides: list[str], validator: jsonschema.protocols.Validator
) -> None:
    tree = tomllib.loads(RunConfig.from_overrides(overrides).to_toml())
    assert [error.message for error in validator.iter_errors(tree)] == []


BAD: list[dict[str, Any]] = [
    {"rounds": 0},
    {"rounds": "ten"},
    {"round": 10},
    {"client": {"lr": "fast"}},
    {"client": {"lr": -1.0}},
    {"client": {"batch-size": -1}},
    {"client": {"name": "adam", "momentum": 0.9}},
    {"client": {"name": "adamm"}},
    {"client": {"state": "kept"}},
    {"noise": {"delta": 1.0}},
    {"noise": {"placement": "nowhere"}},
    {"cohort": {"name": "poisson", "size": 3}},
    {"devices": {"dropout": 1.0}},
    {"engine": {"name": "cluster"}},
    {"evaluate": {"fraction": 0.0}},
    {"colour": {}},
]


@pytest.mark.parametrize("tree", BAD, ids=str)
def test_what_the_parser_refuses_does_not_fit(
    tree: dict[str, Any], validator: jsonschema.protocols.Validator
) -> None:
    assert not validator.is_valid(tree)
    with pytest.raises(FedsimError):
        RunConfig.parse(tree)
