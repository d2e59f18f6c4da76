"""Check values against type annotations, and say in words what an annotation allows.

Public functions are decorated with `check_arguments`; the fields of dataclasses are checked by
`fedsim.settings`, which reads configs by the same types. Public packages call `explain_calls`, so
that an unknown or a missing argument of any public class is a sentence too.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import typing
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, time
from numbers import Integral, Real
from types import FunctionType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from fedsim.errors import FedsimError
from fedsim.synonyms import closest_argument

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K", bound=type)


@dataclass(frozen=True)
class Expected:
    """What an annotation allows.

    Attributes
    ----------
    words : str
        Description for messages, such as "a number"; empty if every value is allowed.
    test : callable
        Whether a value is of the type.
    types : set of types
        Exact types that always pass: a look-up here is faster than ``test``.
    """

    words: str
    test: Callable[[Any], bool]
    types: frozenset[type] = frozenset()

    def fits(self, value: Any) -> bool:
        """Whether a value is of the type."""
        return type(value) in self.types or self.test(value)


_ANY_VALUE = Expected("", lambda value: True)


def _is(*kinds: type, but: tuple[type, ...] = ()) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and not isinstance(value, but)


# To Python a string is a sequence of strings; where a sequence is expected it is a mistake.
_TEXT = (str, bytes)
_TYPES: Mapping[Any, Expected] = {
    float: Expected("a number", _is(Real, but=(bool,)), frozenset({float, int})),
    int: Expected("a whole number", _is(Integral, but=(bool,)), frozenset({int})),
    bool: Expected("true or false", _is(bool), frozenset({bool})),
    str: Expected("a string", _is(str), frozenset({str})),
    dict: Expected("a table", _is(dict)),
    tuple: Expected("a tuple", _is(tuple)),
    list: Expected("a list", _is(list)),
    type(None): Expected("None", lambda value: value is None, frozenset({type(None)})),
    # Not `isinstance(value, Sequence)`: arrays and tensors are allowed, and are no `Sequence`.
    abc.Sequence: Expected(
        "a sequence",
        lambda value: (
            hasattr(value, "__len__")
            and hasattr(value, "__getitem__")
            and getattr(value, "ndim", 1) != 0
            and not isinstance(value, (*_TEXT, abc.Mapping, abc.Set))
        ),
    ),
    abc.Iterable: Expected("a list or another iterable but a string", _is(abc.Iterable, but=_TEXT)),
    abc.Collection: Expected("a collection", _is(abc.Collection, but=_TEXT)),
    abc.Mapping: Expected("a mapping", _is(abc.Mapping)),
    abc.Callable: Expected("a function", callable),
}


@functools.cache
def expected(annotation: Any) -> Expected:
    """What an annotation allows; the elements of containers are not checked."""
    origin = get_origin(annotation) or annotation
    arguments = get_args(annotation)
    if origin is Annotated:
        return expected(arguments[0])
    if origin is Literal:
        return Expected(
            quoted_alternatives(arguments),
            lambda value: isinstance(value, str | int) and value in arguments,
        )
    if origin in (typing.Union, UnionType):
        options = [expected(argument) for argument in arguments]
        if _ANY_VALUE in options:
            return _ANY_VALUE
        return Expected(
            " or ".join(dict.fromkeys(option.words for option in options)),
            lambda value: any(option.test(value) for option in options),
            frozenset().union(*(option.types for option in options)),
        )
    if origin in _TYPES:
        return _TYPES[origin]
    if not isinstance(origin, type) or origin in (Any, object):
        return _ANY_VALUE
    words = f"an object of {_public_name(origin)}"
    if not getattr(origin, "_is_protocol", False):
        return Expected(words, _is(origin))
    methods = [name for name, member in vars(origin).items() if name[0] != "_" and callable(member)]
    return Expected(words, lambda value: all(hasattr(value, method) for method in methods))


def _public_name(kind: type) -> str:
    """Name under which people import a class: in the outermost package that exports it.

    Classes of fedsim may be exported by a package beside their own, such as `fedsim.strategies`.
    """
    if kind.__module__ == "builtins":
        return kind.__name__
    parts = kind.__module__.split(".")
    packages = [".".join(parts[:end]) for end in range(1, len(parts))]
    packages += sorted(
        name
        # A copy in one step: another thread may import a module meanwhile.
        for name, module in sys.modules.copy().items()
        if re.fullmatch(r"fedsim\.\w+", name) and kind.__name__ in getattr(module, "__all__", ())
    )
    package = next(
        (p for p in packages if getattr(sys.modules.get(p), kind.__name__, None) is kind),
        kind.__module__,
    )
    return f"{package}.{kind.__qualname__}"


def resolved(annotation: Any, scope: Mapping[str, Any]) -> Any:
    """The type that an annotation written as a string stands for.

    Each is resolved alone: another annotation of the same class may use a name that is imported
    for type checkers only.
    """
    holder = SimpleNamespace(__annotations__={"it": annotation})
    return typing.get_type_hints(holder, {**vars(typing), **scope}, include_extras=True)["it"]


def check_arguments(function: F) -> F:
    """Make a function or method refuse arguments whose types differ from its annotations.

    Raises
    ------
    FedsimError
        When the function is called: it shows the value and what is allowed, or names an argument
        that is unknown or missing.
    """
    signature = inspect.signature(function)

    @functools.cache
    def of(name: str) -> Expected:
        parameter = signature.parameters[name]
        if parameter.annotation is parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
            return _ANY_VALUE
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        try:
            return expected(resolved(parameter.annotation, scope))
        except NameError:  # a type that is imported for type checkers only
            return _ANY_VALUE

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        try:
            arguments = signature.bind(*args, **keywords).arguments
        except TypeError:
            raise _wrong_call(function, args, keywords) from None
        for name, value in arguments.items():
            require(name, value, of(name))
        return function(*args, **keywords)

    return typing.cast(F, checked)


def explain_calls(package: str) -> None:
    """Make the public classes of a package name an argument that is unknown or missing.

    Parameters
    ----------
    package : str
        Its name; its classes are those in its ``__all__``. The classes themselves are changed, so
        that it does not matter from where they are imported.
    """
    module = sys.modules[package]
    for name in module.__all__:
        # Not `getattr`: what a package imports at first use is imported then.
        if isinstance(kind := vars(module).get(name), type):
            explain_call(kind)


def explain_call(kind: K) -> K:
    """Make one class of fedsim's name an argument of its ``__init__`` that is unknown or missing.

    Calling the class with such an argument raises a `FedsimError` instead of a TypeError.
    """
    init = vars(kind).get("__init__")
    if not isinstance(init, FunctionType) or hasattr(init, "__wrapped__"):
        return kind  # inherited, Python's own, or explained already

    @functools.wraps(init)
    def explained(self: Any, /, *args: Any, **keywords: Any) -> None:
        try:
            init(self, *args, **keywords)
        except TypeError as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is None:  # the call itself failed, not the body
                raise _wrong_call(init, (self, *args), keywords) from None
            raise

    kind.__init__ = explained  # type: ignore[misc]
    return kind


def unknown_argument_error(function: Callable[..., Any], name: str) -> FedsimError:
    """The error for a keyword that a function or class does not take."""
    called, named = _callable_name(function), [p.name for p in _parameters(function)]
    start = f"{hint} It" if (hint := closest_argument(name, named)) else " it"
    takes = ", ".join(named) or "no arguments"
    return FedsimError(f"{called} has no argument {name!r};{start} takes {takes}.")


def _wrong_call(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> FedsimError:
    """The error for a call whose arguments do not fit the function's parameters."""
    parameters = inspect.signature(function).parameters
    named = _parameters(function)
    names = [p.name for p in named]
    for name in keywords:
        if name not in names:
            return unknown_argument_error(function, name)
    # A method's first argument is its object.
    positions = args[1:] if next(iter(parameters), "") in _OWN else args
    by_position = [p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD]
    given = {*by_position[: len(positions)], *keywords}
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in given:
            return FedsimError(
                f"{_callable_name(function)} needs the argument '{parameter.name}'; it takes "
                f"{', '.join(names)}."
            )
    return FedsimError(
        f"{_callable_name(function)} takes {', '.join(by_position) or 'nothing'} by position, each "
        f"once; name the arguments, as in {names[-1] if names else 'x'}=..."
    )


_OWN = ("self", "cls")


def _callable_name(function: Callable[..., Any]) -> str:
    """What a user calls: a class by the name of its ``__init__``'s class."""
    return function.__qualname__.removesuffix(".__init__").rpartition(".")[2]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Parameters that can be given by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind in by_name and p.name not in _OWN]


def require(name: str, value: Any, allowed: Expected) -> None:
    """Refuse a value that does not fit.

    Raises
    ------
    FedsimError
    """
    if not allowed.fits(value):
        words = allowed.words
        if isinstance(value, type) and value.__module__ != "builtins":
            words += f", such as {value.__name__}(...) makes"
        raise FedsimError(f"{name} is {as_text(value)}; it must be {words}.")


def quoted_alternatives(words: tuple[Any, ...]) -> str:
    """The words quoted and joined for a sentence: ``'a', 'b' or 'c'``."""
    *others, last = [f"'{word}'" for word in words]
    return f"{', '.join(others)} or {last}" if others else last


def as_text(value: Any) -> str:
    """A value as a message shows it, shortened if it is long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, date | time):  # TOML has them; a datetime is a date
        return str(value)
    text = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
    if "\n" in text:  # arrays, models
        return f"an object of {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."
