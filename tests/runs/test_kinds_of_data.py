"""Runs on data with owners, masks and examples that are held out."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsim
from fedsim.apps.node import data_to_write, resolve_node, write_client_data
from fedsim.cli import main
from fedsim.datasets import Dataset
from fedsim.errors import FedsimError
from fedsim.partitions import Partition
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.directory import RunDirectory
from fedsim.runs.record import RunRecord
from fedsim.runs.resolve import resolve
from fedsim.runs.run_ledgers import RunLedgers
from fedsim.runs.sweep import grid_runs, parse_axes, run_sweep, sweep_measure

OWNERS = 6
LENGTH = 4


def write(folder: Path, **changes: Any) -> str:
    """Token sequences of owners with 1, 2, ... examples, whose tokens count up."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(OWNERS), np.arange(1, OWNERS + 1))
    x = (rng.integers(0, 8, (len(owner), 1)) + np.arange(LENGTH)) % 8
    x[0] = np.arange(4, 8)
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (len(owner), 1))
    arrays = {
        "x_train": x, "y_train": (x + 1) % 8, "mask_train": mask,
        "owner_train": np.array([f"author {k}" for k in owner]),
        "x_test": x[:9], "y_test": (x[:9] + 1) % 8, "mask_test": mask[:9],
        "owner_test": np.array([f"author {k}" for k in [0, 1, 1, 3, 3, 3, 5, 9, 9]]),
        "vocabulary": np.array(8), "classes": np.array(8),
    }  # fmt: skip
    arrays |= changes
    np.savez(folder / "text.npz", **{k: v for k, v in arrays.items() if v is not None})
    (folder / "nets.py").write_text(
        "from torch import nn\n\n\n"
        "def model(vocabulary, num_classes):\n"
        "    return nn.Sequential(nn.Embedding(vocabulary, 5), nn.Linear(5, num_classes))\n\n\n"
        "def stem(num_classes):\n"
        "    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_classes))\n"
    )
    return str(folder / "text.npz")


def config(path: str, **changes: Any) -> fedsim.RunConfig:
    tree = {
        "rounds": 3,
        "data.name": path, "partition.name": "by-owner", "partition.clients": OWNERS,
        "model.name": "nets:model", "task.metrics": "accuracy,perplexity",
        "client.lr": 0.5, "client.batch-size": 2, "evaluate.clients-every": 1,
    }  # fmt: skip
    return fedsim.RunConfig.from_run_config({**tree, **changes})


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("nets", None)


@pytest.fixture
def text(tmp_path: Path) -> str:
    return write(tmp_path)


def test_authors_are_clients_and_evaluate_on_their_own_test_examples(text: str) -> None:
    resolved = resolve(config(text))
    assert [len(part) for part in resolved.data.client_indices] == [1, 2, 3, 4, 5, 6]
    assert [len(part) for part in resolved.data.client_test_indices] == [1, 2, 0, 3, 0, 1]
    result = fedsim.run(config(text))
    last = result.metrics[-1]
    assert last["clients-num-examples"] == 7
    assert last["test-perplexity"] < result.metrics[0]["test-perplexity"]
    assert last["clients-loss-min"] <= last["clients-loss-median"] <= last["clients-loss-max"]
    assert last["clients-loss-min"] <= last["clients-loss"] <= last["clients-loss-max"]


def test_a_run_of_tokens_is_the_same_for_any_block_and_on_every_engine(
    text: str, tmp_path: Path
) -> None:
    reference = fedsim.run(config(text), out=tmp_path / "one")
    bytes_of = (tmp_path / "one" / "model.safetensors").read_bytes()
    for size in (1, 3, 7):
        out = tmp_path / f"block{size}"
        fedsim.run(config(text, **{"client.block-size": size}), out=out)
        assert (out / "model.safetensors").read_bytes() == bytes_of
    assert reference.metrics[0]["round"] == 0


def test_examples_that_are_held_out_are_in_nobodys_hands(text: str) -> None:
    held = config(text, **{"data.validation": 0.3})
    resolved = resolve(held)
    dealt = resolved.data
    everything = np.concatenate([*dealt.client_indices, dealt.held_out])
    np.testing.assert_array_equal(np.sort(everything), np.arange(21))
    assert len(dealt.held_out) == 6
    assert min(map(len, dealt.client_indices)) == 1
    owners = resolved.data.dataset.train.columns["owner"]
    for client, part in enumerate(dealt.client_indices):
        assert set(owners[part]) == {f"author {client}"}
    result = fedsim.run(held)
    assert {"validation-loss", "validation-perplexity"} <= result.metrics[-1].keys()
    for amount in (0.9, 16, 21.5, -1):
        with pytest.raises(FedsimError, match=r"data\.validation"):
            resolve(config(text, **{"data.validation": amount})).data.client_indices  # noqa: B018


OTHERS = {"owner_test": np.array(["somebody else"] * 9)}
PRIVATE = {"mechanism.name": "clipping", "noise.multiplier": 1.0, "evaluate.clients-every": 0}


@pytest.mark.parametrize(
    ("changes", "settings", "sentence"),
    [
        ({"classes": None}, {}, r"data\.classes is not set, and the test examples"),
        ({"vocabulary": None}, {}, r"data\.vocabulary is not set, and the test examples"),
        (
            OTHERS,
            {"partition.clients": 7},
            r"partition\.clients is 7, but .* fewer owners .* private",
        ),
        (OTHERS, {"partition.clients": 5}, r"partition\.clients is 5, but .* 6 owners"),
        (OTHERS, {"data.validation": 0.2}, r"data\.validation = 0\.2 .*evaluate\.unprotected"),
        ({}, {"partition.column": "site"}, r"partition\.column is 'site'"),
        ({}, {}, r"evaluate\.every = 1 measures test examples of clients .*unprotected"),
        ({}, {"partition.name": "iid"}, r"evaluate\.every = 1 measures test examples of clients"),
        *(
            ({}, {"evaluate.unprotected": True, "data.validation": 0.3, key: metric}, sentence)
            for key, sentence in (
                ("stop.metric", r"stop\.metric = .*clients' data needs"),
                (
                    "checkpoint.best",
                    r"checkpoint\.best = .*clients' data needs",
                ),
            )
            for metric in ("validation-loss", "clients-loss")
        ),
    ],
)
def test_a_private_run_finds_nothing_in_its_clients_data(
    tmp_path: Path, changes, settings, sentence: str
) -> None:
    few = np.tile(np.arange(4), (9, 1))
    path = write(tmp_path, x_test=few, y_test=few, **changes)
    with pytest.raises(FedsimError, match=sentence):
        fedsim.run(config(path, **PRIVATE, **settings))


def test_test_examples_that_clients_own_are_no_public_split_to_find_sizes_in(
    tmp_path: Path,
) -> None:
    settings = {**PRIVATE, "evaluate.unprotected": True, "data.classes": 8}
    with pytest.raises(FedsimError, match=r"data\.vocabulary .* belong to clients \(column own"):
        fedsim.run(config(write(tmp_path, vocabulary=None, classes=None), **settings))
    public = write(tmp_path, vocabulary=None, classes=None, **OTHERS)
    assert fedsim.run(config(public, **PRIVATE)).privacy.epsilon > 0


def test_what_is_declared_may_be_private(text: str, tmp_path: Path) -> None:
    unseen = config(text, **PRIVATE, **{"evaluate.every": 0})
    assert fedsim.run(unseen).privacy.epsilon > 0
    others = config(write(tmp_path, **OTHERS), **PRIVATE)
    declared = {"data.classes": 8, "data.vocabulary": 8}
    for settings in ({}, declared):
        assert fedsim.run(others.replace(**settings)).metrics[-1]["test-loss"] > 0


def test_what_clients_own_may_be_shown_if_asked_for_and_decides_nothing(
    text: str, tmp_path: Path
) -> None:
    seen: list[set[str]] = []

    class Watch(Callback):
        def on_round(self, status: RunStatus) -> None:
            assert {"test-loss", "validation-loss"} <= status.row.keys()
            seen.append(set(status.metrics))

    shown = PRIVATE | {"evaluate.unprotected": True, "data.validation": 0.2}
    fedsim.run(config(text, **shown), out=tmp_path / "run", callbacks=[Watch()])
    assert seen
    assert not any(name.startswith(("test-", "validation-")) for names in seen for name in names)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Test examples are clients" in page
    assert "belong to no client" not in page


def test_examples_of_owners_can_be_protected_by_themselves(text: str) -> None:
    example_level = {
        "client.mechanism.name": "clipping",
        "client.noise.multiplier": 1.0,
        "client.batch-size": 1,
        "client.steps": 2,
        "evaluate.clients-every": 0,
        "evaluate.every": 0,
    }
    result = fedsim.run(config(text, **example_level))
    assert result.example_privacy.epsilon > 0


def test_personal_parameters_are_not_in_the_model_that_is_shared(text: str, tmp_path: Path) -> None:
    personal = {
        "model.personal": "1.*",
        "client.state": "client",
        "evaluate.every": 0,
        "cohort.name": "fixed",
        "cohort.size": 4,
    }
    result = fedsim.run(config(text, **personal), out=tmp_path / "run")
    assert set(result.arrays) == {"0.weight"}
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["clients-loss"]) > 0
    with pytest.raises(FedsimError, match=r"model\.personal = '1\.\*'.*evaluate\.every"):
        fedsim.run(config(text, **personal | {"evaluate.every": 1}))
    with pytest.raises(FedsimError, match=r"client\.state"):
        fedsim.run(config(text, **personal | {"client.state": "reset"}))


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["text", "frozen stem, held out"])
def test_members_of_a_sweep_train_and_evaluate_on_the_same_examples_as_alone(
    text: str, tmp_path: Path, frozen: bool
) -> None:
    base = config(text, rounds=2)
    if frozen:  # a stem whose outputs would go through it once more
        changes = {"data.name": "digits", "partition.name": "iid", "data.validation": 0.3}
        model = {"model.name": "nets:stem", "task.metrics": "accuracy", "model.trainable": "2.*"}
        base = config(text, **{"rounds": 2, **changes, **model})
    grid = grid_runs(base, parse_axes(["client.lr=0.1,0.5"]))
    run_sweep(grid, tmp_path / "sweep")
    for member in grid:
        alone = fedsim.run(member.config).metrics
        together = RunDirectory(tmp_path / "sweep" / member.label).metrics_file.rows()
        for column in alone[-1].keys() - {"seconds", "clients-per-second"}:
            assert together[-1][column] == alone[-1][column], column


def test_a_model_of_numbers_refuses_tokens_and_a_loss_of_classes_refuses_numbers(
    text: str, tmp_path: Path
) -> None:
    with pytest.raises(FedsimError, match="takes numbers, but the data's inputs are tokens"):
        fedsim.run(config(text, **{"model.name": "softmax"}))
    numbers = {
        "x_train": np.random.default_rng(0).normal(size=(21, 3)), "y_train": np.arange(21.0),
        "x_test": np.zeros((9, 3)), "y_test": np.arange(9.0), "mask_train": None,
        "mask_test": None, "classes": None, "vocabulary": None,
    }  # fmt: skip
    path = write(tmp_path, **numbers)
    linear = {"model.name": "softmax", "client.lr": 0.001}
    with pytest.raises(FedsimError, match="'squared-error'"):
        fedsim.run(config(path, **linear))
    task = {"task.loss": "squared-error", "task.metrics": "r2,rmse"}
    result = fedsim.run(config(path, **linear, **task))
    assert result.metrics[-1]["test-rmse"] < result.metrics[0]["test-rmse"]


@pytest.mark.parametrize("file", [False, True])
def test_a_node_has_its_owners_examples_and_evaluates_as_in_a_simulation(
    text: str, tmp_path: Path, file: bool
) -> None:
    settings = config(text)
    whole = resolve(settings).trainer
    paths = write_client_data(
        settings, data_to_write(settings), lambda client: tmp_path / f"{client}.npz"
    )
    vector = whole.initial()
    for client in (0, 2, 3):
        node = resolve_node(settings, client, str(paths[client]) if file else "").trainer
        ids = np.array([client])
        (row,), (same,) = node.train(vector, ids, 1), whole.train(vector, ids, 1)
        assert (row.rows == same.rows).all()
        (metrics,), (expected,) = node.evaluate(vector, ids, 1), whole.evaluate(vector, ids, 1)
        for name, column in expected.metrics.items():
            np.testing.assert_array_equal(metrics.metrics[name], column)


@pytest.mark.slow
def test_members_of_a_sweep_on_masked_data_end_as_they_do_alone(text: str, tmp_path: Path) -> None:
    base = config(text, **{"data.validation": 0.2, "rounds": 2})
    grid = grid_runs(base, {"client.lr": [0.1, 0.5], "seed": [1, 2]})
    outcomes = run_sweep(grid, tmp_path / "sweep")
    assert {outcome.ended for outcome in outcomes.values()} == {"finished"}
    for member in grid:
        fedsim.run(member.config, out=tmp_path / "alone" / member.label)
        together, alone = tmp_path / "sweep" / member.label, tmp_path / "alone" / member.label
        name = "model.safetensors"
        assert (together / name).read_bytes() == (alone / name).read_bytes()
        ours, theirs = (RunRecord.read(place, RunLedgers()) for place in (together, alone))
        column = f"validation-{sweep_measure(member.config).name}"
        assert ours.columns() == theirs.columns()
        assert ours.recent(column) == theirs.recent(column) is not None


def test_a_partition_of_sequences_shows_how_many_each_client_has(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(config(text).to_toml())
    with pytest.raises(SystemExit) as ended:
        main(["partition", "run.toml", "--out", "clients.png"])
    assert not ended.value.code
    assert "owner, 6 clients, seed 1" in " ".join(capsys.readouterr().out.split())


def test_data_without_a_mean_are_not_normalised_by_it() -> None:
    x, y = np.ones((20, 3), np.float32), np.arange(20) % 2
    data = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    with pytest.raises(FedsimError, match=r"data\.normalize is true, but data= has no mean"):
        fedsim.run(fedsim.RunConfig().replace(**{"data.normalize": True}), data=data)


@dataclass(frozen=True)
class ByPatient(Partition):
    """Deals by a column that no field of it names."""

    clients: int = 4
    seed: int = 0

    def deal(self, examples, generator):
        return [np.flatnonzero(examples.columns["patient"] == k) for k in range(self.clients)]


@pytest.mark.parametrize(
    ("settings", "strangers", "sentence"),
    [
        ({}, False, r"evaluate\.every = 1 measures test examples of clients \(column patient\)"),
        ({"data.validation": 0.2}, True, r"data\.validation = 0\.2 holds out examples that have"),
        ({}, True, ""),
        ({"evaluate.unprotected": True}, False, ""),
    ],
)
def test_whatever_a_users_partition_deals_by_may_be_owners(settings, strangers, sentence) -> None:
    whose, rng = np.repeat(np.arange(4), 6), np.random.default_rng(1)
    rows = {"x": rng.normal(size=(24, 3)).astype(np.float32), "y": np.arange(24) % 2}
    theirs = whose + 4 if strangers else whose
    data = Dataset.from_arrays(
        "p", rows | {"patient": whose}, rows | {"patient": theirs}, classes=2
    )
    keys = {"partition.clients": 4, "cohort.name": "full", **PRIVATE, **settings}
    run = partial(fedsim.run, fedsim.RunConfig().replace(**keys), data=data, partition=ByPatient())
    if sentence:
        with pytest.raises(FedsimError, match=sentence):
            run()
    else:
        assert "test-accuracy" in run().metrics[-1]


def test_one_class_alone_is_refused():
    x, y = np.ones((20, 3), dtype=np.float32), np.zeros(20, dtype=np.int64)
    data = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    with pytest.raises(FedsimError, match="one class, 0"):
        fedsim.run(fedsim.RunConfig().replace(**{"partition.clients": 2, "rounds": 1}), data=data)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_])
@pytest.mark.parametrize("private", [False, True])
def test_bytes_and_booleans_are_features_as_they_are(
    dtype: Any, private: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2 if dtype is np.bool_ else 7, (120, 9)).astype(dtype)
    y = (bits.sum(1) > bits.sum(1).mean()).astype(int)
    examples = {"client.mechanism.name": "clipping", "client.noise.multiplier": 0.5}
    settings = {"rounds": 2, "partition.clients": 4, "client.lr": 0.05}
    run = fedsim.RunConfig.from_run_config(settings | (examples if private else {}))
    runs = {}
    for name, x in (("own", bits), ("floats", bits.astype(np.float32))):
        np.savez(tmp_path / "bits.npz", x_train=x, y_train=y, x_test=x[:40], y_test=y[:40])
        runs[name] = fedsim.run(run.replace(**{"data.name": "bits.npz"}), out=tmp_path / name)
    own, floats = (dict(result.arrays) for result in runs.values())
    assert {k: v.numpy().tobytes() for k, v in own.items()} == {
        k: v.numpy().tobytes() for k, v in floats.items()
    }
    saved = [fedsim.load(tmp_path / name) for name in runs]
    for x in (bits, bits.astype(np.float32), bits.astype(int)):
        assert (saved[0].predict(x) == saved[1].predict(x)).all()
    assert saved[0].evaluate(str(tmp_path / "bits.npz"))["loss"] == saved[1].evaluate()["loss"]


LENGTHS = """
import torch
from torch import nn


class ByLength(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 4), nn.Linear(4, 2)

    def forward(self, x):
        lengths, tokens = x[:, 0], x[:, 1:]
        if not all(3 <= length <= 5 for length in lengths.tolist()):
            raise ValueError("a length is not from 3 to 5")
        counts = torch.arange(tokens.shape[1]) < lengths[:, None]
        summed = (self.embedding(tokens) * counts[..., None]).sum(1)
        return self.head(summed / lengths[:, None])
"""


@pytest.mark.parametrize("level", ["clients", "examples"])
def test_a_public_example_is_tried_where_a_made_up_one_cannot_be(
    level: str, tmp_path: Path
) -> None:
    (tmp_path / "nets.py").write_text(LENGTHS)
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 6, (40, 1))
    x = np.concatenate([lengths, rng.integers(0, 9, (40, 5))], 1)
    y = (x[:, 1] > 4).astype(int)
    arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "vocabulary": 9}
    np.savez(tmp_path / "lengths.npz", **arrays)
    privacy = {
        "clients": {"mechanism.name": "clipping", "noise.multiplier": 0.1},
        "examples": {"client.mechanism.name": "clipping", "client.noise.multiplier": 0.1},
    }
    run = fedsim.RunConfig.from_run_config(
        {
            "rounds": 3, "data.name": "lengths.npz", "partition.clients": 2,
            "model.name": "nets:ByLength", "client.lr": 1.0, **privacy[level],
        }
    )  # fmt: skip
    with pytest.raises(FedsimError, match="a length is not from 3 to 5"):
        fedsim.run(run)
    np.save(tmp_path / "public.npy", [[3, 1, 2, 0, 0, 0], [4, 2, 3, 1, 1, 1]])
    run = run.replace(**{"model.example": "public.npy"})
    result = fedsim.run(run, out=tmp_path / "run")
    assert result.metrics[-1]["test-loss"] < result.metrics[0]["test-loss"]
    (tmp_path / "public.npy").unlink()
    assert fedsim.load(tmp_path / "run").predict(x).shape == (40,)  # the file is not needed
    for wrong, sentence in (
        (None, r"model\.example = 'public\.npy' could not be read"),
        (x[:1], "has 1 examples; it must have two or more"),
        (x[:, :3], r"examples have shape \(40, 3\); this model takes \('N', 6\)"),
        (x + 9, "must be tokens, whole numbers from 0 to 8"),
    ):
        if wrong is not None:
            np.save(tmp_path / "public.npy", wrong)
        with pytest.raises(FedsimError, match=sentence):
            fedsim.run(run)
