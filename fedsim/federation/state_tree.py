"""State as tensors and JSON, so that a checkpoint needs no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tree = Mapping[str, Any]
"""Mapping from names to tensors, numpy arrays, JSON values, or further trees."""

_TENSOR, _ARRAY = "tensor", "array"


def split_tree(tree: Tree) -> tuple[dict[str, Tensor], str]:
    """Split a tree into its tensors, under generated names, and JSON that refers to them.

    Raises
    ------
    TypeError
        If a value is neither a tensor, nor an array of a dtype that torch has, nor a JSON value.

    Examples
    --------
    >>> tensors, text = split_tree({"steps": 3, "moments": {"first": torch.ones(2)}})
    >>> list(tensors), text
    (['0'], '{"steps": 3, "moments": {"first": {"tensor": "0"}}}')
    >>> join_tree(tensors, text)["moments"]["first"].tolist()
    [1.0, 1.0]
    """
    tensors: dict[str, Tensor] = {}

    def named(value: Any) -> Any:
        name = str(len(tensors))
        if isinstance(value, Tensor):
            tensors[name] = value.detach().cpu().contiguous()
            return {_TENSOR: name}
        if isinstance(value, np.ndarray):
            tensors[name] = torch.from_numpy(value.copy())
            return {_ARRAY: name}
        if isinstance(value, Mapping):
            # `join_tree` would take such a mapping for the reference to a tensor.
            if set(value) in ({_TENSOR}, {_ARRAY}) and isinstance(next(iter(value.values())), str):
                raise TypeError(
                    f"a mapping whose one key is '{next(iter(value))}' cannot be saved."
                )
            return {_checked(key): named(entry) for key, entry in value.items()}
        return value

    return tensors, json.dumps(named(tree))


def join_tree(tensors: Mapping[str, Tensor], text: str) -> dict[str, Any]:
    """Inverse of `split_tree`."""

    def named(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for form in (_TENSOR, _ARRAY):
            if set(value) == {form} and isinstance(value[form], str):
                tensor = torch.clone(tensors[value[form]])
                return tensor if form == _TENSOR else tensor.numpy()
        return {key: named(entry) for key, entry in value.items()}

    tree: dict[str, Any] = named(json.loads(text))
    return tree


def _checked(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key of the state is {key!r}; it must be a string.")
    return key
