"""From a table to the thing that it names, with the settings that it gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from fedsim import registry
from fedsim.config.choices import Choice, model_field
from fedsim.config.keys import Section
from fedsim.config.run_config import RunConfig
from fedsim.config.sentences import sentence
from fedsim.config.values import apart
from fedsim.errors import FedsimError
from fedsim.settings import settings_of

__all__ = ["find", "make", "modules_named", "settings_for"]


def make(section: Choice, **filled: Any) -> Any:
    """The thing that a table names.

    Parameters
    ----------
    section : Choice
    filled
        What other tables say of it; it gets those that it takes.

    Raises
    ------
    FedsimError
        If there is none, or its options are not what it takes. Errors of the user's own code come
        through as they are.
    """
    # What comes along is found without the directory, whose search costs more than the rest.
    place = registry.current_directory_importable() if ":" in section.chosen else nullcontext()
    with place:
        thing = find(section)
        names = _parameters(thing)
        given = {k: v for k, v in filled.items() if names is None or k in names}
        return thing(**settings_for(section, thing, tuple(filled)), **given)


def find(section: Choice) -> Callable[..., Any]:
    """The class or function that a table names."""
    name = section.registered(section.chosen)
    return registry.find(section.kind, name, f"{section.table}.{section.selector}")


def settings_for(
    section: Choice, thing: Callable[..., Any], filled: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    """The settings that a table gives to a thing, by Python's names; options are checked here."""
    if ":" not in section.chosen:
        return section.values()
    options, table = section.values(), f"{section.table}.options"
    given = {key.replace("-", "_"): value for key, value in options.items()}
    for name in filled:
        if name in given:
            raise FedsimError(f"{table}.{name} is set; what it is follows from other keys.")
    settings = {s.name: s for s in settings_of(thing) if s.name not in filled}
    names = set(settings) if settings else _parameters(thing)
    for name in given:
        if names is not None and name not in names:
            takes = ", ".join(sorted(n.replace("_", "-") for n in names)) or "no options"
            raise FedsimError(
                f"{table}.{name.replace('_', '-')} is no setting of '{section.chosen}'; it takes "
                f"{takes}."
            )
    if not settings:
        for name in _required(thing) - {*given, *filled}:
            raise FedsimError(f"{table}.{name.replace('_', '-')} is not set; it must be given.")
        return given
    fields: dict[str, Any] = {name: model_field(setting) for name, setting in settings.items()}
    base = type("Options", (Section,), {"model_config": ConfigDict(arbitrary_types_allowed=True)})
    model: type[Section] = create_model("Options", __base__=base, **fields)
    try:
        checked = model.model_validate(given)
    except ValidationError as error:
        raise FedsimError(f"{table}.{sentence(model, error)}") from None
    return {name: getattr(checked, name) for name in settings}


def modules_named(config: RunConfig) -> list[tuple[str, str, str]]:
    """Where a config brings code that is not fedsim's: each key, what it names, and the module."""
    named = [
        ("model.loss", "loss", config.model.loss),
        *(("model.metrics", "metric", name) for name in apart(config.model.metrics)),
        *(
            (f"{table.table}.{table.selector}", table.kind, table.chosen)
            for table in _choices(config)
        ),
    ]
    modules = []
    for key, kind, name in named:
        if ":" in name:
            modules.append((key, name, name.partition(":")[0].strip()))
        elif name in registry.plugins(kind):
            modules.append((key, name, registry.plugins(kind)[name].module))
    return modules


def _choices(section: Section) -> Iterator[Choice]:
    for name in type(section).model_fields:
        inner = getattr(section, name)
        if isinstance(inner, Section):
            yield from _choices(inner)
    if isinstance(section, Choice):
        yield section


def _parameters(thing: Callable[..., Any]) -> set[str] | None:
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


def _required(thing: Callable[..., Any]) -> set[str]:
    """Those of them without a default."""
    parameters = inspect.signature(thing).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in parameters if p.kind in named and p.default is p.empty}
