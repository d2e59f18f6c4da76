"""State inside a model and a loss: buffers, attributes, and parameters that are not trained.

It must not carry one client's data, or one protected example's, into another's update: it is
restored in between, so that each starts from the same state. With example-level privacy a model or
a loss that is seen to change it is refused as well.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import MemberDescriptorType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.errors import FedsimError
from fedsim.models.modules import is_torchs_own
from fedsim.tasks.losses import Loss, is_fedsims_own
from fedsim.training.structure.values import Writes, memory

# Attributes of every module: its registries are saved separately, and hooks hold no data.
_MODULES_OWN = frozenset(vars(nn.Module()))
_REGISTRIES = ("_parameters", "_modules")

# References to their own parameters that torch's recurrent layers hold.
_RECURRENT = frozenset(
    {"_flat_weights", "_flat_weight_refs", "_flat_weights_names", "_all_weights"}
)

_NEVER_CHANGES = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class _SavedAttributes:
    """Attributes of one object, as they were."""

    attributes: MutableMapping[str, Any]
    names: frozenset[str]
    copies: dict[str, Any]


class MemoryRestored(Writes):  # type: ignore[no-untyped-call]
    """Restores on exit whatever memory torch's operations within have written to.

    That is, tensors of globals and closures too, which no search for a model's state would find.
    What a user's code writes by other means (numpy, Python's lists) is out of reach.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._bytes: dict[int, tuple[Tensor, Tensor]] = {}

    def save(self, tensor: Tensor) -> None:
        """Keep a copy of its memory, and where in it the tensor is."""
        if memory(tensor) not in self._bytes:
            all_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            all_bytes.set_(tensor.untyped_storage())
            self._bytes[memory(tensor)] = all_bytes, all_bytes.clone()
        self._tensors.append((tensor, tensor.detach()))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for tensor, before in reversed(self._tensors):
                tensor.data = before  # it may have been resized, or given other memory
            for all_bytes, before in self._bytes.values():
                all_bytes.copy_(before)


class OwnState:
    """Buffers, attributes and fixed parameters of a model, and attributes of a loss.

    Parameters
    ----------
    model : nn.Module
    loss : callable
        A function's attributes are those that a user set on it; of variables that it closes over
        only tensors are restored (`MemoryRestored`). May be a metric instead.
    trained : collection of str
        Names of the trained parameters, which every call gets as tensors of its own.
    strict : bool
        Whether an attribute that cannot be copied is refused; otherwise it is left as it is.

    Attributes
    ----------
    stateless : bool
        Whether nothing can change, and so nothing need be restored: the model is made of torch's
        own layers without buffers, none of which writes to its parameters, and the loss is
        fedsim's own.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, trained: Collection[str] = (), *, strict: bool = True
    ) -> None:
        self._owners = [*_named_owners("the model's ", model), *_named_owners("the loss's ", loss)]
        self._strict = strict
        # The memo of deep copies: attributes that refer to modules or parameters share them.
        models = [m for m in (model, loss) if isinstance(m, nn.Module)]
        self._shared = {id(t): t for m in models for t in (*m.parameters(), *m.modules())}
        self._modules = [module for m in models for module in m.modules()]
        self.stateless = all(_never_changes(owner) for _, owner in self._owners)
        self._untrained_parameters = (
            {} if self.stateless else _untrained_parameters(model, loss, trained)
        )
        self._may_have_changed = False
        self._snapshot()

    def _snapshot(self) -> None:
        memo = dict(self._shared)  # one for all, so that what attributes share stays shared
        self._saved = [
            (owner_name, self._save(attributes, memo))
            for owner_name, owner in self._owners
            for attributes in _attributes(owner)
        ]
        registries = [getattr(module, name) for module in self._modules for name in _REGISTRIES]
        self._registered = [(registry, dict(registry)) for registry in registries]
        # A forward may write into a parameter's tensor, or give it another by `.data = `.
        self._values = {
            name: (p, p.data, p.detach().clone()) for name, p in self._untrained_parameters.items()
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore on exit what the calls within have changed."""
        if self.stateless:
            yield
            return
        if self._may_have_changed:  # the last restoration was itself interrupted
            self._restore()
        self._snapshot()  # every time: an attribute (the round, say) may have been set since
        self._may_have_changed = True
        try:
            yield
        finally:
            self._restore()
            self._may_have_changed = False

    @property
    def changed(self) -> list[str]:
        """Names of what has changed since the last snapshot."""
        fixed = [
            name for name, (p, _, before) in self._values.items() if not _are_equal(p.data, before)
        ]
        return fixed + [
            f"{owner_name}{name}"
            for owner_name, saved in self._saved
            for name in sorted({*_own_entries(saved.attributes)} | saved.names)
            if not _are_equal(
                saved.attributes.get(name, _NOTHING), saved.copies.get(name, _NOTHING)
            )
        ]

    def _save(self, attributes: MutableMapping[str, Any], memo: dict[int, Any]) -> _SavedAttributes:
        entries, copies = _own_entries(attributes), {}
        for name, value in entries.items():
            if type(value) in _NEVER_CHANGES:
                copies[name] = value
                continue
            count = len(memo)
            try:
                copies[name] = copy.deepcopy(value, memo)
            except Exception as error:  # a user's object may raise anything when it is copied
                if self._strict:
                    raise FedsimError(
                        f"the model's or the loss's attribute {name} cannot be copied "
                        f"({type(error).__name__}: {error}); in a private run each client, or "
                        "protected example, begins with the same values: they must be plain "
                        "values, tensors or modules."
                    ) from error
                for key in [*memo][count:]:  # copies of its parts, which may be incomplete
                    del memo[key]
        return _SavedAttributes(attributes, frozenset(entries), copies)

    def _restore(self) -> None:
        # By identity: a forward may have put another module or parameter in a registry.
        for registry, entries in self._registered:
            if [*map(id, registry.values())] != [*map(id, entries.values())]:
                registry.clear()
                registry.update(entries)
        for parameter, data, before in self._values.values():
            parameter.data = data.copy_(before)
        for _, saved in self._saved:
            for name in _own_entries(saved.attributes).keys() - saved.names:
                del saved.attributes[name]
            saved.attributes.update(saved.copies)


_NOTHING = object()


def _named_owners(prefix: str, owner: object) -> list[tuple[str, object]]:
    """A module's submodules, or a function and its owners, each with a name for messages."""
    if isinstance(owner, nn.Module):
        return [(f"{prefix}{name}{name and '.'}", part) for name, part in owner.named_modules()]
    inner = owner.func if isinstance(owner, partial) else getattr(owner, "__self__", None)
    if inner is None or isinstance(inner, ModuleType | type):
        return [(prefix, owner)]
    return [(prefix, owner), *_named_owners(prefix, inner)]


def _never_changes(owner: object) -> bool:
    """Whether an object is known to change neither its attributes nor its parameters."""
    if not isinstance(owner, nn.Module):
        return is_fedsims_own(owner)
    # A module with buffers may write to them.
    return is_torchs_own(owner) and not owner._buffers and getattr(owner, "max_norm", None) is None


def _untrained_parameters(
    model: nn.Module, loss: Loss, trained: Collection[str]
) -> dict[str, nn.Parameter]:
    """Parameters that are not trained, each with a name for messages."""
    parameters = {f"the model's {n}": p for n, p in model.named_parameters() if n not in trained}
    if isinstance(loss, nn.Module):
        parameters |= {f"the loss's {name}": p for name, p in loss.named_parameters()}
    return parameters


@cache
def _slots_of(kind: type[Any]) -> Mapping[str, MemberDescriptorType]:
    """Descriptors of a class's `__slots__`, by name."""
    return {
        name: member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    }


class _Slots(MutableMapping[str, Any]):
    """An object's attributes in `__slots__`, as a mapping like its `__dict__`."""

    def __init__(self, owner: object) -> None:
        self._owner, kind = owner, cast(Any, type(owner))
        self._members = _slots_of(kind)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._members[name].__get__(self._owner)
        except AttributeError:  # one that was never set
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._members[name].__set__(self._owner, value)

    def __delitem__(self, name: str) -> None:
        self._members[name].__delete__(self._owner)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._members if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _attributes(owner: object) -> list[MutableMapping[str, Any]]:
    """Mappings that hold an object's attributes."""
    attributes: list[MutableMapping[str, Any]] = [getattr(owner, "__dict__", {})]
    if _slots_of(cast(Any, type(owner))):
        attributes.append(_Slots(owner))
    if isinstance(owner, partial):
        attributes.append(owner.keywords)
    if isinstance(owner, nn.Module):
        attributes.append(owner._buffers)
    return attributes


def _own_entries(attributes: MutableMapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in attributes.items() if k not in _MODULES_OWN and k not in _RECURRENT}


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal, as far as they can be inspected."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (one, other)]
        return kinds[0] == kinds[1] and torch.allclose(one, other, 0.0, 0.0, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list | deque):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and _are_equal(one.tolist(), other.tolist())
    if isinstance(one, (*_NEVER_CHANGES, set, frozenset, bytearray)):
        return bool(one == other) or (one != one and other != other)  # NaN is equal to NaN here
    attributes = getattr(one, "__dict__", None)
    return attributes is None or _are_equal(attributes, other.__dict__)
