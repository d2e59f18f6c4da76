"""Imports at first use, so that reading settings waits neither for torch nor for Flower."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedsim.arguments import explain_call


class _LazyModule(ModuleType):
    """A module that is imported when one of its attributes is first used."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:
    torch = _LazyModule("torch")

    class _Tensors(type):
        def __instancecheck__(cls, value: object) -> bool:
            return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)

    class Tensor(metaclass=_Tensors):
        """Stand-in for `torch.Tensor` in annotations and `isinstance`, without importing torch.

        Before torch is imported there is no tensor, so that `isinstance` is False then.
        """


def lazy_names(package: str, file: str) -> Callable[[str], Any]:
    """Make a package's ``__getattr__``, which imports a name at its first use.

    The names are those that the package's ``file`` imports (under ``TYPE_CHECKING``), and the
    modules in the package: ``fedsim.datasets.from_table`` needs no import of its own.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    homes = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def __getattr__(name: str) -> Any:  # noqa: N807 - it becomes the package's
        if name not in homes:
            if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
                return importlib.import_module(f"{package}.{name}")
            raise AttributeError(f"module '{package}' has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        if isinstance(value, type) and value.__module__.startswith("fedsim."):
            explain_call(value)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
