"""Parses values that users type: after ``--set``, on a sweep's axis, in a string of options."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from fedsim.errors import FedsimError

Scalar = bool | int | float | str

OBJECTS = ("model", "data", "partition", "strategy")
"""Parts of a run that may be Python objects instead of what a config's tables name."""

# Numbers that people type but TOML does not allow.
_BARE_POINT = re.compile(r"[+-]?(\.\d+|\d+\.)([eE][+-]?\d+)?")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def read_value(text: str) -> Any:
    """Read a TOML value, or a number such as ``.5`` or ``1.``; otherwise the text itself."""
    text = text.strip()
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return float(text) if _BARE_POINT.fullmatch(text) else text


def split_top_level(text: str) -> list[str]:
    """Split at commas that are not within quotes or brackets."""
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
    """Parse options such as ``"a=1, b=word"``: values by name.

    Raises
    ------
    FedsimError
        If a part has no ``=``, or a name is given twice.
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
    """Parse names with options, such as ``"accuracy, top-k(k=3)"``.

    Raises
    ------
    FedsimError
        If brackets or options cannot be read.
    """
    entries = []
    for part in filter(None, split_top_level(text)):
        match = re.fullmatch(r"([^()]+?) *(?:\((.*)\))?", part)
        if match is None:
            raise FedsimError(
                f"{key} has '{part}'; it must be of the form name, or name(option=value)."
            )
        name, options = match.groups()
        entries.append((name, read_options(options or "", f"{key}.{name}")))
    return entries


def write_options(options: Mapping[str, Scalar]) -> str:
    """Write options as a string that `read_options` reads."""
    pairs = (f"{k}={json.dumps(value, ensure_ascii=False)}" for k, value in options.items())
    return ",".join(pairs)


def objects_in(mark: str) -> list[str]:
    """The names in `RunConfig.objects`, as in ``model=Linear 1f09a2c4, strategy=FedAdam 90ab12cd``.

    A name's value is the object's class and the start of a digest of its public properties.
    """
    return [entry.partition("=")[0] for entry in mark.split(", ")] if mark else []
