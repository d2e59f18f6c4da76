"""Models of transformers: from a folder or a callable, their logits, and their own LoRA layers.

Skipped where transformers is not installed.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedsim
from fedsim import RunConfig
from fedsim.adapters import LoRA, adapted
from fedsim.datasets import Dataset
from fedsim.errors import FedsimError
from fedsim.models import build, give_logits, values_of
from fedsim.runs.export import export_adapter

if find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

TOKENS, LENGTH, CLIENTS = 23, 7, 6
COMMON = [
    "seed=3", "rounds=2", f"partition.clients={CLIENTS}", "partition.name=by-owner",
    "client.batch-size=4", "client.steps=2", "client.lr=0.1", "adapter.name=lora",
    "adapter.rank=2", "engine.device=cpu", "task.metrics=perplexity", "evaluate.every=0",
]  # fmt: skip
LLAMA, GPT2 = "*.q_proj,*.v_proj", "*.c_attn,*.c_fc"
PRIVATE = {
    "clients": ["mechanism.name=clipping", "mechanism.clip-norm=0.2", "noise.multiplier=0.5"],
    "examples": ["client.mechanism.name=clipping", "client.noise.multiplier=0.8"],
}


def llama(classes: int = 0) -> nn.Module:
    import transformers  # seconds, which collecting the tests does not wait for

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
        **({"num_labels": classes} if classes else {}),
    )
    kind = "ForSequenceClassification" if classes else "ForCausalLM"
    return getattr(transformers, f"Llama{kind}")(config)


def gpt2() -> nn.Module:
    import transformers

    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        bos_token_id=1, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def texts() -> Dataset:
    """Next tokens of sequences that count upwards, from a start of their owner's."""

    def split(n: int) -> dict[str, np.ndarray]:
        tokens = (np.arange(n)[:, None] * 5 + np.arange(LENGTH + 1)) % TOKENS
        owner = np.array([f"author {k % CLIENTS}" for k in range(n)])
        return {"x": tokens[:, :-1], "y": tokens[:, 1:], "owner": owner}

    return Dataset.from_arrays(
        "texts", split(48), split(12), classes=TOKENS, vocabulary=TOKENS, layout="as-is"
    )


def run(out: Path, *overrides: str, model: nn.Module | None = None) -> dict[str, Tensor]:
    config = RunConfig.from_overrides([*COMMON, *overrides])
    fedsim.run(config, data=texts(), model=model, out=out)
    return load_file(out / "model.safetensors")


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return {*one} == {*other} and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("private", [[], PRIVATE["clients"], PRIVATE["examples"]])
def test_a_folder_gives_the_run_of_the_object_saved_in_it(
    tmp_path: Path, folder: Path, private: list[str]
) -> None:
    targets = f"adapter.targets={LLAMA}"
    by_name = run(tmp_path / "a", f"model.name=hf:{folder}", targets, *private)
    start = llama().state_dict()
    trained = {name for name in by_name if "lora_" in name}
    assert len(trained) == 8
    frozen = {name.replace("base_layer.", ""): by_name[name] for name in {*by_name} - trained}
    assert all(torch.equal(frozen[name], start[name]) for name in frozen)
    assert all(by_name[name].any() for name in trained)
    if not private:  # the digest, which keys noise, has the model's name
        assert equal(by_name, run(tmp_path / "b", targets, model=llama()))


@pytest.mark.parametrize(("model", "targets"), [(llama, LLAMA), (gpt2, GPT2)])
def test_an_adapter_is_the_same_in_peft_and_back(tmp_path: Path, model, targets: str) -> None:
    peft = pytest.importorskip("peft")
    name = f"adapter.targets={targets}"
    ours = run(tmp_path / "run", name, *PRIVATE["clients"], model=model())
    saved = fedsim.load(tmp_path / "run", model=model())
    export_adapter(saved, tmp_path / "adapter")
    x = texts().test.x.long()
    theirs = peft.PeftModel.from_pretrained(model(), str(tmp_path / "adapter"))
    expected = saved.model(x)
    with torch.no_grad():
        assert torch.equal(theirs(x).logits, expected)
    theirs.save_pretrained(tmp_path / "again")  # fan_in_fan_out of GPT-2's layers, for one
    again = adapted(LoRA(rank=2, targets=targets), model(), 9, weights=str(tmp_path / "again"))
    assert all(torch.equal(value, ours[name]) for name, value in values_of(again).items())
    merged = fedsim.load(tmp_path / "run", model=model(), merge=True).model
    whole = theirs.merge_and_unload()
    torch.testing.assert_close(merged(x), whole(x).logits)
    torch.testing.assert_close(merged(x), expected)
    # What `generate` asks for it gets, although training sees logits alone.
    sampling = {"max_new_tokens": 3, "do_sample": False}
    tokens = merged.model.generate(x[:1], **sampling)
    assert tokens.shape[1] > LENGTH
    assert torch.equal(tokens, whole.generate(x[:1], **sampling))


def test_a_transposed_layer_of_gpt2_takes_an_adapter_as_a_linear_layer_does() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    transposed = nn.ModuleDict({"a": Conv1D(5, 3)})  # outputs, inputs
    linear = nn.ModuleDict({"a": nn.Linear(3, 5)})
    with torch.no_grad():
        linear["a"].weight.copy_(transposed["a"].weight.T)
        linear["a"].bias.copy_(transposed["a"].bias)
    models = [adapted(LoRA(rank=2), model, 1) for model in (transposed, linear)]
    for model in models:
        model["a"].lora_B.weight.data = torch.arange(10.0).view(5, 2)
    assert torch.equal(models[0]["a"].lora_A.weight, models[1]["a"].lora_A.weight)
    x = torch.randn(4, 3)
    torch.testing.assert_close(models[0]["a"](x), models[1]["a"](x))
    merged = [LoRA(rank=2).merged(model)["a"].weight for model in models]
    assert torch.equal(merged[0].T, merged[1])
    with pytest.raises(FedsimError, match=r"at most 3, the smaller side of 'a' \(3 inputs, 5 out"):
        adapted(LoRA(rank=4), nn.ModuleDict({"a": Conv1D(5, 3)}), 1)


@pytest.mark.parametrize("private", [[], PRIVATE["examples"]])
def test_checkpointed_layers_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: list[str]
) -> None:
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", counted := Counted())
    common = [f"adapter.targets={LLAMA}", "rounds=1", *private]
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = run(tmp_path / "a", *common, model=model)
    assert counted.calls
    plain = run(tmp_path / "b", *common, model=llama())
    names = [name for name in plain if "lora_" in name]
    assert any(plain[name].any() for name in names)
    for name in names:  # at example level from one example after another, and not in one vmap
        torch.testing.assert_close(checkpointed[name], plain[name], atol=1e-6, rtol=1e-5)
    assert private or equal(plain, checkpointed)


class Counted:
    """torch's checkpoint, with its calls counted; all copies count in one list."""

    calls: list[int]

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, *inputs, **keywords):
        self.calls.append(1)
        return torch.utils.checkpoint.checkpoint(*inputs, **keywords)

    def __deepcopy__(self, memo: object) -> Counted:
        return self


def test_the_key_makes_a_folders_model_checkpoint_its_layers(folder: Path) -> None:
    common = {"input_shape": (LENGTH,), "num_classes": TOKENS, "vocabulary": TOKENS}
    model = build(f"hf:{folder}", **common, gradient_checkpointing=True)
    assert model.model.layers[0].gradient_checkpointing
    assert not build(f"hf:{folder}", **common).model.layers[0].gradient_checkpointing


def test_a_classifier_gets_a_head_for_the_classes_of_the_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llama(classes=2).save_pretrained(tmp_path / "two")
    same = build(f"hf:{tmp_path / 'two'}", (LENGTH,), 2, vocabulary=TOKENS)
    assert torch.equal(same.score.weight, llama(classes=2).score.weight)
    llama().save_pretrained(tmp_path / "none")
    config = tmp_path / "none" / "config.json"
    kind = {"architectures": ["LlamaForSequenceClassification"]}
    config.write_text(json.dumps({**json.loads(config.read_text()), **kind}))
    heads = [
        build(f"hf:{tmp_path / 'none'}", (LENGTH,), 3, vocabulary=TOKENS, seed=seed).score.weight
        for seed in (1, 1, 2)
    ]
    assert heads[0].shape[0] == 3
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert "has no weights for score.weight, which start at random" in caplog.text


def test_logits_are_what_such_a_model_returns_and_others_stay_as_they_are() -> None:
    x = torch.ones(2, LENGTH, dtype=torch.int64)
    model, inner = llama(), nn.Sequential(llama())
    expected = model(x).logits
    for one in (model, inner):
        give_logits(one)
        give_logits(one)
        assert torch.equal(one(x), expected)
        assert len(one._forward_hooks) == 1
    assert torch.equal(model(x, return_dict=True).logits, expected)
    other = nn.Linear(2, 2)
    give_logits(other)
    assert not other._forward_hooks


def refusal(name: str, vocabulary: int = TOKENS) -> str:
    with pytest.raises(FedsimError) as error:
        build(name, (LENGTH,), vocabulary, vocabulary=vocabulary)
    return str(error.value)


def test_what_is_no_such_folder_is_refused_in_a_sentence(tmp_path: Path, folder: Path) -> None:
    nowhere = "it must be 'hf:FOLDER', a local folder with a config.json .*`hf download OWNER/NAME"
    for name in ("hf", "hf:", "hf:gpt2", f"hf:{tmp_path}"):
        assert re.search(nowhere, refusal(name))
    assert "knows 23 tokens, and the data have 24" in refusal(f"hf:{folder}", TOKENS + 1)
    config = json.loads((folder / "config.json").read_text())
    for kind in ("pipeline", "AutoModel", "LlamaConfig", "NoSuchModel"):
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [kind]}))
        assert f"names the architecture {kind}" in refusal(f"hf:{folder}")
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(llama().state_dict(), folder / "pytorch_model.bin")  # a pickle, which runs code
    (folder / "model.safetensors").unlink()
    assert "cannot be loaded" in refusal(f"hf:{folder}")


def test_a_folders_own_code_is_not_run(folder: Path) -> None:
    (folder / "mine.py").write_text("raise SystemExit('this was run')")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert "cannot be loaded" in refusal(f"hf:{folder}")


@pytest.mark.parametrize("private", [[], *PRIVATE.values()])
def test_a_base_in_bfloat16_is_peft_s_own_under_the_same_adapter(
    tmp_path: Path, private: list[str]
) -> None:
    import transformers

    peft = pytest.importorskip("peft")
    name = f"adapter.targets={LLAMA}"
    ours = run(tmp_path / "run", name, "model.dtype=bfloat16", *private, model=llama())
    assert {str(ours[n].dtype) for n in ours if "lora_" in n} == {"torch.float32"}
    assert {str(ours[n].dtype) for n in ours if "lora_" not in n} == {"torch.bfloat16"}
    saved = fedsim.load(tmp_path / "run", model=llama())
    export_adapter(saved, tmp_path / "adapter")
    llama().bfloat16().save_pretrained(tmp_path / "half")  # rotary frequencies stay in float32
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    theirs = peft.PeftModel.from_pretrained(half, str(tmp_path / "adapter"))
    x = texts().test.x.long()
    with torch.no_grad():
        expected = theirs(x).logits
    assert expected.dtype is torch.bfloat16
    assert torch.equal(saved.model(x), expected.float())


@pytest.mark.parametrize(
    "others", [[], PRIVATE["clients"], PRIVATE["examples"], ["model.dtype=bfloat16"]]
)
def test_a_classifier_takes_tokens_and_their_mask_by_name(
    tmp_path: Path, others: list[str]
) -> None:
    import transformers

    torch.manual_seed(1)
    settings = transformers.BertConfig(
        vocab_size=TOKENS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(settings).eval()
    tokens = (np.arange(24)[:, None] * 5 + np.arange(LENGTH)) % TOKENS
    mask = (np.arange(LENGTH) < 3 + np.arange(24)[:, None] % 4).astype("int64")
    columns = {"x_input_ids": tokens, "x_attention_mask": mask, "y": np.arange(24) % 3}
    data = {f"{k}_{split}": value for k, value in columns.items() for split in ("train", "test")}
    config = RunConfig.from_overrides(
        [*COMMON, "partition.name=iid", "task.metrics=accuracy", "adapter.targets=*.query,*.value",
         *others]
    )  # fmt: skip
    declared = {"classes": 3, "vocabulary": TOKENS}
    fedsim.run(config, data=data | declared, model=model, out=tmp_path / "run")
    saved = fedsim.load(tmp_path / "run", model=model)
    masked = saved.predict_proba({"input_ids": tokens, "attention_mask": mask})
    changed = np.where(mask, tokens, 0)  # what the mask hides
    np.testing.assert_allclose(
        saved.predict_proba({"input_ids": changed, "attention_mask": mask}), masked, atol=1e-6
    )
    assert masked.shape == (24, 3)
