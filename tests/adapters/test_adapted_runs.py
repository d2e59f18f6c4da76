from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from killed_runs import killed_in
from safetensors.torch import load_file
from slow_cases import slow_but
from tensor_bytes import same_bytes
from torch import Tensor, nn

import fedsim
from fedsim import RunConfig
from fedsim.adapters import LoRA
from fedsim.datasets import Dataset
from fedsim.errors import FedsimError
from fedsim.federation.arrays import tensors
from fedsim.models import converted
from fedsim.runs.export import export, export_adapter
from fedsim.runs.resolve import resolve

COMMON = [
    "name=adapted", "seed=3", "rounds=4", "partition.clients=6", "model.name=mlp",
    "data.train=:180", "data.test=:90", "client.steps=3",
    "model.widths=32,32", "client.lr=0.05", "adapter.name=lora", "adapter.rank=4",
    "adapter.alpha=8.0", "adapter.targets=fc1,fc2", "engine.device=cpu", "checkpoint.every=1",
]  # fmt: skip
CLIENTS = ["mechanism.name=clipping", "mechanism.clip-norm=0.2", "noise.multiplier=0.5"]
EXAMPLES = ["client.mechanism.name=clipping", "client.noise.multiplier=0.8"]
TRAINED = {"both": "lora_A lora_B", "frozen-a": "lora_B"}
FACTORS = tuple(TRAINED)


def config_of(*others: str) -> RunConfig:
    return RunConfig.from_overrides([*COMMON, *others])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return {*one} == {*other} and all(same_bytes(one[k], other[k]) for k in one)


@pytest.mark.spanning
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("private", [[], CLIENTS, EXAMPLES, [*CLIENTS, *EXAMPLES]])
def test_what_is_to_move_moves_and_nothing_else(
    tmp_path: Path, factors: str, private: list[str]
) -> None:
    config = config_of(f"adapter.factors={factors}", "model.trainable=fc3.bias", *private)
    start = resolve(config).model.state_dict()
    start = {name: value.clone() for name, value in start.items()}
    result = fedsim.run(config, out=tmp_path / "run")
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert {*saved} == {*start}
    expected = {"fc3.bias"} | {f"fc{k}.lora_B.weight" for k in (1, 2)}
    expected |= {f"fc{k}.lora_A.weight" for k in (1, 2)} if factors != "frozen-a" else set()
    assert {name for name in start if not torch.equal(saved[name], start[name])} == expected
    assert {*tensors(result.arrays)} == expected


def test_the_release_is_of_the_adapters_entries_alone() -> None:
    resolved = resolve(config_of("adapter.factors=frozen-a", *CLIENTS))
    assert resolved.trainer.row_layout.d == 2 * 32 * 4


@pytest.mark.parametrize("factors", FACTORS)
def test_examples_are_private_by_structure(factors: str) -> None:
    trainer = resolve(config_of(f"adapter.factors={factors}", *EXAMPLES)).trainer
    assert trainer.rounds.releases._rows == "by structure"


@pytest.mark.spanning
@pytest.mark.parametrize("level", [[], CLIENTS, EXAMPLES])
@pytest.mark.parametrize("factors", FACTORS)
def test_block_size_workers_and_placement_of_clients_change_no_byte(
    factors: str, level: list[str]
) -> None:
    config = config_of(f"adapter.factors={factors}", "rounds=2", *level)
    expected = tensors(fedsim.run(config).arrays)
    for change in ({"client.block-size": 3}, {"engine.workers": 2}):
        assert same(tensors(fedsim.run(config.replace(**change)).arrays), expected)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "simulation", "deployment"])
@pytest.mark.parametrize("factors", FACTORS)
def test_all_engines_give_the_same_bytes(factors: str, engine: str) -> None:
    others = ["noise.entropy=config", "rounds=2", "partition.clients=3"]
    config = config_of(f"adapter.factors={factors}", *others, *CLIENTS)
    expected = tensors(fedsim.run(config).arrays)
    assert same(tensors(fedsim.run(config.replace(**{"engine.name": engine})).arrays), expected)


@pytest.mark.spanning
@pytest.mark.parametrize("level", [[], CLIENTS, EXAMPLES])
@pytest.mark.parametrize("factors", FACTORS)
def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(
    tmp_path: Path, factors: str, level: list[str]
) -> None:
    config = config_of(f"adapter.factors={factors}", "server.optimizer=adam", *level)
    fedsim.run(config, out=tmp_path / "whole")
    for round_number in (2, 3):
        with killed_in(round_number):
            fedsim.run(config, out=tmp_path / "killed", resume=True)
    fedsim.run(config, out=tmp_path / "killed", resume=True)
    names = ("model.safetensors", "ledger.jsonl") if level == CLIENTS else ("model.safetensors",)
    for name in names:
        one, other = (load_file(tmp_path / d / "model.safetensors") for d in ("whole", "killed"))
        assert same(one, other), name
    assert fedsim.load(tmp_path / "killed").metrics[-1].get("epsilon") == fedsim.load(
        tmp_path / "whole"
    ).metrics[-1].get("epsilon")
    if level == EXAMPLES:  # each round of each client is charged once
        one, other = (fedsim.load(tmp_path / d).example_privacy for d in ("whole", "killed"))
        assert one is not None
        assert other is not None
        assert one.cost.epsilon == other.cost.epsilon


class Runs:
    """A finished run, and what may be done with it in any order."""

    def __init__(self, place: Path, factors: str) -> None:
        self.place, self.factors = place, factors
        self.config = config_of(f"adapter.factors={factors}", "model.trainable=fc3.*", "rounds=2")
        self.x = torch.rand(6, 64, generator=torch.Generator().manual_seed(0))
        fedsim.run(self.config, out=place / "run")
        self.rounds, self.count = 2, 0
        self.start = {k: v.clone() for k, v in resolve(self.config).model.state_dict().items()}

    def saved(self, **options: bool) -> fedsim.runs.saved.SavedRun:
        return fedsim.load(self.place / "run", **options)

    def new(self, suffix: str) -> Path:
        self.count += 1
        return self.place / f"{self.count}{suffix}"

    def evaluate(self) -> None:
        assert self.saved().evaluate()["loss"] == pytest.approx(
            self.saved().metrics[-1]["test-loss"], rel=1e-6
        )

    def predict(self) -> None:
        assert self.saved().predict(self.x).shape == (6,)

    def merge(self) -> None:
        merged, adapted = self.saved(merge=True), self.saved()
        torch.testing.assert_close(merged.model(self.x), adapted.model(self.x), rtol=0, atol=1e-5)
        assert not [name for name in merged.trained.state_dict() if "lora" in name]

    def safetensors(self) -> None:
        path = self.new(".safetensors")
        path.write_bytes(export(self.saved(), "safetensors"))
        assert same(load_file(path), self.saved().weights)

    def torchscript(self) -> None:
        path = self.new(".pt")
        path.write_bytes(export(self.saved(merge=True), "torchscript"))
        expected = self.saved().model(self.x)
        torch.testing.assert_close(torch.jit.load(path)(self.x), expected, rtol=0, atol=1e-5)

    def resume(self) -> None:
        self.rounds += 1
        config = self.config.replace(rounds=self.rounds)
        fedsim.run(config, out=self.place / "run", resume=True)
        fresh = fedsim.run(config, out=self.new(""))
        assert same(tensors(fresh.arrays), self.trained())

    def continue_(self) -> None:
        """A new run from the exported adapter starts where this one ended."""
        folder = export_adapter(self.saved(), self.new("-adapter"))
        config = self.config.replace(**{"adapter.weights": str(folder)})
        start = resolve(config).model.state_dict()
        assert same(dict(start), self.saved().weights | {}), "another start"
        out = self.new("")
        fedsim.run(config, out=out)
        shutil.rmtree(folder)
        assert fedsim.load(out).predict(self.x).shape == (6,)

    def trained(self) -> dict[str, Tensor]:
        model = self.saved().trained
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def check(self) -> None:
        """Frozen weights are where they were, adapters are not, and what is read is the file."""
        weights = self.saved().weights
        moves = [n for n in weights if n.startswith("fc3") or "lora_B" in n]
        moves += [n for n in weights if "lora_A" in n and self.factors != "frozen-a"]
        assert {n for n in weights if not torch.equal(weights[n], self.start[n])} == {*moves}
        assert same(dict(self.saved().trained.state_dict()), weights)


@pytest.mark.parametrize(
    ("factors", "orders"),
    slow_but(1, [("both", 5), *((factors, 20) for factors in FACTORS)]),
)
def test_any_order_of_calls(tmp_path: Path, factors: str, orders: int) -> None:
    calls: list[Callable[[Runs], None]] = [
        Runs.evaluate, Runs.predict, Runs.merge, Runs.safetensors, Runs.torchscript,
        Runs.continue_,
    ]  # fmt: skip
    draws = random.Random(7)
    runs = Runs(tmp_path, factors)
    for order in range(orders):
        draws.shuffle(calls)
        for call in calls if order % 5 == 0 else [c for c in calls if c is not Runs.continue_]:
            call(runs)
            runs.check()
        if order in (4, 9, 14):
            runs.resume()
            runs.check()


class Plain(nn.Module):
    """A model of a user's own, for the plain loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


def made_up() -> Dataset:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 12)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(np.int64) + (x[:, 3] > 1)
    return Dataset.from_arrays("made-up", {"x": x, "y": y}, {"x": x[:9], "y": y[:9]}, classes=3)


def by_hand(
    model: Plain, lora: LoRA, x: Tensor, y: Tensor, lr: float, trained: str
) -> dict[str, Tensor]:
    """One step of LoRA on all examples, from the formula alone: gradients of A and B by hand."""
    a, b = (model.first.get_submodule(f"lora_{f}").weight.detach().double() for f in "AB")
    w, bias = (p.detach().double() for p in model.first.base_layer.parameters())
    v, c = (p.detach().double() for p in model.second.parameters())
    x, scaling = x.double(), lora.alpha / lora.rank
    h = torch.tanh(x @ (w + scaling * b @ a).T + bias)
    logits = h @ v.T + c
    delta = (logits.softmax(-1) - nn.functional.one_hot(y, 3).double()) / len(x)
    before = (delta @ v) * (1 - h.square())
    gradient = before.T @ x  # of the weight of the first layer
    steps = {"lora_B": scaling * gradient @ a.T, "lora_A": scaling * b.T @ gradient}
    values = {"lora_A": a, "lora_B": b}
    return {
        f"first.{name}.weight": value - lr * steps[name] * (name in trained)
        for name, value in values.items()
    }


@pytest.mark.parametrize("factors", FACTORS)
def test_updates_are_those_of_a_loop_written_by_hand(factors: str) -> None:
    """Two rounds of one step on all examples of one client, in float64, by the chain rule."""
    torch.manual_seed(2)
    model, data = Plain(), made_up()
    lora = LoRA(rank=3, alpha=6.0, targets="first", factors=factors)
    config = RunConfig.from_overrides(
        ["seed=4", "rounds=3", "partition.clients=1", "client.batch-size=0", "client.lr=0.4",
         "adapter.name=lora", "adapter.rank=3", "adapter.alpha=6.0", "adapter.targets=first",
         f"adapter.factors={factors}", "model.dtype=float64", "engine.device=cpu"]
    )  # fmt: skip
    result = fedsim.run(config, model=model, data=data)
    expected = lora(Plain().double(), 4)
    expected.load_state_dict(
        {
            k.replace("first.", "first.base_layer."): v.double()
            for k, v in model.state_dict().items()
        },
        strict=False,
    )
    everything = data.train
    for _ in range(3):
        values = by_hand(expected, lora, everything.x, everything.y, 0.4, TRAINED[factors])
        expected.load_state_dict(values, strict=False)
    state = expected.state_dict()
    assert len(tensors(result.arrays)) == (1 if factors == "frozen-a" else 2)
    for name, value in tensors(result.arrays).items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=1e-10)
    assert state["first.lora_B.weight"].abs().max() > 0.01


class HiddenLayers(Plain):
    """Calls its layers by a list that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self._layers = [self.first, self.act]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            x = layer(x)
        return self.second(x)


class ByWeight(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(x @ self.first.weight.T))


@pytest.mark.parametrize(
    ("make", "changes", "sentence"),
    [
        (HiddenLayers, [], "lets first.lora_A.weight be trained, but the outputs do not depend"),
        (ByWeight, [], "'LowRankLinear' object has no attribute 'weight'"),
        (Plain, ["model.trainable=first.*"], "names first.weight, which adapter.targets adapts"),
        (Plain, ["adapter.rank=4"], "adapter.rank = 4; it must be at most 3"),
        (Plain, ["adapter.weights=missing"], "has no readable adapter_config.json"),
        (
            Plain,
            ["adapter.factors=alternating"],
            "adapter.factors = 'alternating'; it must be 'both' or 'frozen-a'",
        ),
    ],
)
def test_what_goes_wrong_silently_elsewhere_is_one_sentence(
    tmp_path: Path, make: type[nn.Module], changes: list[str], sentence: str
) -> None:
    out = tmp_path / "run"
    settings = ["partition.clients=2", "adapter.name=lora", "adapter.rank=2", *changes]
    with pytest.raises(FedsimError) as raised:
        fedsim.run(RunConfig.from_overrides(settings), model=make(), data=made_up(), out=out)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not out.exists()


def test_keys_of_no_adapter_are_refused() -> None:
    with pytest.raises(FedsimError, match=r"adapter\.rank = 4 has no effect with adapter\.name"):
        RunConfig.from_overrides(["adapter.rank=4"])
    with pytest.raises(FedsimError, match=r"adapter\.weights = 'x'; it must be unset while"):
        RunConfig.from_overrides(["adapter.weights=x"])
    with pytest.raises(FedsimError, match=r"adapter\.name = 'dora'; did you mean 'lora'"):
        RunConfig.from_overrides(["adapter.name=dora"])


def test_clients_may_keep_a_factor_to_themselves() -> None:
    config = config_of(
        "model.personal=*.lora_B.weight",
        "client.state=client",
        "evaluate.every=0",
        "evaluate.clients-every=1",
    )
    result = fedsim.run(config)
    assert {*tensors(result.arrays)} == {"fc1.lora_A.weight", "fc2.lora_A.weight"}


HALF = ["model.dtype=bfloat16"]


@pytest.mark.parametrize("private", [[], CLIENTS, EXAMPLES])
def test_a_frozen_model_in_bfloat16_trains_as_in_float32_but_for_its_rounding(
    tmp_path: Path, private: list[str]
) -> None:
    both = ["evaluate.every=0", "rounds=2", *private]
    half = fedsim.run(config_of(*both, *HALF), out=tmp_path / "half")
    again = fedsim.run(
        config_of(*both, *HALF, "client.block-size=2", "engine.workers=2"), out=tmp_path / "again"
    )
    assert same(tensors(half.arrays), tensors(again.arrays))
    whole = load_file(tmp_path / "half" / "model.safetensors")
    trained = {*tensors(half.arrays)}
    assert {n for n, value in whole.items() if value.dtype == torch.float32} == trained
    assert {whole[n].dtype for n in whole.keys() - trained} == {torch.bfloat16}
    x = resolve(config_of()).trainer.data.x[:20]
    saved = fedsim.load(tmp_path / "half")
    outputs = saved.model(x)
    assert outputs.dtype == torch.float32
    if not private:  # the digest, which keys noise, has the dtype
        full = fedsim.run(config_of(*both), out=tmp_path / "full")
        for name, values in tensors(full.arrays).items():
            torch.testing.assert_close(tensors(half.arrays)[name], values, atol=2e-3, rtol=0.05)
        torch.testing.assert_close(
            outputs, fedsim.load(tmp_path / "full").model(x), atol=0.05, rtol=0
        )
    merged = fedsim.load(tmp_path / "half", merge=True).model(x)
    torch.testing.assert_close(merged, outputs, atol=0.05, rtol=0)


@pytest.mark.parametrize(
    "others",
    [
        ["adapter.name=none", *[f"adapter.{k}=" for k in ("rank", "alpha", "targets")]],
        ["model.trainable=fc3.*"],
    ],
)
def test_trained_weights_are_not_kept_in_bfloat16(others: list[str]) -> None:
    with pytest.raises(FedsimError, match=r"model\.dtype = 'bfloat16'; it must be float32 or"):
        config_of(*HALF, *others)


def test_bfloat16_rounds_no_buffer_that_a_model_computes_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("saved", torch.ones(1))
    model.register_buffer("computed", torch.tensor([257.0]), persistent=False)
    converted(model, torch.bfloat16)
    assert {str(p.dtype) for p in (*model.parameters(), model.saved)} == {"torch.bfloat16"}
    assert model.computed.item() == 257.0
