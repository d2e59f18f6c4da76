from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.adapters import LoRA, LowRankLinear, adapted
from fedsim.adapters.base import Adapter
from fedsim.errors import FedsimError
from fedsim.tasks.losses import CrossEntropy
from fedsim.training.paths.factored import product_layers
from fedsim.training.payload import Personal
from fedsim.training.structure.reading import read


class Block(nn.Module):
    """Attention and what follows it, with layers in layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scores = (self.query(h) @ self.key(h).mT).softmax(-1)
        return x + self.mlp(scores @ self.value(h))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


@pytest.fixture
def model() -> Small:
    torch.manual_seed(0)
    return Small()


TOKENS = torch.arange(24).view(3, 8) % 20
QUERIES = LoRA(rank=3, alpha=6, targets="*.query,*.value")


def moved(model: nn.Module) -> nn.Module:
    """With factors that are not zero."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) / 4
    return model


def test_a_new_adapter_changes_nothing_that_the_model_gives(model: Small) -> None:
    expected = model(TOKENS)
    assert torch.equal(QUERIES(model, 1)(TOKENS), expected)


def test_only_the_factors_are_trained_and_other_parameters_keep_their_names(model: Small) -> None:
    before = [name for name, _ in model.named_parameters()]
    QUERIES(model, 1)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    layers = [f"blocks.{k}.{layer}" for k in (0, 1) for layer in ("query", "value")]
    factors = [f"{layer}.lora_{f}.weight" for layer in layers for f in "AB"]
    assert trained == factors
    frozen = {name.replace(".base_layer", "") for name, _ in model.named_parameters()} - {*factors}
    assert frozen == {*before}


def test_the_function_is_that_of_the_closed_form() -> None:
    layer = LowRankLinear(nn.Linear(6, 4), rank=2, scaling=1.5)
    nn.init.normal_(layer.lora_A.weight)
    nn.init.normal_(layer.lora_B.weight)
    x = torch.randn(5, 3, 6)
    weight = layer.base_layer.weight + 1.5 * layer.lora_B.weight @ layer.lora_A.weight
    torch.testing.assert_close(layer(x), F.linear(x, weight, layer.base_layer.bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_merged_model_does_the_same_under_the_names_it_had(model: Small, dtype) -> None:
    model = model.to(dtype)
    names = [*model.state_dict()]
    adapted_model = moved(QUERIES(model, 1))
    expected = adapted_model(TOKENS)
    merged = QUERIES.merged(adapted_model)
    assert [*merged.state_dict()] == names
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(merged(TOKENS), expected, rtol=0, atol=tolerance)
    with pytest.raises(FedsimError, match="no adapter to merge"):
        QUERIES.merged(merged)


def test_the_draws_are_the_seeds_alone(model: Small) -> None:
    copies = [copy.deepcopy(model) for _ in range(3)]
    state = torch.get_rng_state()
    one, two, other = (
        QUERIES(m, seed).state_dict() for m, seed in zip(copies, (5, 5, 6), strict=True)
    )
    assert torch.equal(torch.get_rng_state(), state)
    a = [name for name in one if "lora_A" in name]
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in a)
    values = torch.cat([one[name].flatten() for name in a])
    assert values.abs().max() <= 1 / 4  # 1 / sqrt(16 inputs)
    assert values.abs().mean() == pytest.approx(1 / 8, rel=0.15)


def test_an_adapted_model_is_read_by_its_structure(model: Small) -> None:
    adapted_model = LoRA(rank=2, targets="*.query,*.mlp.*")(model, 1).train()
    reading = read(adapted_model, CrossEntropy(), TOKENS, torch.zeros(3, dtype=torch.int64))
    assert reading.structure is not None, reading.why
    layers = product_layers(reading.structure, Personal.from_model(adapted_model, []).packing)
    assert layers is not None
    assert len(layers) == 12


def test_a_frozen_a_is_in_no_row(model: Small) -> None:
    LoRA(rank=2, factors="frozen-a")(model, 1)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(name.endswith("lora_B.weight") for name in trained)


class Tied(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 20)
        self.head.weight = self.embed.weight


class Twice(Small):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.head


class Hooked(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_hook(lambda *_: None)


class Subclass(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("make", "adapter", "sentence"),
    [
        (Small, LoRA(targets="nothing.*"), "the pattern 'nothing.*', which matches no layer"),
        (Small, LoRA(targets="*.query,head.typo"), "'head.typo', which matches no layer"),
        (Small, LoRA(targets="*.norm"), "'blocks.0.norm', a LayerNorm and not an nn.Linear"),
        (Small, LoRA(targets="embed"), "'embed', a Embedding and not an nn.Linear"),
        (Small, LoRA(targets=" , "), "it must name linear layers of the model, which has bl"),
        (Small, LoRA(rank=6, targets="head"), "rank = 6; it must be at most 5, the smaller"),
        (Tied, LoRA(rank=2), "'head', whose weight is tied to 'embed.weight'; it must"),
        (Twice, LoRA(rank=2), "'head', which is also 'again' in the model"),
        (Hooked, LoRA(rank=2), "'head', which has hooks"),
        (lambda: nn.Sequential(Subclass(4, 4)), LoRA(rank=2, targets="0"), "has none inside it"),
        (lambda: nn.Linear(4, 4), LoRA(rank=2), "has none inside it"),
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 1)), LoRA(rank=2), "has none inside it"),
    ],
)
def test_what_cannot_be_adapted_is_refused_and_left_as_it_was(
    make, adapter: LoRA, sentence: str
) -> None:
    model = make()
    names = [*model.state_dict()]
    with pytest.raises(FedsimError, match=re.escape(sentence)) as raised:
        adapter(model, 1)
    assert "\n" not in str(raised.value)
    assert [*model.state_dict()] == names
    assert all(p.requires_grad for p in model.parameters())


def test_a_tied_head_may_be_left_out() -> None:
    model = LoRA(rank=2, targets="blocks.*")(Tied(), 1)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("again", [QUERIES, LoRA(rank=2, targets="head")])
def test_an_adapted_model_is_not_adapted_again(model: Small, again: Adapter) -> None:
    QUERIES(model, 1)
    with pytest.raises(FedsimError, match=r"has an adapter already, at 'blocks\.0\.query"):
        again(model, 1)


@pytest.mark.parametrize("trainable", ["*", "*.query.*", "blocks.0.value.bias"])
def test_a_layer_is_not_trained_beside_its_adapter(model: Small, trainable: str) -> None:
    with pytest.raises(FedsimError, match=r"which adapter\.targets adapts"):
        adapted(QUERIES, model, 1, trainable)


def test_what_is_trained_besides_is_named_as_in_the_model(model: Small) -> None:
    adapted(QUERIES, model, 1, "head.*,*.norm.bias")
    besides = [n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n]
    assert besides == ["blocks.0.norm.bias", "blocks.1.norm.bias", "head.weight", "head.bias"]
    with pytest.raises(FedsimError, match=r"pattern '\*lora_A\*', which matches no parameter"):
        adapted(QUERIES, Small(), 1, "*lora_A*")


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        return self.encoder(x, src_key_padding_mask=mask)


def test_torchs_encoder_does_not_go_past_its_adapters_in_evaluation() -> None:
    """Its fast path computes by ``linear1.weight``, and an adapter there would do nothing."""
    model = moved(LoRA(rank=2, targets="*.linear1,*.linear2")(Encoder(), 1))
    x = torch.randn(2, 5, 16)
    trained = model.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), trained)
        torch.testing.assert_close(QUERIES.merged(model)(x), trained, rtol=0, atol=1e-5)


def test_a_layers_weight_is_not_read_past_its_adapter(model: Small) -> None:
    QUERIES(model, 1)
    with pytest.raises(AttributeError, match="weight"):
        _ = model.blocks[0].query.weight
