"""Texts as sequences of tokens, of which each one's target is the next: data of a language model.

The tokenizer is given, in a folder, and its vocabulary with it: nothing of the texts adds to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import optional_packages
from fedsim.array_types import Array
from fedsim.datasets.arrays import Arrays, cause
from fedsim.datasets.column_types import Column
from fedsim.datasets.tables import Table, plain_columns, split_rows
from fedsim.errors import FedsimError


def arrays_of_texts(
    train: Table,
    test: Table | None,
    roles: Mapping[str, str],
    types: str,
    tokenizer: str,
    protected: bool,
    where: str,
) -> Arrays:
    """Arrays of a column of texts: ``x`` and ``y`` ``[N, length]``, and ``mask``.

    A text, with the tokenizer's sign of its end, gives as many sequences as it needs, so that no
    sequence has tokens of two texts. What is missing in the last one is padding, which the mask
    leaves out of loss and metrics.

    Parameters
    ----------
    train, test : mapping of name to column
        Without ``test``, every fifth row of ``train`` is a test text.
    roles : mapping of str to str
        Of `text_roles`: the column of texts, and further columns, which each sequence of a text
        gets.
    types : str
        ``"body=tokens:128"``: the number of tokens in a sequence.
    tokenizer : str
        A local folder that ``save_pretrained`` of a tokenizer of `transformers` has written.
    protected : bool
        Whether a run protects the texts; see `tables.arrays_of_tables`.
    where : str
        Name of the table in error messages.

    Raises
    ------
    FedsimError
        If the tokenizer cannot be loaded, a setting does not fit, or a column is missing.
    """
    text, others = roles["x"], {ours: name for ours, name in roles.items() if ours != "x"}
    if test is None:
        train, test = split_rows(train, where)
    for name in (text, *others.values()):
        if name not in train or name not in test:
            raise FedsimError(
                f"data.columns names '{name}', which {where} does not have; it must be one of its "
                "columns."
            )
    length, coder = _length(types, text), _loaded(tokenizer)
    plain = {
        ours: plain_columns(train[name], test[name], name, where, protected)
        for ours, name in others.items()
    }
    end, padding = coder.eos_token_id, coder.pad_token_id
    padding = next((token for token in (padding, end) if token is not None), 0)
    splits: list[dict[str, Array]] = []
    for number, table in enumerate((train, test)):
        tokens = _ended(_encoded(coder, table[text]), end)
        sequences, lengths, rows = _cut(tokens, length, padding)
        split = {
            "x": sequences[:, :-1],
            "y": sequences[:, 1:],
            "mask": np.arange(1, length + 1) < lengths[:, None],
        }
        splits.append(split | {ours: parts[number][rows] for ours, parts in plain.items()})
    vocabulary = max(coder.get_vocab().values()) + 1
    names = {theirs: ours for ours, theirs in others.items()}
    words = {text: f"sequences of {length:,} of {vocabulary:,} tokens", **names}
    return Arrays(
        splits[0],
        splits[1],
        classes=vocabulary,
        vocabulary=vocabulary,
        columns=tuple(f"{name}: {words.get(name, 'ignored')}" for name in train),
    )


def text_roles(columns: str, where: str) -> dict[str, str]:
    """Columns by their names in fedsim: "x" is the column of texts.

    Raises
    ------
    FedsimError
        If there is none, or a target.
    """
    pairs = [pair.partition("=") for pair in columns.split(",")]
    named = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
    if "x" not in named or not all((*named, *named.values())) or len(named) < len(pairs):
        raise FedsimError(
            f"data.columns is '{columns}'; for texts (data.tokenizer) it must name the column of "
            f"{where} that has them, and may name others, each once, such as 'x=body,owner=author'."
        )
    if "y" in named or "mask" in named:
        raise FedsimError(
            f"data.columns is '{columns}'; with data.tokenizer the targets are the next tokens, so "
            "that y and mask must be left out."
        )
    return named


def _length(types: str, text: str) -> int:
    name, _, kind = (part.strip() for part in types.partition("="))
    number = kind.removeprefix("tokens:")
    if name != text or kind == number or not number.isdecimal() or not 0 < int(number) < 2**20:
        raise FedsimError(
            f"data.types is '{types}'; with data.tokenizer it must say how many tokens a sequence "
            f"of the texts has, such as '{text}=tokens:128'."
        )
    return int(number)


def _loaded(folder: str) -> Any:
    where = f"data.tokenizer = '{folder}'"
    if not Path(folder).is_dir():
        raise FedsimError(f"{where}, but there is no such folder; it must be a local one.")
    optional_packages.require(where, "transformers")
    # Its threads would run beside the workers, and warn where one is forked.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and its files may raise anything
        raise FedsimError(
            f"{where} cannot be loaded ({cause(error)}); it must be a folder that save_pretrained "
            "of a tokenizer of transformers has written."
        ) from error


def _encoded(coder: Any, texts: Column) -> list[list[int]]:
    values = ["" if text is None else str(text) for text in texts]
    # Not `truncation`: what is too long for the model is cut into several sequences.
    tokens: list[list[int]] = coder(values, verbose=False)["input_ids"] if values else []
    return tokens


def _ended(tokens: Iterable[list[int]], end: int | None) -> list[list[int]]:
    return [t if end is None or t[-1:] == [end] or not t else [*t, end] for t in tokens]


def _cut(texts: Sequence[list[int]], length: int, padding: int) -> tuple[Array, Array, Array]:
    """Sequences ``[N, length + 1]``, which begin with the last token of the one before.

    With the number of tokens in each ``[N]``, and the row of its text ``[N]``.
    """
    starts = [
        (row, start) for row, text in enumerate(texts) for start in range(0, len(text) - 1, length)
    ]
    sequences = np.full((len(starts), length + 1), padding, dtype=np.int32)
    for sequence, (row, start) in zip(sequences, starts, strict=True):
        piece = texts[row][start : start + length + 1]
        sequence[: len(piece)] = piece
    lengths = np.array([min(len(texts[row]) - start, length + 1) for row, start in starts], int)
    return sequences, lengths, np.array([row for row, _ in starts], int)
