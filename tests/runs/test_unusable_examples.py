"""Labels and tokens outside the declared range, and classes of training examples alone."""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from clients_helpers import joined
from flwr.app import Context, RecordDict
from slow_cases import slow_but

import fedsim
from fedsim import RunConfig
from fedsim.apps.node import data_to_write, trainer_for, write_client_data
from fedsim.datasets import Dataset, dataset_of, load
from fedsim.errors import FedsimError
from fedsim.runs.resolve import resolve

WHO, WHICH = 3, 33
OWNER = np.repeat(np.arange(6), 10)
X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 2
CLIENT_LEVEL = {"mechanism.name": "clipping", "noise.multiplier": 1.0}
EXAMPLE_LEVEL = {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}
NETS = """
from torch import nn
class Text(nn.Module):
    def __init__(self, vocabulary, num_classes):
        super().__init__()
        self.rows, self.out = nn.Embedding(vocabulary, 3), nn.Linear(3, num_classes)
    def forward(self, x):
        return self.out(self.rows(x))
"""


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("nets", None)


def write(**changes: object) -> str:
    arrays = {"x_train": X, "y_train": Y, "x_test": X[:10], "y_test": Y[:10], "owner_train": OWNER}
    np.savez("data.npz", **{**arrays, **changes})
    return "data.npz"


def changed(array: np.ndarray, value: object) -> np.ndarray:
    other = array.copy()
    other[WHICH] = value
    return other


def config(**settings: object) -> RunConfig:
    return RunConfig().replace(
        **{
            "rounds": 2, "data.name": "data.npz", "partition.name": "by-owner",
            "partition.clients": 6, "cohort.name": "full", "client.batch-size": 5,
            "engine.device": "cpu", **settings,
        }
    )  # fmt: skip


def model_of(config: RunConfig, workers: int) -> tuple[bytes, dict[str, float]]:
    out = Path(f"workers{workers}")
    result = fedsim.run(config.replace(**{"engine.workers": workers}), out=out, overwrite=True)
    assert result.ended == "finished"
    return (out / "model.safetensors").read_bytes(), result.metrics[-1]


@pytest.mark.spanning
@pytest.mark.parametrize("classes", [0, 2])
@pytest.mark.parametrize("label", [2, -1, -100, 10**18])
def test_a_label_that_is_none_fails_its_client_alone(label: int, classes: int) -> None:
    write(y_train=changed(Y, label))
    settings = {**CLIENT_LEVEL, "data.classes": classes}
    models = []
    for workers in (1, 2):
        model, row = model_of(config(**settings), workers)
        assert (row["asked"], row["usable"], row["failed-raised"]) == (6, 5, 1)
        models.append(model)
    assert models[0] == models[1]
    # As without that client's update: everybody else's is what it was.
    trainer = resolve(config(**settings)).trainer
    write()
    sound = resolve(config(**settings)).trainer
    zero = torch.zeros(trainer.row_layout.d)
    others = np.array([0, 1, 2, 4, 5])
    rows = [joined(t.train(zero, others, 1), others)[0].numpy() for t in (trainer, sound)]
    np.testing.assert_array_equal(*rows)
    with pytest.raises(FedsimError, match="client 3 has an example with a label or token outside"):
        list(trainer.train(zero, np.array([WHO]), 1))


def test_a_run_without_privacy_refuses_it_as_before() -> None:
    write(y_train=changed(Y, 2))
    with pytest.raises(FedsimError, match="label 2 in y_train; labels must be below 2"):
        fedsim.run(config(**{"data.classes": 2}))
    write(y_train=changed(Y, -1))
    with pytest.raises(FedsimError, match="label -1 in y_train"):
        fedsim.run(config())


@pytest.mark.parametrize("label", slow_but(1, [2, -1, -100]))
def test_at_example_level_its_gradient_counts_as_zero(label: int) -> None:
    settings = config(**EXAMPLE_LEVEL, **{"data.classes": 2, "client.epochs": 4})
    found = {}
    for name, arrays in (
        # What counts as zero there already: an example of NaN.
        ("nan", {"x_train": changed(X, np.nan)}),
        ("label", {"y_train": changed(Y, label)}),
    ):
        write(**arrays)
        models = [model_of(settings, workers) for workers in (1, 2)]
        assert {row["usable"] for _, row in models} == {6}
        assert models[0][0] == models[1][0]
        found[name] = models[0][0]
    assert found["nan"] == found["label"]
    write()
    assert model_of(settings, 1)[0] != found["nan"]


@pytest.mark.parametrize(
    ("token", "level"),
    [
        (7, "client"),
        (-1, "client"),
        (10**15, "client"),
        (7, "example"),
        (-1, "example"),
        (0, "masked"),
    ],
)
def test_a_token_that_is_none_is_never_looked_up(token: int, level: str) -> None:
    Path("nets.py").write_text(NETS)
    x = np.random.default_rng(1).integers(0, 7, (60, 5))
    tokens = x.copy()
    tokens[WHICH, 2] = token
    mask = np.ones((60, 5), np.bool_)
    targets = {"y_train": x % 3, "y_test": x[:10] % 3}
    if level == "masked":  # whose target does not count is no more than that
        targets["y_train"] = np.where(np.arange(60)[:, None] % 2, x % 3, -100)
        mask = np.tile(np.arange(60)[:, None] % 2 == 1, (1, 5))
        tokens = x
    masks = {"mask_train": mask, "mask_test": np.ones((10, 5), np.bool_)}
    write(x_train=tokens, x_test=x[:10], **targets, **masks, vocabulary=7, classes=3)
    privacy = EXAMPLE_LEVEL if level == "example" else CLIENT_LEVEL
    settings = config(**privacy, **{"model.name": "nets:Text"})
    models = [model_of(settings, workers) for workers in (1, 2)]
    assert {row["usable"] for _, row in models} == {5 if level == "client" else 6}
    assert models[0][0] == models[1][0]


def test_a_node_of_its_own_file_trains_as_the_simulation(tmp_path: Path) -> None:
    write(y_train=changed(Y, 9))
    for privacy in (CLIENT_LEVEL, EXAMPLE_LEVEL):
        run = config(**privacy, **{"noise.entropy": "config", "data.classes": 2})
        deployed = run.replace(**{"engine.name": "deployment", "client.state-dir": str(tmp_path)})
        files = write_client_data(
            run, data_to_write(run), lambda client: tmp_path / f"node-{client}.npz"
        )
        node_config = {"partition-id": WHO, "data": str(files[WHO])}
        node = trainer_for(Context(1, 7, node_config, RecordDict(), deployed.to_run_config()))
        zero, whole = torch.zeros(node.row_layout.d), resolve(run).trainer
        if privacy is CLIENT_LEVEL:
            with pytest.raises(FedsimError, match="client 3 has an example"):
                list(node.train(zero, np.array([WHO]), 1))
            continue
        ((block,), (other,)) = (t.train(zero, np.array([WHO]), 1) for t in (node, whole))
        np.testing.assert_array_equal(block.rows.numpy(), other.rows.numpy())


def test_data_from_python_go_the_same_way_and_are_left_as_they_are() -> None:
    labels = torch.from_numpy(changed(Y, 2))
    split = fedsim.datasets.Split(torch.from_numpy(X), labels, None, {"owner": OWNER})
    public = fedsim.datasets.Split(split.x[:10], split.y[:10])
    made = Dataset("mine", split, public, num_classes=2)
    result = fedsim.run(config(**CLIENT_LEVEL), data=made)
    assert (result.metrics[-1]["usable"], result.metrics[-1]["failed-raised"]) == (5, 1)
    assert labels[WHICH] == 2
    arrays = {"x": X, "y": changed(Y, 2), "owner": OWNER}
    found = Dataset.from_arrays("mine", arrays, {"x": X[:10], "y": Y[:10]})
    assert found.num_classes == 3
    result = fedsim.run(config(**CLIENT_LEVEL), data=found)
    assert (result.metrics[-1]["usable"], result.metrics[-1]["failed-raised"]) == (5, 1)
    with pytest.raises(FedsimError, match="label 2 in y_train"):
        fedsim.run(config(), data=made)


def test_a_label_out_of_range_in_training_data_is_not_refused_from_any_source_of_data() -> None:
    """Whether a private run starts, and what is printed, must not depend on training examples."""
    labels = changed(Y, 12)
    Path("nets.py").write_text(
        "import numpy as np, torch\nfrom fedsim.datasets import Dataset, Split\n"
        "def data():\n    arrays = np.load('data.npz')\n"
        "    train, test = (Split(*(torch.from_numpy(arrays[f'{k}_{s}']) for k in 'xy'))"
        " for s in ('train', 'test'))\n    return Dataset('mine', train, test, num_classes=4)\n"
    )
    write(y_train=labels, classes=np.array(4))
    arrays = dict(np.load("data.npz"))
    shutil.copy("data.npz", "mnist.npz")
    made = [
        load("nets:data", protected=True),
        load("mnist", directory=".", protected=True),
        dataset_of(arrays, protected=True),
    ]
    marked = [data.train.columns["unusable"].nonzero()[0].tolist() for data in made]
    assert marked == [[WHICH]] * 3
    with pytest.raises(FedsimError, match="label 12 in y_train"):
        load("nets:data")


def test_a_mapped_file_keeps_its_bytes_and_no_other_number_is_replaced() -> None:
    folder = Path("folder")
    folder.mkdir()
    labels = changed(Y, 5).astype(np.int64)
    for name, array in (("x_train", X), ("y_train", labels), ("x_test", X), ("y_test", Y)):
        np.save(folder / f"{name}.npy", array)
    before = (folder / "y_train.npy").read_bytes()
    split = load(str(folder), classes=2, protected=True).train
    np.testing.assert_array_equal(split.y.numpy(), changed(Y, 0))
    np.testing.assert_array_equal(np.flatnonzero(split.columns["unusable"]), [WHICH])
    assert (folder / "y_train.npy").read_bytes() == before
    huge = np.where(np.arange(60) == WHICH, np.uint64(2**63), Y.astype(np.uint64))
    sides = {"x": X, "y": huge}, {"x": X[:10], "y": Y[:10].astype(np.uint64)}
    made = Dataset.from_arrays("huge", *sides, classes=2, protected=True)
    np.testing.assert_array_equal(made.train.y.numpy(), changed(Y, 0))


def test_without_public_test_examples_sizes_must_be_declared_whatever_the_data_hold() -> None:
    sentences = set()
    for labels in (Y, changed(Y, 5), changed(Y, -1)):
        masks = {"mask_train": np.ones((60, 1), np.bool_), "mask_test": np.zeros((10, 1), np.bool_)}
        write(y_train=labels[:, None], y_test=Y[:10, None], **masks)
        with pytest.raises(FedsimError, match=r"data\.classes is not set") as refused:
            fedsim.run(config(**CLIENT_LEVEL))
        sentences.add(str(refused.value))
    assert len(sentences) == 1


HEADER = ["age", "sex", "hours", "hospital", "income"]
TABLE = {
    "data.name": "people",
    "data.columns": "y=income,owner=hospital",
    "data.types": "age=0:100,sex=f|m,hours=number,income=low|high",
    "client.batch-size": 2,
    "evaluate.every": 0,
    "partition.clients": 5,
}
SHOWN = {"evaluate.every": 1, "evaluate.unprotected": True}
PLACE = {"train": 9, "test": 8}


def write_people(split: str = "", **changes: str) -> None:
    """A folder of two tables, of which a row of client 4, owner 10, has other values in one."""
    Path("people").mkdir(exist_ok=True)
    for part, count in (("train", 40), ("test", 10)):
        rows = [
            [str(20 + k), "fm"[k % 2], f"{k}.5", str([1, 2, 3, 9, 10][k // 2 % 5]), "low"]
            for k in range(count)
        ]
        for name, value in changes.items() if part == split else ():
            rows[PLACE[part]][HEADER.index(name)] = value
        with open(f"people/{part}.csv", "w", newline="") as file:
            csv.writer(file).writerows([HEADER, *rows])


def everything_left_behind(out: Path) -> str:
    return "".join(f.read_text(errors="replace") for f in out.rglob("*") if f.is_file())


@pytest.mark.spanning
@pytest.mark.parametrize("level", [CLIENT_LEVEL, EXAMPLE_LEVEL])
@pytest.mark.parametrize("shown", [{}, SHOWN, SHOWN | {"data.validation": 0.2}])
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    "changes",
    [
        {"age": "SECRET"}, {"sex": "SECRET"}, {"hours": "1e99"}, {"income": "SECRET"},
        {"hospital": ""}, {"hospital": "010"}, {"age": 'SECRET\n,"'}, {"age": "inf"},
    ],
)  # fmt: skip
def test_a_persons_row_of_a_table_ends_no_private_run_and_is_never_shown(
    changes: dict[str, str],
    split: str,
    shown: dict[str, object],
    level: dict[str, object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_people(split, **changes)
    result = fedsim.run(config(**{**TABLE, **level, **shown}), out="out")
    assert (result.ended, result.metrics[-1]["round"]) == ("finished", 2)
    assert "SECRET" not in caplog.text + everything_left_behind(Path("out"))
    measured = {k: v for row in result.metrics for k, v in row.items() if k.endswith("-loss")}
    assert all(np.isfinite(list(measured.values())))
