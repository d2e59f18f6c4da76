"""Objects from Python that cannot be what they stand for: one sentence each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAdam, FedProx
from torch import nn

import fedsim
from fedsim import RunConfig
from fedsim.config.values import objects_in
from fedsim.datasets import Dataset, Split
from fedsim.errors import FedsimError
from fedsim.partitions import IID
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.strategies import RunFailedError

CONFIG = RunConfig().replace(**{"rounds": 1, "partition.clients": 3})


def hooked() -> nn.Module:
    model = nn.Linear(64, 10)
    model.weight.register_hook(lambda gradient: 0 * gradient)
    return model


@pytest.mark.parametrize(
    ("objects", "sentence"),
    [
        ({"model": "mlp"}, r"model is 'mlp'; it must be an object of torch\.nn.*Module"),
        ({"model": nn.Linear}, r"model is the class"),
        ({"model": nn.LazyLinear(10)}, r"the model has lazy layers"),
        ({"model": nn.Linear(64, 10, dtype=torch.complex64)}, r"the model's weight is complex"),
        ({"model": nn.Linear(64, 3)}, r"the model has 3 outputs, and the data have 10 classes"),
        ({"model": nn.Linear(64, 10, device="meta")}, r"weight is on the device 'meta', where"),
        ({"model": nn.Sequential(nn.ReLU())}, r"the model has no parameter that is trained"),
        (
            {"model": nn.Sequential(nn.Tanh(), nn.Linear(63, 10))},
            r"the model ends in RuntimeError \(.*2x64 and 63x10\)\) in its '1', Linear\(.*; it "
            r"must take a batch \[B, 64\] of torch.float32, as its data are",
        ),
        (
            {"model": nn.DataParallel(nn.Linear(64, 10))},
            "the model has a DataParallel, ",
        ),
        ({"model": nn.utils.weight_norm(nn.Linear(64, 10))}, r"model= cannot be copied \(RuntimeE"),
        ({"model": hooked()}, r"the model's weight has a hook on its gradient"),
        ({"model": nn.ModuleList([nn.Linear(64, 10)])}, "ends in NotImplementedError .*forward"),
        (
            {"data": {"x": 1}},
            r"data= lacks x_train, y_train, x_test, y_test; .*from_table",
        ),
        ({"partition": [[0], [1], [2]]}, r"partition is .*fedsim\.partitions\.Partition"),
        ({"strategy": "fedadam"}, r"strategy is 'fedadam'; .*flwr\.serverapp\.strategy\.Strategy"),
        ({"strategy": FedProx(proximal_mu=0.3)}, r"proximal-mu = 0\.3, and client\.proximal is 0"),
        ({"callbacks": [print]}, r"callbacks= has <built-in.*fedsim\.Callback"),
        ({"callbacks": print}, r"callbacks is <built-in.*fedsim\.Callback"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_object_of_another_kind_is_refused_by_its_keyword(
    objects: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(FedsimError, match=sentence):
        fedsim.run(CONFIG, **objects)


@pytest.mark.parametrize(
    ("shape", "layout", "hint"),
    [
        (
            (24, 2),
            "auto",
            r" \(with data\.layout = 'as-is' no series or matrix is read as an image\)",
        ),
        ((24, 2), "as-is", ""),
        ((24,), "auto", ""),
    ],
)
def test_a_model_that_fails_on_a_series_read_as_an_image_is_told_of_the_layout(
    tmp_path: Path, shape: tuple[int, ...], layout: str, hint: str
) -> None:
    path = tmp_path / "series.npz"
    x, y = np.zeros((12, *shape), np.float32), np.arange(12) % 3
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    config = CONFIG.replace(**{"data.name": str(path), "data.layout": layout})
    with pytest.raises(FedsimError, match=f"as its data are{hint}\\.$"):
        fedsim.run(config, model=nn.Linear(7, 3))


def test_a_named_model_that_cannot_be_copied_is_refused_too() -> None:
    config = CONFIG.replace(**{"model.name": f"{__name__}:weight_normed"})
    with pytest.raises(FedsimError, match=r"the model cannot be copied \(RuntimeError: .*deepcopy"):
        fedsim.run(config)


def weight_normed() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(64, 10))


class Giving(nn.Linear):
    """Gives what is made of logits."""

    def __init__(self, made: Callable[[torch.Tensor], object]) -> None:
        super().__init__(64, 10)
        self.made = made

    def forward(self, x: torch.Tensor) -> Any:
        return self.made(super().forward(x))


class FailsInTraining(nn.Linear):
    """Whose author has forgotten a name."""

    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.droput(x) if self.training else super().forward(x)


@pytest.mark.parametrize("level", ["none", "example"])
@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            Giving(lambda z: (z, z)),
            r"gives tuple for a batch \[B, 64\].*must give one",
        ),
        (Giving(lambda z: {"logits": z}), "the model gives dict for a batch"),
        (Giving(lambda z: z.round().long()), r"gives outputs of torch\.int64; .* real numbers"),
        (Giving(torch.Tensor.detach), "outputs depend on no trained parameter"),
        (Giving(lambda z: z[:1]), r"gives outputs \[1, 10\] for 2 examples; .* some for each"),
        (Giving(lambda z: z[:, :1].squeeze()), r"gives outputs \[\] for one .* \[1\] for one"),
        (FailsInTraining(), rf"AttributeError \('.*'droput'\), at {re.escape(__file__)}:\d+; it"),
    ],
    ids=["tuple", "dict", "classes", "detached", "one-row", "squeezed", "misspelt"],
)
def test_a_model_with_which_no_training_can_begin_is_one_sentence(
    level: str, model: nn.Module, sentence: str, tmp_path: Path
) -> None:
    private = {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}
    config = CONFIG.replace(**private) if level == "example" else CONFIG
    with pytest.raises(FedsimError, match=sentence):
        fedsim.run(config, model=model, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_other_numbers_is_trained_in_those_of_the_config_which_is_said() -> None:
    result = fedsim.run(CONFIG, model=nn.Linear(64, 10, dtype=torch.float64))
    assert result.notes == (
        "The model's parameters of torch.float64 are trained as torch.float32 (model.dtype).",
    )
    exact = CONFIG.replace(**{"model.dtype": "float64"})
    assert not fedsim.run(exact, model=nn.Linear(64, 10, dtype=torch.float64)).notes


def test_a_mapping_is_no_config() -> None:
    with pytest.raises(
        FedsimError, match=r"config is .*'rounds': 1.*an object of fedsim.RunConfig"
    ):
        fedsim.run({"rounds": 1})


class OwnPartition(IID):
    """Deals what it was told to."""

    dealt: Sequence[Any]

    def deal(self, examples: Any, generator: np.random.Generator) -> Sequence[Any]:
        return self.dealt


@pytest.mark.parametrize(
    ("dealt", "sentence"),
    [
        ([[0, 1], [1, 2], [3]], "deals 1 examples twice; each must belong to one client"),
        ([[0, 0], [1], [2]], "deals 1 examples twice"),
        ([[0], [1], [10_000]], "deals the examples 0 to 10000; there are only 0 to 1436"),
        ([[0], [-1], [2]], "deals the examples -1 to 2; there are only 0 to 1436"),
        ([[0.5], [1], [2]], "it must deal whole numbers"),
        ([[0], [1]], "deals examples to 2 clients, and partition.clients = 3"),
    ],
)
def test_a_partition_of_ones_own_deals_each_example_to_one_client(
    dealt: list[list[float]], sentence: str
) -> None:
    partition = OwnPartition(3)
    object.__setattr__(partition, "dealt", [np.array(indices) for indices in dealt])
    with pytest.raises(FedsimError, match=sentence):
        fedsim.run(CONFIG, partition=partition)


@pytest.mark.parametrize("weighting", ["num-examples", "uniform"])
def test_a_model_that_diverges_past_what_can_be_summed_is_said_to_have_diverged(
    weighting: str,
) -> None:
    config = CONFIG.replace(
        **{"client.lr": 1e30, "rounds": 3, "mechanism.weighting": weighting, "evaluate.every": 0}
    )
    with pytest.raises(RunFailedError, match=r"non-finite.*client.lr, server.lr or another"):
        fedsim.run(config)


def made(x=(40, 4), y=40, test=(10, 4), classes=3, **more):
    def split(shape, count, **columns):
        return Split(torch.randn(*shape), torch.arange(count) % 3, **columns)

    return Dataset("mine", split(x, y, **more), split(test, test[0]), num_classes=classes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"y": 30}, "y of a Split has 30 entries; it must have one for each of the 40"),
        ({"test": (10, 6)}, r"mine has x of shape \[40, 4\] for training and \[10, 6\]"),
        ({"classes": 2}, "the label 2 in y_train; labels must be below 2"),
        ({"classes": 0}, "does not say how many classes"),
        ({"test": (0, 4)}, "evaluate.every = 1; it must be 0, since mine has no test examples"),
        ({"columns": {"owner": [1, 2] * 20}}, "'owner'.* of a Split is list; it must be a NumPy"),
        ({"columns": {"owner": np.arange(4)}}, "owner of a Split has 4 entries"),
        ({"mask": np.ones(40, dtype=bool)}, "mask of a Split is ndarray; it must be a torch.Tens"),
    ],
)
def test_a_data_set_that_was_put_together_wrongly_is_one_sentence(
    settings: dict[str, Any], words: str
) -> None:
    config = RunConfig.from_overrides(["rounds=1", "partition.clients=4"])
    with pytest.raises(FedsimError, match=words):
        fedsim.run(config, data=made(**settings))
    assert fedsim.run(config, data=made()).ended == "finished"


@pytest.mark.parametrize(
    ("objects", "missing"),
    [
        ({"model": nn.Linear(64, 10)}, "model="),
        ({"partition": IID(3, seed=5), "strategy": FedAdam(eta=0.1)}, "partition= and strategy="),
    ],
    ids=["model", "two"],
)
def test_the_config_of_a_run_with_objects_is_no_other_runs(
    objects: dict[str, Any], missing: str, tmp_path: Path
) -> None:
    fedsim.run(CONFIG, out=tmp_path / "run", **objects)
    again = RunConfig.load(tmp_path / "run" / "config.toml")
    for flags in ({}, {"out": tmp_path / "again"}, {"out": tmp_path / "run", "resume": True}):
        with pytest.raises(FedsimError, match=f"was given {missing} from Python, which its tables"):
            fedsim.run(again, **flags)
    assert not (tmp_path / "again").exists()
    fedsim.run(again, out=tmp_path / "again", **objects)
    assert RunConfig.load(tmp_path / "again" / "config.toml") == again
    fedsim.run(again, out=tmp_path / "run", resume=True, **objects)
    fedsim.run(again.replace(objects=""), out=tmp_path / "plain")
    assert "objects" not in (tmp_path / "plain" / "config.toml").read_text()


def test_a_run_with_a_strategy_is_evaluated_on_its_own_data(tmp_path: Path) -> None:
    fedsim.run(CONFIG, out=tmp_path / "run", strategy=FedAdam(eta=0.1))
    saved = fedsim.load(tmp_path / "run")
    assert saved.evaluate()["loss"] == pytest.approx(saved.metrics[-1]["test-loss"])


def numbers(count: int) -> Dataset:
    split = Split(torch.zeros(count, 5), torch.zeros(count))
    return Dataset("numbers", split, split)


def test_what_is_known_of_objects_tells_them_apart_and_seeds_do_not() -> None:
    def mark(**objects: Any) -> str:
        return ObjectOverrides(**objects).mark(numbers(4))

    assert mark() == ""
    assert mark(model=nn.Linear(64, 10)) == mark(model=nn.Linear(64, 10))
    assert mark(model=nn.Linear(64, 10)) != mark(model=nn.Linear(64, 10, bias=False))
    assert mark(strategy=FedAdam(eta=0.1)) != mark(strategy=FedAdam(eta=0.2))
    assert objects_in(mark(model=nn.Tanh(), strategy=FedAdam())) == ["model", "strategy"]


def test_what_a_config_says_of_data_tells_nothing_of_how_many_examples_there_are() -> None:
    one, other = (ObjectOverrides(data=data).mark(data) for data in (numbers(30), numbers(31)))
    assert one == other != ""


def test_a_mark_that_no_run_writes_is_refused() -> None:
    with pytest.raises(FedsimError, match="objects = 'modell=x'; it must be as written by a run"):
        CONFIG.replace(objects="modell=x")


def test_an_interrupted_run_on_other_data_is_not_taken_for_one_on_what_its_tables_name(
    tmp_path: Path,
) -> None:
    x, y = np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32), np.arange(30) % 3
    data = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    fedsim.run(CONFIG, data=data, out=tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    saved = fedsim.load(tmp_path / "run")
    with pytest.raises(FedsimError, match="was trained from an object, data="):
        saved.evaluate()
    with pytest.raises(FedsimError, match="was interrupted and was trained from an object, data="):
        saved.predict(x)
