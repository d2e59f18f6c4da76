"""Costs are added up only for clients that hold the same examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsim
from fedsim import RunConfig
from fedsim.datasets import Dataset
from fedsim.errors import FedsimError
from fedsim.partitions import IID, Partition
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.runs.resolve import resolve

PRIVATE = RunConfig.parse(
    {
        "rounds": 1,
        "partition": {"clients": 4},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 1.0},
        "evaluate": {"every": 0},
        "engine": {"device": "cpu"},
    }
)
EXAMPLES = PRIVATE.replace(
    **{
        "mechanism.name": "none",
        "noise.multiplier": "",
        "client.mechanism.name": "clipping",
        "client.noise.multiplier": 1.0,
        "client.batch-size": 5,
    }
)


def data(seed: int = 1) -> Any:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(40, 6)).astype(np.float32)
    train = {"x": x, "y": generator.integers(0, 3, 40)}
    test = {name: values[:4] for name, values in train.items()}
    return Dataset.of("mine", train, test, classes=3)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_run_over_the_same_object_may_overwrite_and_each_is_archived(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for _ in range(3):
        result = fedsim.run(PRIVATE, out=out, overwrite=True, data=data())
    assert result.privacy.cost.releases == 3
    for place in (out, out / "archive" / "1", out / "archive" / "2"):
        assert {"data-split.json", "fingerprint.key"} <= names(place)


@pytest.mark.parametrize(
    "second",
    [
        {},
        {"data": data(2)},
        {"data": data(), "partition": IID(clients=4, seed=7)},
    ],
)
def test_a_run_over_another_object_may_not_overwrite(tmp_path: Path, second: Any) -> None:
    fedsim.run(PRIVATE, out=tmp_path / "run", data=data())
    with pytest.raises(FedsimError, match=r"data= or partition= is .* the same object from Python"):
        fedsim.run(PRIVATE, out=tmp_path / "run", overwrite=True, **second)


def test_an_object_may_not_overwrite_what_a_config_named_nor_what_cannot_be_compared(
    tmp_path: Path,
) -> None:
    fedsim.run(PRIVATE, out=tmp_path / "named")
    with pytest.raises(FedsimError, match="it must be left out"):
        fedsim.run(
            PRIVATE, out=tmp_path / "named", overwrite=True, partition=IID(clients=4, seed=1)
        )
    fedsim.run(PRIVATE, out=tmp_path / "lost", data=data())
    (tmp_path / "lost" / "fingerprint.key").unlink()
    with pytest.raises(FedsimError, match="the same object from Python"):
        fedsim.run(PRIVATE, out=tmp_path / "lost", overwrite=True, data=data())


def test_runs_that_share_a_state_dir_must_assign_examples_alike(tmp_path: Path) -> None:
    shared = EXAMPLES.replace(**{"client.state-dir": str(tmp_path / "state")})
    fedsim.run(shared)
    result = fedsim.run(shared.replace(**{"client.lr": 0.2}))
    assert result.example_privacy is not None
    assert result.example_privacy.before or result.example_privacy.cost.releases > 1
    before = names(tmp_path / "state")
    with pytest.raises(FedsimError, match=r"client\.state-dir = .* seed was 1; here seed = 2"):
        fedsim.run(shared.replace(seed=2), out=tmp_path / "other")
    with pytest.raises(FedsimError, match=r"client\.state-dir = .* data= or partition= is another"):
        fedsim.run(shared, partition=IID(clients=4, seed=1))
    assert not (tmp_path / "other").exists()
    assert names(tmp_path / "state") == before


def test_no_unkeyed_digest_of_the_examples_is_written(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fedsim.run(PRIVATE, out=tmp_path / name, data=data())
    texts = [(tmp_path / name / "data-split.json").read_text() for name in ("a", "b")]
    assert texts[0] != texts[1]


@dataclass(frozen=True, eq=False)
class Listed(Partition):
    """Holds whose each example is, which belongs to the clients."""

    owners: Any = None
    clients: int = 4
    seed: int = 0
    least: int = 1

    def deal(self, examples: Any, generator: np.random.Generator) -> Any:
        return [np.flatnonzero(self.owners == client) for client in range(self.clients)]


def released(owners: Any, classes: int = 3, width: int = 6, **settings: int) -> str:
    """The release digest of a run on so many examples of these owners."""
    rng = np.random.default_rng(3)
    train = {
        "x": rng.normal(size=(len(owners), width)).astype(np.float32),
        "y": np.arange(len(owners)) % classes,
    }
    test = {"x": train["x"][:6], "y": np.arange(6) % 3}
    objects = ObjectOverrides(
        data=Dataset.of("mine", train, test), partition=Listed(owners=owners, **settings)
    )
    return resolve(PRIVATE, objects).release


def test_the_release_digest_holds_nothing_that_clients_have() -> None:
    owners = np.arange(40) % 4
    digest = released(owners)
    other = owners.copy()
    other[17] = 0
    assert released(other) == digest
    assert released(np.arange(41) % 4) == digest
    assert released(owners, classes=5) == digest  # two of them are in the training examples alone
    assert released(owners, width=7) != digest
    assert released(owners, least=2) != digest


@pytest.mark.parametrize("entropy", ["config", "system"])
@pytest.mark.parametrize("other", ["examples", "number", "owners"])
def test_a_run_is_resumed_with_the_objects_that_it_began_with(
    tmp_path: Path, entropy: str, other: str
) -> None:
    config = PRIVATE.replace(**{"noise.entropy": entropy})
    owners = np.arange(40) % 4
    out, begun = tmp_path / "run", data()
    fedsim.run(config, out=out, data=begun, partition=Listed(owners=owners))
    given: dict[str, Any] = {"data": begun, "partition": Listed(owners=owners)}
    if other == "examples":
        given["data"] = data(2)
    elif other == "number":
        given["data"] = replace(begun, train=begun.train[:39])
        given["partition"] = Listed(owners=owners[:39])
    else:
        given["partition"] = Listed(owners=owners[::-1].copy())
    longer = config.replace(rounds=2)
    with pytest.raises(FedsimError, match="that it began with"):
        fedsim.run(longer, out=out, resume=True, **given)
    on = fedsim.run(longer, out=out, resume=True, data=data(), partition=Listed(owners=owners))
    assert on.privacy.cost.releases == 2
