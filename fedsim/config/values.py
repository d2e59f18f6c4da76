"""Values as they are typed: after ``--set``, on an axis of a sweep, in a string of options."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from fedsim.errors import FedsimError

__all__ = ["Scalar", "read_named", "read_options", "read_value", "split_top_level", "write_options"]

Scalar = bool | int | float | str

_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def read_value(text: str) -> Any:
    """What TOML makes of it, or the text itself."""
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except (ValueError, RecursionError):
        return text.strip()


def split_top_level(text: str) -> list[str]:
    """What stands between commas, but for those within quotes or brackets."""
    parts, depth, quote, start = [], 0, "", 0
    for index, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
        else:
            depth = max(depth + _BRACKETS.get(sign, 0), 0)
    return [*parts, text[start:].strip()]


def read_options(text: str, key: str) -> dict[str, Any]:
    """``"a=1, b=word"`` by name.

    Raises
    ------
    FedsimError
        If a part has no ``=``, or a name comes twice.
    """
    options: dict[str, Any] = {}
    for part in filter(None, split_top_level(text)):
        name, equals, value = part.partition("=")
        if not equals:
            raise FedsimError(f"{key} has '{part}'; it must be of the form key=value.")
        if name.strip() in options:
            raise FedsimError(f"{key} has '{name.strip()}' twice; once is enough.")
        options[name.strip()] = read_value(value)
    return options


def read_named(text: str, key: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and the options of each, from ``"accuracy, top-k(k=3)"``.

    Raises
    ------
    FedsimError
        If brackets or options cannot be read.
    """
    named = []
    for part in filter(None, split_top_level(text)):
        written = re.fullmatch(r"([^()]+?) *(?:\((.*)\))?", part)
        if written is None:
            raise FedsimError(
                f"{key} has '{part}'; it must be of the form name, or name(option=value)."
            )
        name, options = written.groups()
        named.append((name, read_options(options or "", f"{key}.{name}")))
    return named


def write_options(options: Mapping[str, Scalar]) -> str:
    """A string that `read_options` reads."""
    return ",".join(_written(options))


def _written(options: Mapping[str, Scalar]) -> Iterator[str]:
    for name, value in options.items():
        yield f"{name}={json.dumps(value, ensure_ascii=False)}"
