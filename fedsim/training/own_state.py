"""What a model and a loss keep from one call to the next: buffers, and attributes of their own.

Each protected example begins from the same ones: they are put back between examples, and a model or
a loss that changes them is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.errors import FedsimError
from fedsim.tasks.losses import Loss
from fedsim.training.structure.tables import is_torchs_own

# Of every module; nothing that a user's forward would write to.
_MODULES_OWN = frozenset(vars(nn.Module())) - {"_buffers"}

_NEVER_CHANGES = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class _Saved:
    """Attributes of one object, as they were."""

    attributes: dict[str, Any]
    names: frozenset[str]
    constant: dict[str, Any]
    changeable: dict[str, Any]


class OwnState:
    """Buffers and attributes of a model, and attributes of a loss.

    Parameters
    ----------
    model : nn.Module
    loss : callable
        Those of a function are what a user set on it; what it closes over is out of reach.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self._owners = [*_named("the model's ", model), *_named("the loss's ", loss)]
        # Modules and parameters are not copied: they are what is trained.
        models = [m for m in (model, loss) if isinstance(m, nn.Module)]
        self._shared = {id(t): t for m in models for t in (*m.parameters(), *m.modules())}
        self._saved = [self._save(_attributes(owner)) for _, owner in self._owners]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put back what a call has changed, once it is over."""
        try:
            yield
        finally:
            for saved in self._saved:
                self._restore(saved)

    @property
    def changed(self) -> list[str]:
        """Names of what has changed since."""
        return [
            f"{whose}{name}"
            for (whose, _), saved in zip(self._owners, self._saved, strict=True)
            for name in sorted({*_own(saved.attributes)} | saved.names)
            if not _same(
                saved.attributes.get(name, _NOTHING),
                (saved.constant | saved.changeable).get(name, _NOTHING),
            )
        ]

    def _save(self, attributes: dict[str, Any]) -> _Saved:
        own = _own(attributes)
        constant = {k: v for k, v in own.items() if self._is_constant(v)}
        rest = {k: v for k, v in own.items() if k not in constant}
        try:
            changeable = copy.deepcopy(rest, dict(self._shared))
        except Exception as error:  # a user's object may raise anything when it is copied
            raise FedsimError(
                f"the model's or the loss's attributes {', '.join(rest)} cannot be copied "
                f"({type(error).__name__}: {error}); with example-level privacy each example "
                "begins from the same ones: they must be plain values, tensors or modules."
            ) from error
        return _Saved(attributes, frozenset(own), constant, changeable)

    def _is_constant(self, value: Any) -> bool:
        return isinstance(value, _NEVER_CHANGES) or id(value) in self._shared

    def _restore(self, saved: _Saved) -> None:
        for name in _own(saved.attributes).keys() - saved.names:
            del saved.attributes[name]
        saved.attributes.update(saved.constant)
        if saved.changeable:
            saved.attributes.update(copy.deepcopy(saved.changeable, dict(self._shared)))


_NOTHING = object()


def _named(whose: str, owner: object) -> list[tuple[str, object]]:
    """A module's parts, or what a function is of, each with a name for sentences."""
    if isinstance(owner, nn.Module):
        return [(f"{whose}{name}{name and '.'}", part) for name, part in owner.named_modules()]
    inner = owner.func if isinstance(owner, partial) else getattr(owner, "__self__", None)
    if inner is None or isinstance(inner, ModuleType | type):
        return [(whose, owner)]
    return [(whose, owner), *_named(whose, inner)]


def _attributes(owner: object) -> dict[str, Any]:
    """What may change of an object: of torch's own modules their buffers and nothing else."""
    if isinstance(owner, nn.Module) and is_torchs_own(owner):
        return owner._buffers
    attributes: dict[str, Any] = getattr(owner, "__dict__", {})
    return attributes


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in _MODULES_OWN}


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, as far as they can be looked into."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, 0.0, 0.0, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, (*_NEVER_CHANGES, set, frozenset)):
        return bool(one == other)
    inside = getattr(one, "__dict__", None)
    return inside is None or _same(inside, other.__dict__)
