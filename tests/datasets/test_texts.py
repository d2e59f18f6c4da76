"""Texts become sequences of tokens by a tokenizer that is given, and by nothing of the texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedsim
from fedsim import RunConfig
from fedsim.datasets import load
from fedsim.deploy.policy import Policy
from fedsim.errors import FedsimError

WORDS = ["<unk>", "<end>", "<pad>", "the", "cat", "sat", "on", "mat"]
TEXTS = ["the cat sat on the mat", "the mat", "", "cat sat", "a dog sat"]
SETTINGS = {"columns": "x=body,owner=author", "types": "body=tokens:4"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({w: k for k, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<end>", pad_token="<pad>"
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def table(tmp_path: Path) -> str:
    (tmp_path / "texts").mkdir()
    for split in ("train", "test"):
        lines = [f'"{text}",author {k % 2}' for k, text in enumerate(TEXTS)]
        (tmp_path / "texts" / f"{split}.csv").write_text("\n".join(["body,author", *lines]))
    return str(tmp_path / "texts")


def coded(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


@pytest.mark.parametrize("protected", [True, False])
def test_a_text_gives_sequences_of_its_own_whose_targets_are_the_next_tokens(
    table: str, tokenizer: str, protected: bool
) -> None:
    data = load(table, tokenizer=tokenizer, protected=protected, **SETTINGS)
    x, y, mask = (tensor.numpy() for tensor in (data.train.x, data.train.y, data.train.mask))
    pad = "<pad>"
    np.testing.assert_array_equal(
        x,
        [
            coded("the", "cat", "sat", "on"),
            coded("the", "mat", "<end>", pad),  # begins where the first one's targets end
            coded("the", "mat", "<end>", pad),
            coded("cat", "sat", "<end>", pad),
            coded("<unk>", "<unk>", "sat", "<end>"),
        ],
    )
    np.testing.assert_array_equal(y[0], coded("cat", "sat", "on", "the"))
    np.testing.assert_array_equal(y[1], coded("mat", "<end>", pad, pad))
    np.testing.assert_array_equal(mask.sum(1), [4, 2, 2, 2, 3])
    owners = ["author 0", "author 0", "author 1", "author 1", "author 0"]
    assert data.train.columns["owner"].tolist() == owners
    assert (data.vocabulary, data.num_classes) == (len(WORDS), len(WORDS))
    assert data.found_in == {}  # a private run takes nothing from the texts
    assert data.columns == ("body: sequences of 4 of 8 tokens", "author: owner")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"columns": "owner=author"}, "must name the column .* such as 'x=body,owner=author'"),
        ({"columns": "x=body,y=author"}, "the targets are the next tokens, so that y and mask"),
        ({"columns": "x=none"}, "names 'none', which"),
        ({"types": ""}, "it must say how many tokens .* such as 'body=tokens:128'"),
        ({"types": "body=tokens:0"}, "it must say how many tokens"),
        ({"tokenizer": "gpt2"}, r"data\.tokenizer = 'gpt2', but there is no such folder"),
        ({"tokenizer": "."}, r"data\.tokenizer = '\.' cannot be loaded"),
    ],
)
def test_what_does_not_fit_texts_is_refused(
    table: str, tokenizer: str, changes: dict[str, str], sentence: str
) -> None:
    with pytest.raises(FedsimError, match=sentence):
        load(table, **{**SETTINGS, "tokenizer": tokenizer, **changes})


def test_columns_of_hugging_face_are_texts_too(table: str, tokenizer: str) -> None:
    pytest.importorskip("flwr_datasets")
    import datasets

    split = datasets.Dataset.from_dict({"body": TEXTS, "author": ["a", "b", "a", "b", "b"]})
    path = Path(table).parent / "saved"
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(path))
    (path.parent / "parquet").mkdir()
    split.to_parquet(path.parent / "parquet" / "train.parquet")
    expected = load(table, tokenizer=tokenizer, **SETTINGS).train
    saved = load(str(path), tokenizer=tokenizer, **SETTINGS)
    assert (saved.train.x == expected.x).all()
    parquet = load(str(path.parent / "parquet"), tokenizer=tokenizer, **SETTINGS)
    assert (parquet.train.x == expected.x[:4]).all()  # the fifth text is for testing
    assert (parquet.test.x == expected.x[4:]).all()
    with pytest.raises(FedsimError, match="no column 'none'"):
        load(str(path), tokenizer=tokenizer, columns="x=none", types="none=tokens:4")


def test_words_that_are_found_in_texts_are_no_inputs_of_a_private_run(
    table: str, tmp_path: Path
) -> None:
    private = ["mechanism.name=clipping", "noise.multiplier=1.0", "partition.clients=2"]
    data = [f"data.name={table}", "data.columns=x=body,y=author"]
    with pytest.raises(FedsimError, match=r"data\.types does not say .* author, body"):
        fedsim.run(RunConfig.from_overrides([*data, *private]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_node_with_a_file_of_its_own_reads_no_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(
        'superlink = "x:1"\nclient = 0\nclients = 100\n[policy]\ndata = "own.csv"\n'
        'files = ["models"]'
    )
    private = ["mechanism.name=clipping", "noise.multiplier=1.0", "partition.clients=100"]
    data = ["data.name=/theirs.csv", "data.columns=x=body", "data.types=body=tokens:4"]
    config = RunConfig.from_overrides([*private, *data, "data.tokenizer=/private"])
    with pytest.raises(FedsimError, match=r"data\.tokenizer is '/private'; here it may lie in "):
        Policy.load(path).check(config)


def test_a_language_model_trains_on_texts_by_owner(
    table: str, tokenizer: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    overrides = [
        f"data.name={table}", f"data.tokenizer={tokenizer}", f"model.name=hf:{tmp_path / 'model'}",
        *(f"data.{key}={value}" for key, value in SETTINGS.items()), "partition.name=by-owner",
        "partition.clients=2", "rounds=1", "adapter.name=lora", "adapter.rank=2",
        "adapter.targets=*.c_attn", "mechanism.name=clipping", "noise.multiplier=1.0",
        "evaluate.unprotected=true", "task.metrics=perplexity", "engine.device=cpu",
    ]  # fmt: skip
    result = fedsim.run(RunConfig.from_overrides(overrides), out=tmp_path / "run")
    assert 0 < result.metrics[-1]["test-perplexity"] < 20
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["data"]["vocabulary"] == 8
    # Others' texts, tokenised as the run's.
    found = fedsim.load(tmp_path / "run").evaluate(table)
    assert "perplexity" in str(found)
