"""From a table to the thing that it names, with the settings that it gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from fedsim import registry
from fedsim.config.run_config import RunConfig
from fedsim.config.sections import TaskSection
from fedsim.config.tables import Choice, all_tables
from fedsim.config.values import parameters_of, read_options_of
from fedsim.errors import FedsimError


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
    # fedsim's own data are found without the directory, whose search costs more than the rest.
    place = registry.current_directory_importable() if ":" in section.chosen else nullcontext()
    with place:
        thing = find(section)
        if inspect.isabstract(thing):
            raise FedsimError(
                f"{section.key(section.selector)} is '{section.chosen}', of which there are no "
                "objects: it must be a class that is not abstract, or a function."
            )
        names = parameters_of(thing)
        given = {k: v for k, v in filled.items() if names is None or k in names}
        return thing(**settings_for(section, thing, tuple(filled)), **given)


def find(section: Choice) -> Callable[..., Any]:
    """The class or function that a table names."""
    name = section.registered(section.chosen)
    return registry.find(section.kind, name, section.key(section.selector))


def settings_for(
    section: Choice, thing: Callable[..., Any], filled: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    """The settings that a table gives to a thing, by Python's names; options are checked here."""
    if not section.has_options(section.chosen):
        return section.values()
    return read_options_of(thing, section.chosen, section.values(), section.key("options"), filled)


def loss(section: TaskSection) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """What a table names as loss, and the settings that it gives.

    Raises
    ------
    FedsimError
        If there is none, or its options are not what it takes.
    """
    thing = find(section)
    return thing, settings_for(section, thing, _compared(thing))


def metrics(section: TaskSection) -> dict[str, tuple[Callable[..., Any], Mapping[str, Any]]]:
    """The same of each metric, by what it is called in reports.

    That is the last part of its name, and the values of its options: ``top-k(k=3)`` is called
    ``top-k-3``.

    Raises
    ------
    FedsimError
        If two would be called the same.
    """
    chosen: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {}
    for name, options in section.named_metrics():
        thing = registry.find("metric", name, "task.metrics")
        label = "-".join([name.rpartition(":")[2], *map(str, options.values())])
        if label in chosen:
            raise FedsimError(
                f"task.metrics = '{section.metrics}' has two that would be called '{label}'; once "
                "is enough, and others must have other names or options."
            )
        table = f"task.metrics.{name}"
        chosen[label] = thing, read_options_of(thing, name, options, table, _compared(thing))
    return chosen


def _compared(thing: Callable[..., Any]) -> tuple[str, ...]:
    """What a function calls outputs and targets, its first two parameters; none of a class."""
    if isinstance(thing, type):
        return ()
    try:
        return tuple(inspect.signature(thing).parameters)[:2]
    except ValueError:
        return ()


def modules_named(config: RunConfig) -> list[tuple[str, str, str]]:
    """Where a config brings code that is not fedsim's: each key, what it names, and the module."""
    named = [
        *(("task.metrics", "metric", name) for name, _ in config.task.named_metrics()),
        *(
            (table.key(table.selector), table.kind, table.chosen)
            for table in all_tables(config)
            if isinstance(table, Choice)
        ),
    ]
    modules = []
    for key, kind, name in named:
        if ":" in name:
            modules.append((key, name, name.partition(":")[0].strip()))
        elif name in registry.plugins(kind):
            modules.append((key, name, registry.plugins(kind)[name].module))
    return modules
