"""Write text.npz: docstrings of Python's modules, cut into sequences; a module is an author."""

import ast
import importlib.util
from pathlib import Path

import numpy as np

MODULES = [
    "argparse",
    "bisect",
    "calendar",
    "cmd",
    "collections",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "datetime",
    "random",
    "difflib",
    "email.message",
    "enum",
    "fractions",
    "functools",
    "gettext",
    "heapq",
    "imaplib",
    "inspect",
    "ipaddress",
    "json",
    "logging",
    "mailbox",
]
LENGTH, MOST = 32, 80
ALPHABET = [chr(code) for code in range(32, 127)] + ["\n"]
OTHER = len(ALPHABET)  # whatever else there is: the vocabulary is declared, not found in the text


def docstrings(module: str) -> str:
    """All docstrings of a module, one after another."""
    spec = importlib.util.find_spec(module)
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n".join(filter(None, map(ast.get_docstring, nodes)))


def sequences(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and next characters ``[n, LENGTH + 1]``, and which of them are there."""
    code = {sign: token for token, sign in enumerate(ALPHABET)}
    tokens = np.array([code.get(sign, OTHER) for sign in text[: MOST * LENGTH + 1]])
    starts = range(0, len(tokens) - 1, LENGTH)
    padded = np.full((len(starts), LENGTH + 1), OTHER)
    for row, start in enumerate(starts):
        piece = tokens[start : start + LENGTH + 1]
        padded[row, : len(piece)] = piece
    lengths = [len(tokens[start + 1 : start + LENGTH + 1]) for start in starts]
    return padded, np.arange(LENGTH) < np.array(lengths)[:, None]


def main() -> None:
    splits: dict[str, list[np.ndarray]] = {}
    for module in MODULES:
        padded, mask = sequences(docstrings(module))
        n_train = max(1, len(padded) * 9 // 10)
        for split, rows in (("train", slice(n_train)), ("test", slice(n_train, None))):
            columns = {
                "x": padded[rows, :-1].astype(np.int16),
                "y": padded[rows, 1:].astype(np.int16),
                "mask": mask[rows],
                "owner": np.full(len(padded[rows]), module),
            }
            for name, column in columns.items():
                splits.setdefault(f"{name}_{split}", []).append(column)
    arrays = {name: np.concatenate(columns) for name, columns in splits.items()}
    np.savez_compressed("text.npz", **arrays, vocabulary=OTHER + 1, classes=OTHER + 1)
    print(f"text.npz: {len(arrays['x_train'])} sequences of {len(MODULES)} authors")


if __name__ == "__main__":
    main()
