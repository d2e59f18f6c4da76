"""Local algorithms by the names that a config gives them.

``name`` is one of `ALGORITHMS` or ``"module:Class"``, a `LocalAlgorithm` of the user's own;
options are a dataclass's fields in kebab-case, written ``"a=1,b=2"``.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fedsim.clients.adadp_lr import AdadpLR
from fedsim.clients.adadp_noise import AdadpNoise
from fedsim.clients.adam import Adam
from fedsim.clients.base import LocalAlgorithm
from fedsim.clients.proximal import Proximal
from fedsim.clients.rmsprop import RMSProp
from fedsim.clients.schedules import Schedule
from fedsim.clients.sgd import SGD
from fedsim.errors import FedsimError
from fedsim.registry import load

__all__ = ["ALGORITHMS", "make_algorithm", "parse_options"]

ALGORITHMS: Mapping[str, type[LocalAlgorithm]] = {
    "sgd": SGD,
    "adam": Adam,
    "rmsprop": RMSProp,
    "adadp-lr": AdadpLR,
    "adadp-noise": AdadpNoise,
}


def make_algorithm(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    offered: Mapping[str, Any] | None = None,
    private: bool = False,
    mu: float = 0.0,
) -> LocalAlgorithm:
    """A local algorithm by its name.

    Parameters
    ----------
    name : str
        Of `ALGORITHMS`, or ``"module:Class"``.
    options : mapping
        Its fields, in kebab-case or not; strings are read as the field's type.
    offered : mapping
        Values for fields of these names, where it has them and no option sets them; None
        leaves the field's default.
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
    kind = load("client.name", name) if ":" in name else ALGORITHMS.get(name)
    if kind is None:
        known = ", ".join(f"'{known}'" for known in ALGORITHMS)
        raise FedsimError(f"client.name is '{name}'; it must be {known} or 'module:Class'.")
    if not (isinstance(kind, type) and issubclass(kind, LocalAlgorithm)):
        raise FedsimError(f"client.name is '{name}'; it must name a LocalAlgorithm.")
    given = {key.replace("-", "_"): value for key, value in (options or {}).items()}
    defaults: dict[str, Any] = {}
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    defaults |= {k: v for k, v in (offered or {}).items() if k in fields and v is not None}
    algorithm = kind(**_read(kind, {**defaults, **given}, name)).where_noised(private)
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
    kind = next((k for k in typing.get_args(kind) if k is not type(None)), kind)
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
