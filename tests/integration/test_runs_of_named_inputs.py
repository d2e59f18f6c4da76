"""Runs of models with several inputs by name, from files and objects, on every engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedsim
from fedsim.apps.node import data_to_write, resolve_node, write_client_data
from fedsim.audit.user_checks import own_examples
from fedsim.cli import main
from fedsim.datasets import NamedTensors, load
from fedsim.errors import FedsimError
from fedsim.runs.resolve import resolve

USERS, ITEMS = 8, 5


def arrays(**changes: Any) -> dict[str, Any]:
    """Ratings that users give to items."""
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, USERS, 200), rng.integers(0, ITEMS, 200)
    user[160:168], item[160:165] = np.arange(USERS), np.arange(ITEMS)
    rating = (rng.normal(size=USERS)[user] * rng.normal(size=ITEMS)[item]).astype(np.float32)
    found = {
        "x_user_train": user[:160], "x_item_train": item[:160], "y_train": rating[:160],
        "owner_train": user[:160],
        "x_user_test": user[160:], "x_item_test": item[160:], "y_test": rating[160:],
    }  # fmt: skip
    return {k: v for k, v in {**found, **changes}.items() if v is not None}


NETS = """
from torch import nn


class Factors(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.users = nn.Embedding(vocabulary["user"], 4)
        self.items = nn.Embedding(vocabulary["item"], 4)

    def forward(self, item, user):
        return (self.users(user) * self.items(item)).sum(-1)
"""


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    np.savez("ratings.npz", **arrays())
    yield
    sys.modules.pop("nets", None)


def config(**changes: Any) -> fedsim.RunConfig:
    tree = {
        "rounds": 3,
        "data.name": "ratings.npz", "partition.name": "by-owner", "partition.clients": USERS,
        "model.name": "nets:Factors", "task.loss": "squared-error", "task.metrics": "rmse",
        "client.lr": 0.3, "client.batch-size": 8,
    }  # fmt: skip
    return fedsim.RunConfig.from_run_config({**tree, **changes})


CLIENTS = {
    "mechanism.name": "clipping",
    "noise.multiplier": 0.3,
    "cohort.name": "poisson",
    "cohort.rate": 0.6,
    "noise.entropy": "config",
}
EXAMPLES = {
    "client.mechanism.name": "clipping",
    "client.noise.multiplier": 0.3,
    "noise.entropy": "config",
}


def status(*words: str) -> int:
    """Exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(str(ended.value))


def facts(result: fedsim.RunResult) -> tuple[Any, ...]:
    rows = [{k: v for k, v in row.items() if "second" not in k} for row in result.metrics]
    return {name: array.numpy().tobytes() for name, array in result.arrays.items()}, rows


@pytest.mark.parametrize("privacy", [{}, CLIENTS, EXAMPLES], ids=["none", "clients", "examples"])
def test_files_folders_and_objects_give_one_run(privacy: dict[str, Any], tmp_path: Path) -> None:
    expected = facts(fedsim.run(config(**privacy)))
    assert expected[1][-1]["test-loss"] < expected[1][0]["test-loss"]
    if privacy:  # the data's name is in the digest, which keys the noise
        return
    (tmp_path / "folder").mkdir()
    for name, array in arrays().items():
        np.save(tmp_path / "folder" / f"{name}.npy", array)
    assert facts(fedsim.run(config(**{"data.name": "folder"}))) == expected
    found = arrays()
    nested = {
        **{k: v for k, v in found.items() if not k.startswith("x_")},
        **{
            f"x_{split}": {name: found[f"x_{name}_{split}"] for name in ("user", "item")}
            for split in ("train", "test")
        },
    }
    assert facts(fedsim.run(config(), data=nested)) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("ray_runtime")
@pytest.mark.parametrize("privacy", [CLIENTS, EXAMPLES], ids=["clients", "examples"])
@pytest.mark.parametrize("engine", ["ray", "simulation"])
def test_every_engine_gives_the_same_bytes(
    engine: str, privacy: dict[str, Any], tmp_path: Path
) -> None:
    expected = facts(fedsim.run(config(**privacy), out=tmp_path / "local"))
    run = fedsim.run(config(**privacy, **{"engine.name": engine}), out=tmp_path / engine)
    assert facts(run) == expected


def test_a_saved_run_predicts_from_a_mapping_and_says_what_is_wrong_with_another() -> None:
    result = fedsim.run(config(), out="run")
    saved = fedsim.load("run")
    found = arrays()
    user, item = found["x_user_test"][:7], found["x_item_test"][:7]
    factors = {name: torch.from_numpy(a.numpy()) for name, a in result.arrays.items()}
    products = factors["users.weight"][user] * factors["items.weight"][item]
    predicted = saved.predict({"item": item, "user": user.tolist()})
    np.testing.assert_allclose(predicted, products.sum(1).numpy(), rtol=1e-6)
    assert saved.input_shape == {"item": (), "user": ()}
    assert saved.evaluate()["loss"] == pytest.approx(result.metrics[-1]["test-loss"])
    assert saved.evaluate(arrays())["rmse"] == pytest.approx(result.metrics[-1]["test-rmse"])
    for wrong, sentence in (
        (user, "examples are ndarray; they must be a mapping of item, user"),
        ({"user": user}, "examples are user; they must be a mapping of item, user"),
        ({"user": user, "item": item[:2]}, "examples are 2 of item, 7 of user"),
        ({"user": user, "item": item + 5}, "must be tokens, whole numbers from 0 to 4"),
    ):
        with pytest.raises(FedsimError, match=sentence):
            saved.predict(wrong)
    others = arrays(x_item_test=np.full(40, 5))
    with pytest.raises(FedsimError, match="6 tokens of item; this model knows 5"):
        saved.evaluate(others)
    assert status("export", "run", "--to", "safetensors", "--out", "run.safetensors") == 0
    assert status("export", "run", "--to", "torchscript", "--out", "run.pt") == 2


def test_classes_of_two_inputs_have_probabilities(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    image, table = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), rng.normal(size=(60, 3))
    kept = rng.random((60, 3)) > 0.5
    y = (table * kept).argmax(1)
    split = {"x": {"image": image, "table": table.astype(np.float32), "kept": kept}, "y": y}

    class ImageAndTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pixels, self.head = nn.Linear(64, 4), nn.Linear(7, 3)

        def forward(
            self, image: torch.Tensor, table: torch.Tensor, kept: torch.Tensor
        ) -> torch.Tensor:
            table = table.masked_fill(~kept, 0.0)
            return self.head(torch.cat([self.pixels(image.flatten(1)).tanh(), table], 1))

    run = fedsim.RunConfig.from_run_config({"rounds": 2, "partition.clients": 5})
    torch.manual_seed(0)
    model = ImageAndTable()
    fedsim.run(run, model=model, data={"train": split, "test": split}, out="run")
    saved = fedsim.load("run", model=model)
    some = {"image": image[:4], "table": table[:4], "kept": kept[:4].astype(int)}
    with torch.no_grad():
        logits = saved.trained(
            image=torch.from_numpy(image[:4, None] / 255).float(),
            table=torch.from_numpy(table[:4]).float(),
            kept=torch.from_numpy(kept[:4]),
        )
    np.testing.assert_allclose(saved.predict_proba(some), logits.softmax(1), rtol=1e-5)
    tensors = {k: torch.from_numpy(v) for k, v in {**some, "image": image[:4, None]}.items()}
    tensors["kept"] = tensors["kept"].bool()
    torch.testing.assert_close(saved.model(NamedTensors(tensors)), logits)


def test_a_node_has_its_clients_inputs_in_a_file_of_its_own(tmp_path: Path) -> None:
    whole = config(**{"data.vocabulary": 0})
    paths = write_client_data(
        whole, data_to_write(whole), lambda client: tmp_path / f"node-{client}.npz"
    )
    own = resolve_node(config(), 3, str(paths[3])).trainer
    everybody = resolve(config()).trainer
    for trainer in (own, everybody):
        assert trainer.data.size(3) == len(everybody.data.indices[3])
    rows = [next(iter(t.train(t.initial(), np.array([3]), 1))).rows for t in (own, everybody)]
    assert torch.equal(*rows)
    with np.load(paths[3]) as written:
        assert [int(written[f"vocabulary_{name}"]) for name in ("user", "item")] == [USERS, ITEMS]


@pytest.mark.parametrize("declared", [{}, {"vocabulary_item": 5, "vocabulary_user": 8}])
def test_an_unusable_token_of_one_input_fails_its_client_or_counts_as_zero(
    declared: dict[str, int],
) -> None:
    item = arrays()["x_item_train"].copy()
    item[0] = USERS - 1  # a user's number, and no item's
    np.savez("ratings.npz", **arrays(x_item_train=item, **declared))
    np.savez("declared.npz", **arrays(x_item_train=item, vocabulary_item=5))
    with pytest.raises(FedsimError, match="the token 7 in x_item_train; tokens must be below 5"):
        load("declared.npz")
    failed = fedsim.run(config(**{**CLIENTS, "cohort.rate": 0.99}))
    assert sum(row.get("failed", 0) for row in failed.metrics) == 3
    counted = resolve(config(**EXAMPLES)).trainer
    client = int(arrays()["owner_train"][0])
    assert counted.data.unusable is not None
    assert np.flatnonzero(counted.data.unusable).tolist() == [0]
    assert fedsim.run(config(**EXAMPLES)).metrics[-1]["failed"] == 0
    assert client in range(USERS)


def test_an_audit_moves_one_example_of_several_inputs() -> None:
    finding = own_examples(resolve(config(**EXAMPLES)))
    assert finding.p_value > 0.5, finding


def test_public_examples_of_several_inputs_are_tried_by_name() -> None:
    np.savez("public.npz", user=[0, 7, 1], item=[4, 4, 0])
    tried = config(**EXAMPLES, **{"model.example": "public.npz"})
    data = resolve(tried).trainer.data
    parts = [data.public_inputs(3, torch.float32, part) for part in (0, 1)]
    assert [part["user"].tolist() for part in parts if part is not None] == [[0, 1, 0], [7, 7, 7]]
    assert fedsim.run(tried).metrics[-1]["failed"] == 0
    np.savez("public.npz", x=[0, 7, 1])
    with pytest.raises(FedsimError, match="are x; they must be a mapping of item, user"):
        resolve(tried)


@pytest.mark.parametrize(
    ("changes", "settings", "sentence"),
    [
        ({"x_item_test": None}, {}, "has the inputs x_item, x_user for training but x_user for"),
        ({"x_item_train": np.zeros(9, int)}, {}, "each of the 9 examples of x_item_train"),
        ({"vocabulary_film": 3}, {}, "vocabulary_film, but no input of that name; its inputs are"),
        ({"x_a-b_train": np.zeros(160), "x_a-b_test": np.zeros(40)}, {}, "an input named 'a-b'"),
        ({}, {"data.normalize": True}, r"data\.normalize is true, but"),
        ({"mean": 0.0, "std": 1.0}, {"data.normalize": True}, "only one, x, is normalised"),
        (
            {},
            {"model.name": "softmax"},
            "'softmax', which takes one input, but the data have item, user",
        ),
        ({"vocabulary": 4}, {}, r"has the token \d in x_(user|item)_(train|test); .* below 4"),
    ],
)
def test_inputs_that_do_not_fit_end_with_their_sentence(
    changes: dict[str, Any], settings: dict[str, Any], sentence: str
) -> None:
    np.savez("ratings.npz", **arrays(**changes))
    with pytest.raises(FedsimError, match=sentence):
        fedsim.run(config(**settings))


def test_a_model_that_lacks_an_argument_is_refused_by_name() -> None:
    class OneOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users = nn.Embedding(8, 1)

        def forward(self, user: torch.Tensor) -> torch.Tensor:
            return self.users(user)[:, 0]

    with pytest.raises(FedsimError, match=r"unexpected keyword argument 'item'.*item=, a batch"):
        fedsim.run(config(**{"model.name": "softmax"}), model=OneOnly())


def test_a_run_resumes_on_the_inputs_it_began_with_only() -> None:
    fedsim.run(config(rounds=2), out="run")
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["data"]["x-dtype"] == {"item": "int64", "user": "int64"}
    assert status("run", "run", "--resume", "--set", "rounds=3") == 0
    np.savez(
        "ratings.npz",
        **arrays(**{k: v[:, None] for k, v in arrays().items() if k.startswith("x_user")}),
    )
    assert status("run", "run", "--resume", "--set", "rounds=4") == 2
