"""Data sets of text that ships with Python, and a small transformer over characters.

The transformer is pretrained centrally and without noise on the docstrings of the standard
library's modules. Its adapters are trained on the code of modules in packages, one per client.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import regular_files
from fedsim.datasets import Dataset

LENGTH, MOST = 32, 16
ALPHABET = [chr(code) for code in range(32, 127)] + ["\n"]
OTHER = len(ALPHABET)  # token of all other characters: the vocabulary is declared, not found

Tokens = npt.NDArray[np.int64]


def prose() -> Dataset:
    """Docstrings of modules, in sequences of 32 characters; every tenth is a test example."""
    texts = ["\n".join(_docstrings(text)) for _, text in _modules("*.py")]
    rows = np.concatenate([_sequences(text, 10**6) for text in texts if len(text) > LENGTH])
    test = np.arange(len(rows)) % 10 == 0
    return _dataset("prose", rows[~test], rows[test])


def code() -> Dataset:
    """16 sequences from the middle of each module in a package; each module is an owner.

    Every tenth module is test data.
    """
    texts = {name: text[len(text) // 2 :] for name, text in _modules("*/**/*.py")}
    found = {name: _sequences(text, MOST) for name, text in texts.items()}
    found = {name: rows for name, rows in found.items() if len(rows) == MOST}
    everything = np.concatenate([*found.values()])
    names = np.repeat([*found], MOST)
    test = np.repeat(np.arange(len(found)) % 10 == 0, MOST)
    return _dataset("code", everything[~test], everything[test], names[~test], names[test])


def _modules(pattern: str) -> Iterator[tuple[str, str]]:
    """Name and text of modules of the standard library, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.glob(pattern)):
        parts = path.relative_to(library).parts
        if not {"site-packages", "test", "tests", "idle_test", "lib2to3"} & {*parts}:
            yield "/".join(parts), regular_files.read_text(path, errors="replace")


def _docstrings(text: str) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
            yield docstring


def _sequences(text: str, most: int) -> Tokens:
    """Tokens ``[n, 33]``: whole sequences of 32 characters, each with the next character."""
    signs = {sign: token for token, sign in enumerate(ALPHABET)}
    tokens = np.array(
        [signs.get(sign, OTHER) for sign in text[: most * LENGTH + 1]], dtype=np.int64
    )
    count = max(0, (len(tokens) - 1) // LENGTH)
    rows: Tokens = tokens[np.arange(count)[:, None] * LENGTH + np.arange(LENGTH + 1)]
    return rows


def _dataset(
    name: str,
    train: Tokens,
    test: Tokens,
    *owners: npt.NDArray[np.str_],
) -> Dataset:
    splits: list[dict[str, npt.NDArray[np.int64 | np.str_]]] = [
        {"x": rows[:, :-1], "y": rows[:, 1:]} for rows in (train, test)
    ]
    for split, column in zip(splits, owners, strict=False):
        split["owner"] = column
    size = OTHER + 1
    return Dataset.from_arrays(name, *splits, classes=size, vocabulary=size, source=name)


class CausalAttention(nn.Module):
    """Causal self-attention with four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, length, width]`` to the same shape."""
        n, length, width = x.shape
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.view(n, length, 4, -1).transpose(1, 2) for part in parts)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, float("-inf")).softmax(-1)
        mixed: Tensor = self.out((weights @ v).transpose(1, 2).reshape(n, length, width))
        return mixed


class CausalBlock(nn.Module):
    """Attention, then two linear layers, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = CausalAttention(width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, length, width]`` to the same shape."""
        x = x + self.attention(self.norm1(x))
        added: Tensor = x + self.second(F.gelu(self.first(self.norm2(x))))
        return added


class CharacterTransformer(nn.Module):
    """Two blocks of width 48, with learned positions and no dropout."""

    def __init__(
        self, input_shape: tuple[int, ...], vocabulary: int, num_classes: int, width: int = 48
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(input_shape[0], width))
        self.blocks = nn.ModuleList([CausalBlock(width) for _ in range(2)])
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``[n, length]`` to logits ``[n, length, classes]``."""
        h = self.embed(x) + self.place
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(h)
        return logits
