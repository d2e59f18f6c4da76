"""An adapter in peft's files: by their names and numbers, and (slow) by peft itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import fedsim
from fedsim import RunConfig
from fedsim.adapters import LoRA, adapted
from fedsim.cli.app import app
from fedsim.errors import FedsimError
from fedsim.federation.arrays import tensors

LORA = LoRA(rank=2, alpha=6.0, targets="deep.in,out")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.ModuleDict({"in": nn.Linear(6, 4)})
        self.out = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.out(self.deep["in"](x).tanh()).tanh())


def net(lora: LoRA = LORA, trainable: str = "head.weight", seed: int = 1) -> nn.Module:
    torch.manual_seed(0)
    model = adapted(lora, Net(), seed, trainable)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in LORA.files(net()).items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_names_and_config_are_as_peft_writes_them() -> None:
    model = net()
    files = LORA.files(model)
    found = load(files["adapter_model.safetensors"])
    prefix = "base_model.model."
    layers = [f"{layer}.lora_{factor}.weight" for layer in ("deep.in", "out") for factor in "AB"]
    # All of a module of which a part is trained, as peft's modules_to_save.
    assert {*found} == {prefix + name for name in (*layers, "head.weight", "head.bias")}
    state = model.state_dict()
    assert all(torch.equal(found[prefix + n], state[n]) for n in (*layers, "head.weight"))
    config = json.loads(files["adapter_config.json"])
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"], config["bias"]) == (2, 6, "none")
    assert config["target_modules"] == ["deep.in", "out"]
    assert config["modules_to_save"] == ["head"]


def test_a_name_at_which_another_ends_is_written_as_a_pattern() -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict({"out": nn.Linear(2, 2)}), "out": nn.Linear(2, 2)})
    files = LoRA(rank=1, targets="out").files(LoRA(rank=1, targets="out")(model, 1))
    pattern = json.loads(files["adapter_config.json"])["target_modules"]
    assert [n for n in ("out", "a.out") if re.fullmatch(pattern, n)] == ["out"]


def test_what_is_read_is_what_was_written(folder: Path) -> None:
    fresh = adapted(LORA, Net(), 9, "head.weight", str(folder))
    expected, state = net().state_dict(), fresh.state_dict()
    trained = [n for n, p in fresh.named_parameters() if p.requires_grad]
    assert len(trained) == 5
    assert all(torch.equal(state[name], expected[name]) for name in (*trained, "head.bias"))


@pytest.mark.parametrize(
    ("lora", "trainable", "sentence"),
    [
        (LoRA(rank=3, alpha=6.0, targets="deep.in,out"), "head.weight", "has r = 2; it must be"),
        (LoRA(rank=2, alpha=2.0, targets="deep.in,out"), "head.weight", "has lora_alpha = 6"),
        (LoRA(rank=2, alpha=6.0, targets="out"), "head.weight", "holds base_model.model.deep"),
        (LoRA(rank=2, alpha=6.0), "", "lacks base_model.model.head.lora_A.weight"),
        (LORA, "", "holds base_model.model.head."),
    ],
)
def test_an_adapter_of_another_rank_or_model_is_refused_and_nothing_is_loaded(
    folder: Path, lora: LoRA, trainable: str, sentence: str
) -> None:
    model = adapted(lora, Net(), 1, trainable)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(FedsimError, match=re.escape(sentence)) as raised:
        lora.load(model, folder)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peft_type": "LOHA"}, "has peft_type = 'LOHA'; it must be 'LORA'"),
        ({"use_rslora": True}, "has use_rslora = True; it must be unset"),
        ({"use_dora": True}, "has use_dora = True; it must be unset"),
        ({"rank_pattern": {"out": 1}}, "has rank_pattern = {'out': 1}; it must be unset"),
        ({"bias": "all"}, "has bias = 'all'; it must be 'none'"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused(folder, change, sentence) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FedsimError, match=re.escape(sentence)):
        LORA.load(net(), folder)


def test_a_buffer_of_whole_numbers_is_written_and_read(tmp_path: Path) -> None:
    model, fresh = Net(), Net()
    model.head.register_buffer("places", torch.arange(3))
    fresh.head.register_buffer("places", torch.zeros(3, dtype=torch.int64))
    for name, content in LORA.files(adapted(LORA, model, 1, "head.weight")).items():
        (tmp_path / name).write_bytes(content)
    adapted(LORA, fresh, 9, "head.weight", str(tmp_path))
    assert fresh.head.places.tolist() == [0, 1, 2]


def test_damaged_files_are_refused(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    good = load_file(weights)
    name = "base_model.model.out.lora_A.weight"
    for bad, sentence in (
        (torch.full_like(good[name], float("nan")), "NaN, infinite or too large numbers in base"),
        (good[name].T.contiguous(), "[4, 2] for base_model.model.out.lora_A.weight; it must be"),
        (good[name].long(), "torch.int64 [2, 4] for base_model"),
    ):
        save_file({**good, name: bad}, weights)
        with pytest.raises(FedsimError, match=re.escape(sentence)):
            LORA.load(net(), folder)
    weights.write_bytes(b"no tensors")
    with pytest.raises(FedsimError, match="no readable adapter_model"):
        LORA.load(net(), folder)
    (folder / "adapter_config.json").write_text("[1]")
    with pytest.raises(FedsimError, match="has no table in adapter_config"):
        LORA.load(net(), folder)


class Loose(Net):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(4))
        self.overhead, self.ad = nn.Linear(1, 1), nn.Linear(1, 1)
        self.deep.register_parameter("scale", nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize(
    ("trainable", "name", "why"),
    [
        ("place", "place", "it is in no module"),
        ("head.*", "head.weight", "'overhead' ends alike"),
        ("overhead.*,ad.*", "ad.weight", "'head' ends alike"),
        ("deep.scale", "deep.scale", "'deep.in' in its module is adapted"),
    ],
)
def test_what_peft_cannot_save_is_refused(trainable: str, name: str, why: str) -> None:
    with pytest.raises(FedsimError, match=f"names {name}, which peft cannot save: {why}"):
        LORA.files(adapted(LORA, Loose(), 1, trainable))


RUN = ["rounds=1", "partition.clients=4", "client.lr=0.2", "model.name=mlp", "model.widths=16",
       "adapter.name=lora", "adapter.rank=2", "engine.device=cpu"]  # fmt: skip


def test_the_command_writes_the_folder_and_refuses_what_has_none(tmp_path: Path) -> None:
    run, plain = tmp_path / "run", tmp_path / "plain"
    fedsim.run(RunConfig.from_overrides(RUN), out=run)
    fedsim.run(RunConfig.from_overrides(["rounds=1", "partition.clients=4"]), out=plain)
    merged = tmp_path / "merged.safetensors"
    for words in (
        [str(run), "--to", "peft"],
        [str(run), "--to", "safetensors", "--merge", "--out", str(merged)],
    ):
        assert CliRunner().invoke(app, ["export", *words]).exit_code == 0
    files = {path.name for path in (tmp_path / "run-adapter").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    assert {*load_file(merged)} == {f"fc{k}.{part}" for k in (1, 2) for part in ("weight", "bias")}
    for words, sentence in (
        ([str(run), "--to", "peft"], "already exists"),
        ([str(plain), "--to", "peft"], "has no adapter"),
        ([str(plain), "--to", "safetensors", "--merge"], "has no adapter"),
        ([str(run), "--to", "peft", "--merge"], "merges its adapter"),
        ([str(run), "--public", "--merge"], "--merge is for --to FORMAT"),
    ):
        error = CliRunner().invoke(app, ["export", *words]).exception
        assert sentence in str(error)


BY_PEFT = """
import json, sys
import peft, torch
from torch import nn
from safetensors.torch import load_file, save_file

place = sys.argv[1]
given = torch.load(f"{place}/given.pt", weights_only=True)

def base():
    model = nn.Sequential()
    model.add_module("first", nn.Linear(12, 8))
    model.add_module("act", nn.Tanh())
    model.add_module("second", nn.Linear(8, 3))
    model.load_state_dict(given["base"])
    return model

# What fedsim exported, as peft loads it.
model = peft.PeftModel.from_pretrained(base(), f"{place}/adapter").eval()
outputs = model(given["x"]).detach()
model.save_pretrained(f"{place}/again")

# A plain loop of peft's from the same start.
updates = {}
for factors, trains in (("both", "lora_"), ("frozen-a", "lora_B")):
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["first", "second"])
    trained = peft.get_peft_model(base(), config)
    peft.set_peft_model_state_dict(trained, load_file(f"{place}/start.safetensors"))
    parameters = dict(trained.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(trains in name)
    for _ in range(3):
        optimizer = torch.optim.SGD([p for p in parameters.values() if p.requires_grad], lr=0.4)
        loss = nn.functional.cross_entropy(trained(given["x"]), given["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = peft.get_peft_model_state_dict(trained)
    for name, value in state.items():
        updates[f"{factors}/{name.removeprefix('base_model.model.')}"] = value.contiguous()
save_file({"outputs": outputs, **updates}, f"{place}/by-peft.safetensors")
"""


@pytest.mark.slow
def test_peft_loads_what_is_exported_and_its_plain_loop_gives_the_same_updates(tmp_path) -> None:
    """peft in an environment of its own, which sees this one's torch."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "peft"], check=True, timeout=1500)

    from test_adapted_runs import Plain, made_up

    torch.manual_seed(2)
    model, data = Plain(), made_up()
    common = ["seed=4", "rounds=3", "partition.clients=1", "client.batch-size=0", "client.lr=0.4",
              "adapter.name=lora", "adapter.rank=3", "adapter.alpha=6.0",
              "engine.device=cpu"]  # fmt: skip
    expected = {}
    for factors in ("both", "frozen-a"):
        config = RunConfig.from_overrides([*common, f"adapter.factors={factors}"])
        expected[factors] = tensors(fedsim.run(config, model=model, data=data).arrays)
    lora = LoRA(rank=3, alpha=6.0)
    start = Plain()
    start.load_state_dict(model.state_dict())
    start = lora(start, 4)
    (tmp_path / "start.safetensors").write_bytes(lora.files(start)["adapter_model.safetensors"])
    start.load_state_dict(expected["both"], strict=False)
    (tmp_path / "adapter").mkdir()
    for name, content in lora.files(start).items():
        (tmp_path / "adapter" / name).write_bytes(content)
    given = {"base": model.state_dict(), "x": data.train.x, "y": data.train.y}
    torch.save(given, tmp_path / "given.pt")
    subprocess.run([python, "-c", BY_PEFT, tmp_path], check=True, timeout=600)

    by_peft = load_file(tmp_path / "by-peft.safetensors")
    torch.testing.assert_close(by_peft["outputs"], start(data.train.x).detach(), rtol=0, atol=1e-6)
    for factors, arrays in expected.items():
        for name, value in arrays.items():
            torch.testing.assert_close(value, by_peft[f"{factors}/{name}"], rtol=0, atol=1e-5)
    # What peft saves of it has the same tensors under the same names, and reads back.
    once, again = (
        load_file(tmp_path / n / "adapter_model.safetensors") for n in ("adapter", "again")
    )
    assert {*once} == {*again}
    assert all(torch.equal(once[name], again[name]) for name in once)
    lora.load(start, tmp_path / "again")
