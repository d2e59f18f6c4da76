"""Options of what has no keys of its own: they are checked by what its class or function says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from fedsim.config.choices import model_field
from fedsim.config.keys import Section
from fedsim.config.sentences import sentence
from fedsim.errors import FedsimError
from fedsim.settings import settings_of

__all__ = ["checked", "parameters_of", "required_of"]


def checked(
    name: str,
    thing: Callable[..., Any],
    options: Mapping[str, Any],
    table: str,
    filled: Collection[str] = (),
) -> Mapping[str, Any]:
    """What a class or function is called with, by Python's names.

    Parameters
    ----------
    name : str
        What a config calls it.
    thing : callable
    options : mapping of key to value
        In kebab-case, or as Python writes them.
    table : str
        Where they stand.
    filled : collection of str
        What it gets from elsewhere.

    Raises
    ------
    FedsimError
        If they are not what it takes, by their types and ranges where it is a dataclass and by
        their names where it is not.
    """
    given = {key.replace("-", "_"): value for key, value in options.items()}
    for key in filled:
        if key in given:
            raise FedsimError(f"{table}.{key} is set; what it is follows from other keys.")
    settings = {s.name: s for s in settings_of(thing) if s.name not in filled}
    names = set(settings) if settings else parameters_of(thing)
    for key in given:
        if names is not None and key not in names:
            takes = ", ".join(sorted(n.replace("_", "-") for n in names - {*filled}))
            raise FedsimError(
                f"{table}.{key.replace('_', '-')} is no setting of '{name}'; it takes "
                f"{takes or 'no options'}."
            )
    if not settings:
        for key in required_of(thing) - {*given, *filled}:
            raise FedsimError(f"{table}.{key.replace('_', '-')} is not set; it must be given.")
        return given
    fields: dict[str, Any] = {key: model_field(setting) for key, setting in settings.items()}
    base = type("Options", (Section,), {"model_config": ConfigDict(arbitrary_types_allowed=True)})
    model: type[Section] = create_model("Options", __base__=base, **fields)
    try:
        values = model.model_validate(given)
    except ValidationError as error:
        raise FedsimError(f"{table}.{sentence(model, error)}") from None
    return {key: getattr(values, key) for key in settings}


def parameters_of(thing: Callable[..., Any]) -> set[str] | None:
    """Names of the keywords that a callable takes; None if any."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError as error:
        raise FedsimError(
            f"{thing!r} is no Python function or class with known parameters."
        ) from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def required_of(thing: Callable[..., Any]) -> set[str]:
    """Those of them without a default."""
    parameters = inspect.signature(thing).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in parameters if p.kind in named and p.default is p.empty}
