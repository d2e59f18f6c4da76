"""The two models of pfl-research's benchmarks: a small CNN, and a transformer of words."""

import torch
from torch import Tensor, nn


def cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two convolutions and a dense layer, with dropout after both."""
    side = (input_shape[1] - 4) // 2
    model = nn.Sequential(
        nn.Conv2d(input_shape[0], 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * side * side, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, num_classes),
    )
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


class Transformer(nn.Module):
    """Causal, with dropout; the words' table is the last layer's too."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        vocabulary: int,
        width: int = 96,
        heads: int = 8,
        hidden: int = 1536,
        layers: int = 3,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(input_shape[0], width))
        nn.init.normal_(self.words.weight, std=0.05)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, hidden, dropout, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)
        h = self.drop(self.words(x) + self.places)
        for layer in self.layers:
            h = layer(h, src_mask=later)
        return self.norm(h) @ self.words.weight.T
