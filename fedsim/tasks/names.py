"""What a config's name of a loss or a metric stands for, with its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fedsim.errors import FedsimError
from fedsim.tasks.losses.base import Loss
from fedsim.tasks.metrics.base import MeanOf, Metric

__all__ = ["loss_of", "metric_of"]


def loss_of(name: str, thing: Callable[..., Any], settings: Mapping[str, Any]) -> Loss:
    """A loss: an object of a class, or a function of outputs and targets.

    Parameters
    ----------
    name : str
        For sentences.
    thing : callable
        What the name stands for.
    settings : mapping of str to value
        A class is made with them; a function takes them beside outputs and targets.

    Raises
    ------
    FedsimError
        If objects of the class are no functions.
    """
    made: Any = thing(**settings) if isinstance(thing, type) else _with(thing, settings)
    if not callable(made):
        raise FedsimError(
            f"task.loss is '{name}', of which there are objects that cannot be called; it must be "
            "a function of outputs and targets, or a class of them."
        )
    return made  # type: ignore[no-any-return]


def metric_of(thing: Callable[..., Any], settings: Mapping[str, Any]) -> Metric:
    """A metric: an object of a `Metric`'s class, or the mean of what a function gives.

    The function takes outputs and targets, and settings beside them, to one number for each
    example, ``[B]``. An object of any other class is such a function.
    """
    if not isinstance(thing, type):
        return MeanOf(_with(thing, settings))
    made = thing(**settings)
    return made if isinstance(made, Metric) else MeanOf(made)


def _with(function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    return partial(function, **settings) if settings else function
