"""Settings: types, ranges and descriptions of a dataclass's fields, and checks of their values.

fedsim's config tables, its registered kinds and users' own classes all describe their options in
this one way. A field states its type, its range and its meaning once; its docstring, or the `Doc`
of a type that several fields share, is its help text::

    clip_norm: Annotated[float, Gt(0)] = 1.0
    "The largest L2 norm of a row."

A type is a number, a truth value, a string, a `Literal` of words, one of these or None (which a
config writes as the empty string), or any type for which a `Text` gives a reader and a writer.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import BaseMetadata, GroupedMetadata
from annotated_types import Ge as Ge
from annotated_types import Gt as Gt
from annotated_types import Interval as Interval
from annotated_types import Le as Le
from annotated_types import Lt as Lt
from typing_extensions import Doc as Doc

from fedsim.arguments import Expected, as_text, expected, quoted_alternatives, resolved
from fedsim.errors import FedsimError

REQUIRED = dataclasses.MISSING
"""Marks, in place of a default, that there is none."""

# Larger values are mistakes, and single precision or Flower's records could not hold them.
MAX_FLOAT, MAX_INT, MAX_STRING = 1e30, 2**63 - 1, 10_000


@dataclass(frozen=True)
class Constraint:
    """A rule that no range expresses: a test ``holds``, and what is allowed, in words."""

    holds: Callable[[Any], bool]
    words: str


@dataclass(frozen=True)
class Text:
    """How a config writes a value that is no number, word or truth value.

    Attributes
    ----------
    read : callable
        Makes the value from a string, a number or a list; raises `FedsimError` or ValueError
        with a message that says what is allowed.
    write : callable
        Makes the string from the value.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], str]


def read_weights(value: object) -> tuple[float, ...]:
    """Declared weights from ``"3,1,2"``, a number, or a sequence; empty for none.

    Raises
    ------
    NotAllowedError
        If one is no number from 0 to a million.
    """
    text = str(value).strip("[]() ")
    try:
        weights = tuple(map(float, text.split(","))) if text else ()
    except ValueError:
        weights = (-1.0,)
    if not all(0 <= weight <= 1e6 for weight in weights):
        raise NotAllowedError("numbers from 0 to 1,000,000, separated by commas, such as '3,1,2'")
    return weights


def write_weights(weights: Iterable[float]) -> str:
    """Weights in the form that `read_weights` reads."""
    return ",".join(repr(float(weight)).removesuffix(".0") for weight in weights)


@dataclass(frozen=True)
class NamesPath:
    """Marks a setting whose value may be the path of a file or directory.

    Attributes
    ----------
    use : "always", "training", "location" or "operator"
        In this order: an input of the run, which its trained model needs too; an input of the
        training alone; a folder that is searched for inputs; a path that only the operator's
        machines open.
    is_name : callable
        Whether a value is a name or a formula, rather than a path.
    prefix : str
        What stands before a path in the value.
    """

    use: Literal["always", "training", "location", "operator"] = "always"
    is_name: Callable[[str], bool] = lambda _: False
    prefix: str = ""


class NotAllowedError(Exception):
    """A value that a setting may not have; its message is only what is allowed, in words."""


@dataclass(frozen=True)
class Setting:
    """One field of a dataclass as a setting of a config.

    Attributes
    ----------
    name, key : str
        Its name in Python, and its key (kebab-case) in a config.
    type : type
        Type of its values, without the metadata of `Annotated`.
    metadata : tuple
        Metadata of `Annotated`: ranges, `Doc`, `Text`.
    default : object
        Default value; `REQUIRED` if there is none.
    home : type
        The class whose body has the field.
    """

    name: str
    key: str
    type: Any
    metadata: tuple[Any, ...]
    default: Any
    home: type

    @property
    def doc(self) -> str:
        """Help text: the field's docstring, or the `Doc` of its type; empty without either."""
        shared = next((m.documentation for m in self.metadata if isinstance(m, Doc)), "")
        of_class = _field_docstrings(self.home.__module__).get(self.home.__name__, {})
        return of_class.get(self.name, shared)

    @property
    def text(self) -> Text | None:
        """How a config writes its values; None if as plain numbers, words or truth values."""
        return next((m for m in self.metadata if isinstance(m, Text)), None)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The allowed words of a `Literal`; empty for any other type."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def absent(self, key: str) -> FedsimError:
        """The error for a config that lacks this setting, which has no default, under ``key``."""
        description = f": {self.doc[0].lower()}{self.doc[1:]}" if self.doc else "."
        return FedsimError(f"{key} is not set; it must be given{description}")

    def read(self, value: Any) -> Any:
        """The Python value of a config's value.

        Raises
        ------
        NotAllowedError
            If it is of another type, or outside of its range.
        FedsimError
            If its `Text` cannot read it; the message is the reader's own.
        """
        if self.text is not None:
            try:
                return self.text.read(value)
            except FedsimError:
                raise
            except (TypeError, AttributeError, ValueError):
                raise NotAllowedError("a string, as its description says") from None
        value = _typed(value, self.type)
        if broken := _broken_rules(self.metadata, value):
            raise NotAllowedError(_in_words(broken))
        if words := _beyond_use(value):
            raise NotAllowedError(words)
        return value

    def write(self, value: Any) -> Any:
        """A value as a config writes it; the empty string for None and for `REQUIRED`."""
        if value is None or value is REQUIRED:
            return ""
        return self.text.write(value) if self.text else value


def settings_of(subject: Any) -> tuple[Setting, ...]:
    """Settings of a dataclass or of an object of one: its init fields. Empty for anything else."""
    kind = subject if isinstance(subject, type) else type(subject)
    return _settings_of(kind) if dataclasses.is_dataclass(kind) else ()


@cache
def _settings_of(kind: type) -> tuple[Setting, ...]:
    settings = []
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        home = next(c for c in kind.__mro__ if field.name in vars(c).get("__annotations__", {}))
        names = vars(sys.modules[home.__module__])
        annotation, metadata = resolved(vars(home)["__annotations__"][field.name], names), []
        if get_origin(annotation) is Annotated:
            annotation, *metadata = get_args(annotation)
        default = field.default
        if field.default_factory is not REQUIRED:
            default = field.default_factory()
        key = field.name.replace("_", "-")
        flat = tuple(_flat(metadata))
        settings.append(Setting(field.name, key, annotation, flat, default, home))
    return tuple(settings)


@cache
def _field_docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """One-line docstrings of the fields of a module's classes; empty if it has no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, SyntaxError):
        return {}
    docstrings: dict[str, dict[str, str]] = {}
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        fields = docstrings.setdefault(kind.name, {})
        for pair in pairwise(kind.body):
            match pair:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    fields.setdefault(name, " ".join(text.split()))
    return docstrings


def _flat(metadata: list[Any]) -> Iterator[Any]:
    for entry in metadata:
        if isinstance(entry, GroupedMetadata):
            yield from entry
        else:
            yield entry


def _typed(value: Any, kind: Any) -> Any:
    """Convert a value from TOML or Flower to a setting's type; an int serves as a float."""
    optional = get_origin(kind) in (Union, UnionType) and type(None) in get_args(kind)
    if optional and value in ("", None):
        return None
    kinds = [k for k in get_args(kind) if k is not type(None)] if optional else [kind]
    if isinstance(value, float) and not math.isfinite(value) and float in kinds:
        raise NotAllowedError("a finite number")
    if not any(expected(k).fits(value) for k in kinds):
        words = " or ".join(expected(k).words for k in kinds)
        in_files = all(get_origin(k) is Literal or k in _FILE_TYPES for k in kinds)
        raise NotAllowedError(words if in_files else f"{words}, which only Python can give")
    if type(value) not in _FILE_TYPES:  # numpy's numbers, which no file can hold
        if isinstance(value, Integral):
            value = int(value)
        elif isinstance(value, Real):
            value = float(value)
    if float in kinds and isinstance(value, int):
        return float(value) if abs(value) <= sys.float_info.max else value
    return value


_FILE_TYPES = (float, int, bool, str, dict)
"""Types of a config's values."""


@dataclass(frozen=True)
class _Limit:
    attribute: str
    compare: Callable[[Any, Any], bool]
    words: str

    def holds(self, value: float, limit: BaseMetadata) -> bool:
        return self.compare(value, getattr(limit, self.attribute))

    def bound_text(self, limit: BaseMetadata) -> str:
        bound = getattr(limit, self.attribute)
        return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


_LIMITS: Mapping[type[BaseMetadata], _Limit] = {
    Gt: _Limit("gt", operator.gt, "greater than"),
    Ge: _Limit("ge", operator.ge, "at least"),
    Lt: _Limit("lt", operator.lt, "less than"),
    Le: _Limit("le", operator.le, "at most"),
}


def _broken_rules(rules: Iterable[Any], value: Any) -> list[Any]:
    """The ranges that a value is outside of, and the constraints that it does not meet."""
    is_number = isinstance(value, int | float | Real) and not isinstance(value, bool)
    return [
        rule
        for rule in rules
        if (isinstance(rule, Constraint) and value is not None and not rule.holds(value))
        or (is_number and type(rule) in _LIMITS and not _LIMITS[type(rule)].holds(value, rule))
    ]


def _in_words(rules: Iterable[Any]) -> str:
    words = [rule.words for rule in rules if isinstance(rule, Constraint)]
    limits = {
        type(rule): _LIMITS[type(rule)].bound_text(rule) for rule in rules if type(rule) in _LIMITS
    }
    if limits.keys() == {Ge, Le}:
        words.append(f"between {limits[Ge]} and {limits[Le]}")
    else:
        words += [f"{_LIMITS[kind].words} {bound}" for kind, bound in limits.items()]
    return " and ".join(words)


def _beyond_use(value: Any) -> str:
    if isinstance(value, float):
        return "" if abs(value) <= MAX_FLOAT else f"at most {MAX_FLOAT:g}"
    if isinstance(value, int):
        return "" if abs(value) <= MAX_INT else "at most 2^63 - 1"
    if isinstance(value, str) and len(value) > MAX_STRING:
        return f"at most {MAX_STRING:,} characters"
    if isinstance(value, str) and re.search("[\x00-\x1f\x7f-\x9f\ud800-\udfff]", value):
        return "without control characters and valid UTF-8"
    return ""


def check_settings(subject: Any, prefix: str = "") -> None:
    """Refuse an object whose field values have the wrong type or are out of range.

    A field with a `Text` may be given as a config writes it: it is read and replaced in place.

    Raises
    ------
    FedsimError
        The message names the setting (after ``prefix``), its value and what is allowed.
    """
    for setting, of_type, rules in _checks(subject.__class__):
        value = getattr(subject, setting.name)
        if type(value) in of_type.types or of_type.test(value):
            if not (broken := _broken_rules(rules, value)):
                continue
            words = _in_words(broken)
        elif setting.text is not None:
            # Given as a config writes it: replace it with the value that it stands for.
            read = read_setting(setting, value, f"{prefix}{setting.key}")
            object.__setattr__(subject, setting.name, read)
            continue
        else:
            words = of_type.words
        raise FedsimError(f"{prefix}{setting.key} is {as_text(value)}; it must be {words}.")


@cache
def _checks(kind: type) -> tuple[tuple[Setting, Expected, tuple[Any, ...]], ...]:
    """Settings of a class, each with what its type allows and with its ranges and rules."""
    rules = (Constraint, *_LIMITS)
    return tuple(
        (setting, expected(setting.type), tuple(m for m in setting.metadata if type(m) in rules))
        for setting in settings_of(kind)
    )


def allowed(setting: Setting) -> str:
    """Allowed values of a setting, in words; empty if every value of its type is allowed."""
    if setting.choices:
        return quoted_alternatives(setting.choices)
    return _in_words(setting.metadata)


def type_in_words(kind: Any) -> str:
    """A setting's type in words, for documentation."""
    if get_origin(kind) is Literal:
        return "a word"
    options = [option for option in get_args(kind) if option is not type(None)]
    if len(options) < len(get_args(kind)) and options:
        return f"{type_in_words(options[0])}, or '' for unset"
    return expected(kind).words if kind in (float, int, bool) else "a string"


def read_setting(setting: Setting, value: Any, key: str) -> Any:
    """The Python value of a config's value for a setting.

    Raises
    ------
    FedsimError
        If it is not allowed; the message names ``key``.
    """
    try:
        return setting.read(value)
    except NotAllowedError as error:
        raise FedsimError(f"{key} = {as_text(value)}; it must be {error}.") from None
    except FedsimError as error:
        words = str(error)
        raise FedsimError(words if key in words else f"{key} = {as_text(value)}: {words}") from None


def read_settings(
    settings: Iterable[Setting], entries: Mapping[str, Any], table: str
) -> dict[str, Any]:
    """Values by Python name, from ``entries`` by key and from defaults.

    Raises
    ------
    FedsimError
        If one is not allowed, or is not given and has no default.
    """
    values = {}
    for setting in settings:
        key, value = f"{table}.{setting.key}", setting.default
        if setting.key in entries:
            value = read_setting(setting, entries[setting.key], key)
        if value is REQUIRED:
            raise setting.absent(key)
        values[setting.name] = value
    return values
