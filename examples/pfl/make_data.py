"""Write made-up.npz and words.npz, to try the benchmarks without what they download.

made-up.npz has CIFAR-10's shapes: noise with a colour for each class. words.npz has words of
docstrings that come with Python, each word one of VOCABULARY buckets: declared, found in nothing.
"""

import ast
import importlib.util
import re
import zlib
from pathlib import Path

import numpy as np

MODULES = [
    "argparse",
    "calendar",
    "collections",
    "configparser",
    "contextlib",
    "csv",
    "datetime",
    "difflib",
    "enum",
]
MODULES += [
    "fractions",
    "functools",
    "imaplib",
    "inspect",
    "ipaddress",
    "logging",
    "mailbox",
    "random",
    "tarfile",
]
USERS = 2  # a module
VOCABULARY, LENGTH, MOST = 1000, 20, 32
IMAGES = 1000


def sentences(module: str) -> list[list[int]]:
    """The words of each docstring of a module."""
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    words = (re.findall(r"[a-z]+|[.,:]", text.lower()) for text in filter(None, texts))
    return [[zlib.crc32(word.encode()) % VOCABULARY for word in line] for line in words]


def write_words() -> None:
    splits: dict[str, list[np.ndarray]] = {}
    for module in MODULES:
        lines = sentences(module)
        for user in range(USERS):
            tokens = np.array([token for line in lines[user::USERS] for token in line])
            tokens = tokens[: MOST * LENGTH + 1]
            starts = np.arange(0, len(tokens) - LENGTH, LENGTH)
            rows = tokens[starts[:, None] + np.arange(LENGTH + 1)]
            cut = max(1, len(rows) * 9 // 10)
            for split, part in (("train", rows[:cut]), ("test", rows[cut:])):
                splits.setdefault(f"x_{split}", []).append(part[:, :-1].astype(np.int16))
                splits.setdefault(f"y_{split}", []).append(part[:, 1:].astype(np.int16))
                owner = np.full(len(part), f"{module}-{user}")
                splits.setdefault(f"owner_{split}", []).append(owner)
    arrays = {name: np.concatenate(parts) for name, parts in splits.items()}
    np.savez_compressed("words.npz", **arrays, vocabulary=VOCABULARY, classes=VOCABULARY)
    print(f"words.npz: {len(arrays['x_train'])} sequences of {len(MODULES) * USERS} users")


def main() -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, object] = {"classes": 10}
    for split, count in (("train", IMAGES), ("test", IMAGES // 5)):
        y = np.arange(count) % 10
        x = rng.integers(0, 156, (count, 32, 32, 3)) + 10 * y[:, None, None, None]
        arrays |= {f"x_{split}": x.astype(np.uint8), f"y_{split}": y}
    np.savez_compressed("made-up.npz", **arrays)
    write_words()


if __name__ == "__main__":
    main()
