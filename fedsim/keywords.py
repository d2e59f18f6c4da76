"""The keywords that a class or function takes, and checks of those that a config gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedsim.errors import FedsimError
from fedsim.settings import read_settings, settings_of


def arguments_of(
    factory: Callable[..., Any],
    name: str,
    values: Mapping[str, Any],
    table: str,
    derived: Collection[str] = (),
) -> dict[str, Any]:
    """Check the settings given for a class or function; return keyword arguments by Python name.

    Parameters
    ----------
    factory : callable
    name : str
        Its name in a config.
    values : mapping of key to value
        Settings by key, in kebab-case or snake_case, as a config writes them.
    table : str
        Dotted name of the settings' table, for messages.
    derived : collection of str
        Arguments that follow from other keys; they are refused among ``values``.

    Raises
    ------
    FedsimError
        If a setting is unknown or missing or, for a dataclass, has a wrong type or range.
    """
    arguments = {key.replace("-", "_"): value for key, value in values.items()}
    settings = {s.name: s for s in settings_of(factory) if s.name not in derived}
    keywords, takes_any = keywords_of(factory)
    takes = {*(settings or keywords)} - {*derived}
    for key in arguments:
        dotted = f"{table}.{key.replace('_', '-')}"
        if key in derived:
            raise FedsimError(f"{dotted} is set; its value follows from other keys: leave it out.")
        if key not in takes and (settings or not takes_any):
            known = ", ".join(sorted(key.replace("_", "-") for key in takes)) or "no options"
            raise FedsimError(f"{dotted} is not a setting of '{name}'; it takes {known}.")
    if settings:
        by_key = {settings[key].key: value for key, value in arguments.items()}
        return read_settings(settings.values(), by_key, table)
    for key, parameter in keywords.items():
        if parameter.default is parameter.empty and key not in {*arguments, *derived}:
            raise FedsimError(f"{table}.{key.replace('_', '-')} is not set; it must be given.")
    return arguments


def keywords_of(function: Callable[..., Any]) -> tuple[Mapping[str, inspect.Parameter], bool]:
    """The keywords that a callable names, and whether it also takes any other (``**keywords``).

    Raises
    ------
    FedsimError
        If it has no known signature.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise FedsimError(
            f"{function!r} is not a Python function or class with known parameters."
        ) from error
    keywords = {
        p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    return keywords, any(p.kind is p.VAR_KEYWORD for p in parameters)


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The offered keywords that a callable takes, which is called with keywords alone.

    Raises
    ------
    FedsimError
        If it has no known signature, or needs an argument by position.
    """
    keywords, takes_any = keywords_of(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise FedsimError(
                f"{function!r} needs '{parameter.name}' by position; it must take it as a keyword."
            )
    return {name: value for name, value in offered.items() if takes_any or name in keywords}


def complete_arguments(
    function: Callable[..., Any], name: str, offered: Mapping[str, Any]
) -> dict[str, Any]:
    """The offered keywords that a callable takes, which must be all that it needs.

    Raises
    ------
    FedsimError
        If `accepted` refuses it, or it needs an argument that is not offered; the message calls it
        by ``name``.
    """
    for key, parameter in keywords_of(function)[0].items():
        if parameter.default is parameter.empty and key not in offered:
            raise FedsimError(
                f"'{name}' needs the argument '{key}', which must have a default; it is called "
                f"with {', '.join(offered)}."
            )
    return accepted(function, offered)
