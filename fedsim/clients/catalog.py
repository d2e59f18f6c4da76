"""Local algorithms, losses and metrics by the names that a config gives them.

``name`` is one of `ALGORITHMS` or ``"module:Class"``, a `LocalAlgorithm` of the user's own;
options are a dataclass's fields in kebab-case, written ``"a=1,b=2"``.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fedsim.clients.adadp import AdadpLR
from fedsim.clients.adam import AdadpNoise, Adam, RMSProp
from fedsim.clients.dpsgd import DPSGD
from fedsim.clients.local import LocalAlgorithm
from fedsim.clients.losses import Loss, Metric, accuracy, cross_entropy
from fedsim.clients.proximal import Proximal
from fedsim.clients.schedules import Schedule
from fedsim.clients.sgd import SGD
from fedsim.errors import FedsimError

__all__ = ["ALGORITHMS", "load", "loss_named", "make_algorithm", "metric_named", "parse_options"]

ALGORITHMS: Mapping[str, type[LocalAlgorithm]] = {
    "sgd": SGD,
    "adam": Adam,
    "rmsprop": RMSProp,
    "adadp-lr": AdadpLR,
    "adadp-noise": AdadpNoise,
    "dp-sgd": DPSGD,
}

# What differs where gradients are privatised, unless it is said otherwise.
PRIVATE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"adadp-lr": {"tol": 1.0, "discard": False}}


def make_algorithm(
    name: str, options: Mapping[str, Any] | None = None, *, private: bool = False, mu: float = 0.0
) -> LocalAlgorithm:
    """A local algorithm by its name.

    Parameters
    ----------
    name : str
        Of `ALGORITHMS`, or ``"module:Class"``.
    options : mapping
        Its fields, in kebab-case or not; strings are read as the field's type.
    private : bool
        Whether its gradients will be privatised: then ``adadp-lr`` has tol 1 and discards
        nothing, unless told otherwise.
    mu : float
        FedProx's proximal term, where above 0.

    Raises
    ------
    FedsimError
        If there is no such algorithm or option, or a value cannot be read.
    """
    kind = load(name, "client.name") if ":" in name else ALGORITHMS.get(name)
    if kind is None:
        known = ", ".join(f"'{known}'" for known in ALGORITHMS)
        raise FedsimError(f"client.name is '{name}'; it must be {known} or 'module:Class'.")
    if not (isinstance(kind, type) and issubclass(kind, LocalAlgorithm)):
        raise FedsimError(f"client.name is '{name}'; it must name a LocalAlgorithm.")
    given = {key.replace("-", "_"): value for key, value in (options or {}).items()}
    defaults = PRIVATE_DEFAULTS.get(name, {}) if private else {}
    algorithm = kind(**_read(kind, {**defaults, **given}, name))
    return Proximal(algorithm, mu) if mu else algorithm


def parse_options(text: str) -> dict[str, str]:
    """``"a=1,b=inverse(decay=0.1, over=step)"`` as a mapping of strings.

    Raises
    ------
    FedsimError
        If a part has no ``=``.
    """
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text + ","):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if sign == "," and depth <= 0:
            parts.append(text[start:at])
            start = at + 1
    options: dict[str, str] = {}
    for part in filter(str.strip, parts):
        key, found, value = part.partition("=")
        if not found:
            raise FedsimError(f"client.options has '{part}'; it must be of the form key=value.")
        options[key.strip()] = value.strip()
    return options


def _read(kind: type, options: Mapping[str, Any], name: str) -> dict[str, Any]:
    fields = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    types = typing.get_type_hints(kind) if fields else {}
    values = {}
    for key, value in options.items():
        if key not in fields:
            allowed = ", ".join(sorted(f.replace("_", "-") for f in fields)) or "nothing"
            shown = key.replace("_", "-")
            raise FedsimError(
                f"client option '{shown}' is not one of '{name}'; allowed: {allowed}."
            )
        values[key] = _typed(key, value, types[key])
    return values


def _typed(key: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, str):
        return value
    readers: dict[Any, Callable[[str], Any]] = {
        float: float,
        int: int,
        bool: lambda text: {"true": True, "false": False}[text.lower()],
        Schedule: Schedule.parse,
    }
    try:
        return readers.get(kind, str)(value)
    except (ValueError, KeyError) as error:
        if isinstance(error, FedsimError):
            raise
        word = {float: "a number", int: "a whole number", bool: "true or false"}[kind]
        raise FedsimError(
            f"client option '{key.replace('_', '-')}' is '{value}'; it must be {word}."
        ) from None


def load(name: str, key: str) -> Any:
    """What ``"module:attribute"`` names; modules in the working directory are found.

    Raises
    ------
    FedsimError
        If there is none; ``key`` is the config's key that asked for it.
    """
    module_name, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise FedsimError(f"{key} is '{name}', which cannot be loaded: {error}.") from error
    return found


def loss_named(name: str) -> Loss:
    """A loss for each example: ``"cross-entropy"`` or ``"module:callable"``."""
    if name == "cross-entropy":
        return cross_entropy
    loss: Loss = _callable(name, "model.loss", "cross-entropy")
    return loss


def metric_named(name: str) -> Metric:
    """A metric for each example: ``"accuracy"`` or ``"module:callable"``."""
    return accuracy if name == "accuracy" else _callable(name, "model.metric", "accuracy")


def _callable(name: str, key: str, known: str) -> Any:
    if ":" not in name:
        raise FedsimError(f"{key} is '{name}'; it must be '{known}' or 'module:callable'.")
    found = load(name, key)
    if not callable(found):
        raise FedsimError(f"{key} is '{name}', which is not callable.")
    return found
