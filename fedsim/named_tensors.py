"""Several inputs of a model by name: text and mask, user and item, image and table.

A model that takes several is called as ``model.forward(**inputs)``. Everywhere else they are one
thing, `NamedTensors`: what is done to a batch (indexing, copying, moving, padding) is done to each
of its tensors, so that code for one tensor of inputs need not know of names.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from fedsim.arguments import as_text
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch

if TYPE_CHECKING:
    from torch import nn

    _Base = Tensor  # to a type checker it is a tensor, since it stands where one does
else:
    _Base = object


class NamedTensors(_Base):
    """Tensors by name, ``[*lead, ...]`` each, with first dimensions in common.

    Functions of torch (`torch.cat`) and the methods below act on each tensor by itself.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        One or more, in any order; they are kept in that of their names.

    Raises
    ------
    FedsimError
        If they are not such a mapping, or not of one length.
    """

    tensors: dict[str, Tensor]

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        is_mapping = isinstance(tensors, Mapping) and len(tensors) > 0
        if not is_mapping or not all(isinstance(one, Tensor) for one in tensors.values()):
            raise FedsimError(
                f"tensors is {as_text(tensors)}; it must be a mapping of names to torch.Tensor."
            )
        require_names(tensors, "tensors")
        lengths = {name: len(one) if one.dim() else 0 for name, one in tensors.items()}
        if len({*lengths.values()}) > 1:
            raise FedsimError(f"tensors have the lengths {lengths}; they must be equal.")
        self.tensors = {name: tensors[name] for name in sorted(tensors)}
        _register()

    @classmethod
    def _of(cls, tensors: dict[str, Any]) -> NamedTensors:
        """Those of tensors that were checked, sorted by name."""
        named = cls.__new__(cls)
        named.tensors = tensors
        _register()
        return named

    def __repr__(self) -> str:  # type: ignore[override]
        shown = (f"{name}: {one.dtype} {[*one.shape]}" for name, one in self.tensors.items())
        return f"NamedTensors({', '.join(shown)})"

    def __reduce__(self) -> Any:
        return NamedTensors._of, (self.tensors,)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NamedTensors:
        given = args, kwargs or {}
        leaves = torch.utils._pytree.tree_leaves(given, _is_named)
        first = next(leaf for leaf in leaves if _is_named(leaf))

        def of_name(name: str) -> Any:
            def its_own(leaf: Any) -> Any:
                return leaf.tensors[name] if _is_named(leaf) else leaf

            return torch.utils._pytree.tree_map(its_own, given, is_leaf=_is_named)

        calls = {name: of_name(name) for name in first.tensors}
        return cls._of({name: func(*args, **kwargs) for name, (args, kwargs) in calls.items()})

    @property
    def _first(self) -> Tensor:
        return next(iter(self.tensors.values()))

    def _each(self, function: Callable[[Tensor], Tensor]) -> NamedTensors:
        return NamedTensors._of({name: function(one) for name, one in self.tensors.items()})

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, key: Any) -> Tensor:
        """The tensor of this name, or each of them at this index."""
        return self.tensors[key] if isinstance(key, str) else self._each(lambda one: one[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        for name, one in self.tensors.items():
            one[key] = value.tensors[name]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of all tensors."""
        return self._first.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether they are on a GPU."""
        return self._first.is_cuda

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all tensors."""
        return sum(one.nbytes for one in self.tensors.values())

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The first dimensions, as far as all have them in common."""
        sizes = [*zip(*(one.shape for one in self.tensors.values()), strict=False)]
        common = next((k for k, equal in enumerate(sizes) if len({*equal}) > 1), len(sizes))
        return self._first.shape[:common]

    def dim(self) -> int:
        """0: no memory format of images, say, is that of all."""
        return 0

    def is_floating_point(self) -> bool:
        """False: no operation on real numbers is one on all."""
        return False

    def to(self, device: torch.device | str) -> NamedTensors:  # type: ignore[override]
        """The same tensors on another device."""
        moved = self._each(lambda one: one.to(device))
        same = all(moved.tensors[name] is one for name, one in self.tensors.items())
        return self if same else moved

    def clone(self) -> NamedTensors:  # type: ignore[override]
        """A copy of each."""
        return self._each(torch.clone)

    def unsqueeze(self, dim: int) -> NamedTensors:
        """Each with another dimension."""
        return self._each(lambda one: one.unsqueeze(dim))

    def unbind(self, dim: int = 0) -> tuple[NamedTensors, ...]:
        """The slices along a dimension."""
        slices = {name: one.unbind(dim) for name, one in self.tensors.items()}
        return tuple(
            NamedTensors._of(dict(zip(slices, entry, strict=True)))
            for entry in zip(*slices.values(), strict=True)
        )


def _is_named(value: object) -> bool:
    return isinstance(value, NamedTensors)


@cache
def _register() -> None:
    """Make it known to `torch.func`, whose functions then take and map its tensors."""
    torch.utils._pytree.register_pytree_node(
        NamedTensors,
        lambda named: ([*named.tensors.values()], [*named.tensors]),
        lambda values, names: NamedTensors._of(dict(zip(names, values, strict=True))),
        serialized_type_name="fedsim.named_tensors.NamedTensors",
    )


def each(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)``, or that of each tensor of `NamedTensors`."""
    return x._each(function) if isinstance(x, NamedTensors) else function(x)


def by_name(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """``function(x)``, or for `NamedTensors` a dict of it by name."""
    if isinstance(x, NamedTensors):
        return {name: function(one) for name, one in x.tensors.items()}
    return function(x)


def require_names(names: Iterable[object], where: str) -> None:
    """Refuse names of inputs by which no forward could take them.

    Raises
    ------
    FedsimError
    """
    for name in names:
        if not (isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)):
            raise FedsimError(
                f"{where} has an input named {name!r}; it must be a name that an argument of the "
                "model's forward can have."
            )


def accept_named(model: nn.Module) -> nn.Module:
    """Make ``model(inputs)`` call ``model.forward(**inputs)`` if the inputs are `NamedTensors`.

    It is done by a hook: names of parameters, copies and pickles stay the model's own.
    """
    if _passed_by_name not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_passed_by_name, with_kwargs=True)
    return model


def without_names(model: nn.Module) -> nn.Module:
    """Undo `accept_named` on this very model."""
    for key, hook in [*model._forward_pre_hooks.items()]:
        if hook is _passed_by_name:
            del model._forward_pre_hooks[key], model._forward_pre_hooks_with_kwargs[key]
    return model


def _passed_by_name(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    if len(args) == 1 and isinstance(args[0], NamedTensors):
        return (), {**args[0].tensors, **kwargs}
    return None
