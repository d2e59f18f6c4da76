from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

import fedsim
from fedsim import Callback, RunConfig
from fedsim.cohorts import FullCohort
from fedsim.errors import FedsimError
from fedsim.federation.arrays import tensors
from fedsim.mechanisms import AdaClip, Clipping, Normalization
from fedsim.rows.layout import Alternation, Layout
from fedsim.runs.resolve import resolve
from fedsim.strategies import ClientTraining, DPFedAvg

COMMON = [
    "rounds=4", "partition.clients=5", "data.train=:100", "data.test=:30", "client.steps=2",
    "client.lr=0.05", "model.name=mlp", "model.widths=16", "adapter.name=lora", "adapter.rank=2",
    "adapter.targets=fc1", "adapter.factors=alternating", "engine.device=cpu",
    "model.trainable=fc2.bias",
]  # fmt: skip
CLIENTS = ["mechanism.name=clipping", "mechanism.clip-norm=0.1", "noise.multiplier=0.5"]


class Rounds(Callback):
    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_round(self, status) -> None:
        self.weights.append({k: v.clone() for k, v in tensors(status.arrays).items()})


@pytest.mark.parametrize(
    "others",
    [
        [],
        CLIENTS,
        [*CLIENTS, "server.optimizer=adam"],
        [*CLIENTS, "noise.placement=client", "server.momentum=0.9"],
        ["client.mechanism.name=clipping", "client.noise.multiplier=1.0"],
        ["client.name=adam", "client.lr=0.01", "client.weight-decay=0.1"],
    ],
)
def test_in_each_round_one_factor_moves_and_the_other_keeps_its_bytes(others) -> None:
    watch = Rounds()
    config = RunConfig.of([*COMMON, *others])
    fedsim.run(config, callbacks=[watch])
    assert len(watch.weights) == 5  # before the first round, too
    for number, (before, after) in enumerate(pairwise(watch.weights), 1):
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        factor = "fc1.lora_B.weight" if number % 2 else "fc1.lora_A.weight"
        assert moved == {factor, "fc2.bias"}, number


def test_rows_are_those_of_a_model_whose_other_factor_is_frozen() -> None:
    alternating = resolve(RunConfig.of(COMMON)).trainer
    frozen = resolve(RunConfig.of([*COMMON, "adapter.factors=frozen-a"])).trainer
    ids = np.arange(5)
    (block,) = alternating.train(alternating.initial(), ids, 1)
    (expected,) = frozen.train(frozen.initial(), ids, 1)
    for name, rows in alternating.layout.unflatten(block.rows).items():
        if name.endswith("lora_A.weight"):
            assert not rows.any()
        else:
            assert torch.equal(rows, frozen.layout.unflatten(expected.rows)[name])


def test_clients_that_were_sent_different_models_train_from_their_own() -> None:
    trainer = resolve(RunConfig.of(COMMON)).trainer
    ids = np.array([3, 0, 4])
    generator = torch.Generator().manual_seed(1)
    one, two = trainer.initial() + torch.randn(2, trainer.layout.d, generator=generator) / 10
    together = trainer.fit(torch.stack([one, two, one]), ids, 2).theta
    for row, (client, vector) in enumerate(zip(ids, (one, two, one), strict=True)):
        alone = trainer.fit(vector, np.array([client]), 2).theta
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=0)
    (block,) = trainer.train(one, ids[[0, 2]], 2)
    assert torch.equal(together[[0, 2]] - one, block.rows)


def test_columns_of_a_part_and_those_that_always_train() -> None:
    layout = Layout.of({"a": torch.zeros(2), "b": torch.zeros(3), "head": torch.zeros(1)})
    turns = Alternation((("b",), ("a",)))
    assert turns.trained(layout, turns.part_of(1)).tolist() == [2, 3, 4, 5]
    assert turns.trained(layout, turns.part_of(2)).tolist() == [0, 1, 5]
    nothing, ones = torch.zeros(6), torch.ones(6)
    # Not by a product: what is dropped may be anything.
    ones[0] = torch.nan
    assert turns.replaced(ones, nothing, layout, 3).tolist() == [0, 0, 1, 1, 1, 1]
    with pytest.raises(FedsimError, match="'a' is to be trained in turns, and is in no row"):
        turns.trained(Layout.of({"b": torch.zeros(3)}), 0)
    for parts in ((("a",),), (("a",), ("a",)), (("a",), ())):
        with pytest.raises(FedsimError, match="two or more parts without common names"):
            Alternation(parts)


@pytest.mark.parametrize(
    ("mechanism", "refused"), [(Clipping(), ""), (Normalization(), ""), (AdaClip(), "more than a")]
)
def test_only_bounds_by_the_norm_go_with_parts_that_rest(mechanism, refused: str) -> None:
    def make() -> DPFedAvg:
        return DPFedAvg(
            mechanism=mechanism,
            cohort=FullCohort(population=4),
            noise_multiplier=1.0,
            clients=ClientTraining(alternation=Alternation((("b",), ("a",)))),
        )

    if refused:
        with pytest.raises(FedsimError, match=re.escape(refused)):
            make()
    else:
        assert make().alternation is not None
