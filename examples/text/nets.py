"""Language models of characters: an LSTM, a small transformer, and one with adapters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LSTM(nn.Module):
    def __init__(self, vocabulary: int, num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 16)
        self.lstm = nn.LSTM(16, width, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (t.view(n, length, self.heads, -1).transpose(1, 2) for t in parts)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        seen = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.out(seen.transpose(1, 2).reshape(n, length, width))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.second(F.gelu(self.first(self.norm2(x))))


class Transformer(nn.Module):
    """Causal, with positions learnt; no dropout."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        vocabulary: int,
        num_classes: int,
        width: int = 32,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(input_shape[0], width))
        self.layers = nn.ModuleList([Layer(width, heads=4) for _ in range(layers)])
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place
        for layer in self.layers:
            h = layer(h)
        return self.head(h)
