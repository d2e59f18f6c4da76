"""Ordinary models with synthetic examples, for `benchmarks.ordinary_models`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedsim.tasks.losses import BinaryCrossEntropy, CrossEntropy, Loss, SquaredError

CLASSES, WORDS, LENGTH = 10, 100, 20
FIELDS, VALUES, NUMBERS = 8, 1000, 13
"""Of a table: categorical columns, values of each of them, and numeric columns."""

Sampled = Callable[[int, Generator], Tensor]
Mean = Callable[[Tensor, Tensor], Tensor]


def mean_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits ``[..., K]``, over all positions."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Task:
    """A model, its examples and its loss.

    Attributes
    ----------
    name : str
    model : callable
        Creates the model.
    x, y : callable
        Create a number of inputs and targets; without ``y``, targets are the inputs.
    loss, mean_loss : callable
        Loss of each example, for fedsim, and mean loss of a batch, for the loop.
    """

    name: str
    model: Callable[[], nn.Module]
    x: Sampled
    y: Sampled | None
    loss: Loss = field(default_factory=CrossEntropy)
    mean_loss: Mean = mean_cross_entropy

    def examples(self, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """``count`` inputs and targets."""
        x = self.x(count, generator)
        return x, x if self.y is None else self.y(count, generator)


def numbers(*shape: int) -> Sampled:
    return lambda count, generator: torch.rand(count, *shape, generator=generator)


def choices(high: int, *shape: int) -> Sampled:
    return lambda count, generator: torch.randint(high, (count, *shape), generator=generator)


def mcmahan() -> nn.Module:
    """The CNN of McMahan et al. 2017: 5 x 5 filters, padded, max-pooled."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, CLASSES),
    )  # fmt: skip


def unpadded() -> nn.Module:
    """The CNN of McMahan et al. without padding, as in PFLlib."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, CLASSES),
    )  # fmt: skip


def narrow() -> nn.Module:
    """LeNet-5 with ReLU and max-pooling, as in NIID-Bench."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES),
    )  # fmt: skip


def lenet() -> nn.Module:
    """LeNet-5 with ReLU and average pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES),
    )  # fmt: skip


def strided() -> nn.Module:
    """A CNN with strides instead of pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(1024, CLASSES),
    )  # fmt: skip


class Residual(nn.Module):
    """Residual block of two convolutions with group normalisation."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        alike = inputs == outputs and stride == 1
        self.past = nn.Identity() if alike else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.past(x))


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU(),
        Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip


def depthwise() -> nn.Module:
    """Depthwise and 1 x 1 convolutions, as in MobileNet."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU()]
    for inputs, outputs, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs), nn.ReLU()]
        layers += [nn.Conv2d(inputs, outputs, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, CLASSES),
    )  # fmt: skip


class Recurrent(nn.Module):
    """Recurrent layers over words, and a linear layer on the last outputs."""

    def __init__(self, kind: Callable[..., nn.RNNBase], layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.layers = kind(32, 64, num_layers=layers, batch_first=True)
        self.last = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.layers(self.words(x))[0][:, -1])
        return outputs


class Attention(nn.Module):
    """One transformer block over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.last = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.block(self.words(x)).mean(1))
        return outputs


class UNet(nn.Module):
    """U-Net of two levels, with a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([pair(1, 16), pair(16, 32)])
        self.bottom = pair(32, 64)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(64, 32, 2, stride=2), nn.ConvTranspose2d(32, 16, 2, stride=2)]
        )
        self.right = nn.ModuleList([pair(64, 32), pair(32, 16)])
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed = []
        for block in self.left:
            x = block(x)
            passed.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, block in zip(self.up, self.right, strict=True):
            x = block(torch.cat([passed.pop(), up(x)], 1))
        outputs: Tensor = self.last(x)
        return outputs.permute(0, 2, 3, 1)


def pair(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(),
    )  # fmt: skip


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU(),
        nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 784), nn.Sigmoid(),
    )  # fmt: skip


class WideAndDeep(nn.Module):
    """A linear model of categorical fields, plus a network on their embeddings and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(FIELDS * VALUES, 1)
        self.embed = nn.Embedding(FIELDS * VALUES, 16)
        self.deep = nn.Sequential(
            nn.Linear(FIELDS * 16 + NUMBERS, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(),
            nn.Linear(64, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        values = x[:, :FIELDS].long() + VALUES * torch.arange(FIELDS)
        deep = torch.cat([self.embed(values).flatten(1), x[:, FIELDS:]], 1)
        outputs: Tensor = self.deep(deep) + self.wide(values).sum(1)
        return outputs.squeeze(1)


def table(count: int, generator: Generator) -> Tensor:
    values = torch.randint(VALUES, (count, FIELDS), generator=generator)
    return torch.cat([values.float(), torch.rand(count, NUMBERS, generator=generator)], 1)


class LowRank(nn.Module):
    """A frozen linear layer plus the product of two narrow matrices (LoRA, Hu et al. 2022)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return outputs


class AdaptedLayer(nn.Module):
    """A frozen layer of a transformer, with adapters on queries and values."""

    def __init__(self, width: int, heads: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.requires_grad_(False)
        self.query, self.value = LowRank(width, rank), LowRank(width, rank)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        parts = (self.query(y), self.key(y), self.value(y))
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        outputs: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return outputs


class Adapted(nn.Module):
    """A frozen causal transformer over characters, with trained adapters."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, rank: int = 4) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.places = nn.Parameter(torch.randn(LENGTH, width) / 50)
        self.requires_grad_(False)
        self.layers = nn.Sequential(*(AdaptedLayer(width, heads, rank) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.layers(self.words(x) + self.places))
        return outputs


def binary(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets)


TASKS = [
    Task("cnn-padded", mcmahan, numbers(1, 28, 28), choices(CLASSES)),
    Task("cnn-unpadded", unpadded, numbers(1, 28, 28), choices(CLASSES)),
    Task("cnn-narrow", narrow, numbers(1, 28, 28), choices(CLASSES)),
    Task("cnn-average", lenet, numbers(1, 28, 28), choices(CLASSES)),
    Task("cnn-strided", strided, numbers(3, 32, 32), choices(CLASSES)),
    Task("residual", residual, numbers(3, 32, 32), choices(CLASSES)),
    Task("depthwise", depthwise, numbers(3, 32, 32), choices(CLASSES)),
    Task("dropout", dropout, numbers(1, 28, 28), choices(CLASSES)),
    Task("gru", partial(Recurrent, nn.GRU, 1), choices(WORDS, LENGTH), choices(CLASSES)),
    Task("lstm", partial(Recurrent, nn.LSTM, 2), choices(WORDS, LENGTH), choices(CLASSES)),
    Task("attention", Attention, choices(WORDS, LENGTH), choices(CLASSES)),
    Task("u-net", UNet, numbers(1, 32, 32), choices(2, 32, 32)),
    Task("autoencoder", autoencoder, numbers(784), None, SquaredError(), F.mse_loss),
    Task(
        "wide-and-deep", WideAndDeep, table,
        lambda count, generator: torch.rand(count, generator=generator).round(),
        BinaryCrossEntropy(), binary,
    ),
    Task("lora", Adapted, choices(WORDS, LENGTH), choices(WORDS, LENGTH)),
]  # fmt: skip
