"""Settings: what a dataclass says of its fields, and whether its values are as it says."""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import BaseMetadata, Ge, GroupedMetadata, Gt, Le, Lt
from typing_extensions import Doc

from fedsim.errors import FedsimError

__all__ = [
    "REQUIRED",
    "Between",
    "Doc",
    "Ge",
    "Gt",
    "Le",
    "Lt",
    "Setting",
    "Text",
    "allowed",
    "check_settings",
    "settings_of",
]

REQUIRED = dataclasses.MISSING
"""In the place of a default: there is none."""


@dataclass(frozen=True)
class Between:
    """A number from ``low`` to ``high``."""

    low: float
    high: float

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return f"between {self.low:g} and {self.high:g}"


@dataclass(frozen=True)
class Text:
    """How a value that is no number, word or truth value is written in a config.

    Attributes
    ----------
    read : callable
        The value from a string, a number or a list; raises `FedsimError` or ValueError in words
        that say what is allowed.
    write : callable
        The string.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], str]


@dataclass(frozen=True)
class Setting:
    """One field of a dataclass, as a config sees it.

    Attributes
    ----------
    name, key : str
        In Python and, in kebab-case, in a config.
    type : type
        Without what it is annotated with.
    metadata : tuple
        That: ranges, `Doc`, `Text`.
    default : object
        `REQUIRED` if there is none.
    """

    name: str
    key: str
    type: Any
    metadata: tuple[Any, ...]
    default: Any

    @property
    def doc(self) -> str:
        """What it is for."""
        return next((m.documentation for m in self.metadata if isinstance(m, Doc)), "")

    @property
    def text(self) -> Text | None:
        """How it is written, where that is not plain."""
        return next((m for m in self.metadata if isinstance(m, Text)), None)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The words that it may be, if it is one of a few."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


def settings_of(thing: Any) -> tuple[Setting, ...]:
    """The fields that a dataclass, or an object of one, is made with; none of anything else."""
    kind = thing if isinstance(thing, type) else type(thing)
    return _settings_of(kind) if dataclasses.is_dataclass(kind) else ()


@cache
def _settings_of(kind: type) -> tuple[Setting, ...]:
    settings = []
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        annotation = _annotation(kind, field.name)
        plain, metadata = annotation, ()
        if get_origin(annotation) is Annotated:
            plain, *metadata = get_args(annotation)  # type: ignore[assignment]
        default = field.default
        if field.default_factory is not REQUIRED:
            default = field.default_factory()
        key = field.name.replace("_", "-")
        settings.append(Setting(field.name, key, plain, tuple(_apart(metadata)), default))
    return tuple(settings)


def _annotation(kind: type, name: str) -> Any:
    """A field's type; what other annotations name need not be there."""
    home = next(c for c in kind.__mro__ if name in vars(c).get("__annotations__", {}))
    annotation = vars(home)["__annotations__"][name]
    if isinstance(annotation, str):
        scope = vars(sys.modules[home.__module__])
        return eval(annotation, {**vars(typing), **scope})
    return annotation


def _apart(metadata: Any) -> typing.Iterator[Any]:
    for entry in metadata:
        if isinstance(entry, GroupedMetadata):
            yield from entry
        else:
            yield entry


_LIMITS: Mapping[type[BaseMetadata], tuple[str, Callable[[Any, Any], bool], str]] = {
    Gt: ("gt", operator.gt, "above"),
    Ge: ("ge", operator.ge, "at least"),
    Lt: ("lt", operator.lt, "below"),
    Le: ("le", operator.le, "at most"),
}


def check_settings(thing: Any, prefix: str = "") -> None:
    """Refuse an object whose values are outside of what its class says of them.

    Raises
    ------
    FedsimError
        Naming the setting (after ``prefix``), its value and what is allowed.
    """
    for setting in settings_of(thing):
        value = getattr(thing, setting.name)
        if not _allows(setting, value):
            said = f"'{value}'" if isinstance(value, str) else value
            raise FedsimError(f"{prefix}{setting.key} is {said}; it must be {allowed(setting)}.")


def _allows(setting: Setting, value: Any) -> bool:
    if setting.choices:
        return value in setting.choices
    if not isinstance(value, int | float) or isinstance(value, bool):
        return True
    for entry in setting.metadata:
        if isinstance(entry, Between) and not entry.low <= value <= entry.high:
            return False
        if type(entry) in _LIMITS:
            name, holds, _ = _LIMITS[type(entry)]
            if not holds(value, getattr(entry, name)):
                return False
    return True


def allowed(setting: Setting) -> str:
    """What a setting may be, in words; empty if anything of its type."""
    if setting.choices:
        *others, last = [f"'{choice}'" for choice in setting.choices]
        return f"{', '.join(others)} or {last}" if others else last
    between = [str(entry) for entry in setting.metadata if isinstance(entry, Between)]
    if between:
        return between[0]
    limits = {
        type(entry): getattr(entry, _LIMITS[type(entry)][0])
        for entry in setting.metadata
        if type(entry) in _LIMITS
    }
    if limits.keys() == {Ge, Le}:
        return str(Between(limits[Ge], limits[Le]))
    return " and ".join(f"{_LIMITS[limit][2]} {value:g}" for limit, value in limits.items())
