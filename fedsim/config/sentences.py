"""Turns a pydantic error into the one sentence that a user reads."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from fedsim.config.keys import shown

__all__ = ["sentence"]

_KINDS = {
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "bool_type": "true or false",
    "string_type": "a string",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dict_type": "a table",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def sentence(model: type[BaseModel], error: ValidationError) -> str:
    """First problem of ``error`` as one sentence: key, value, what is allowed."""
    first = error.errors()[0]
    # A union such as "number or unset" reports its branch as part of the location.
    path = [
        str(step) for step in first["loc"] if "[" not in str(step) and step not in ("float", "bool")
    ]
    key, problem, value = ".".join(path), first["type"], first["input"]
    context = first.get("ctx", {})
    if problem == "extra_forbidden":
        return _unknown_key(model, [str(step) for step in first["loc"]])
    if problem == "value_error":
        return str(context["error"])
    if problem == "literal_error":
        return f"{key} = {shown(value)}; it must be {context['expected']}."
    if problem in _BOUNDS:
        words, bound = _BOUNDS[problem]
        return f"{key} = {shown(value)}; it must be {words} {context[bound]}."
    return f"{key} = {shown(value)}; it must be {_KINDS.get(problem, first['msg'])}."


def _unknown_key(model: type[BaseModel], path: list[str]) -> str:
    keys = _keys_of(model, path[:-1])
    close = difflib.get_close_matches(path[-1], keys, n=1)
    hint = f" did you mean '{close[0]}'?" if close else ""
    where = f"[{'.'.join(path[:-1])}]" if path[:-1] else "the top level"
    return f"unknown key {shown('.'.join(path))};{hint} {where} takes {', '.join(keys)}."


def _keys_of(model: Any, path: list[str]) -> list[str]:
    for key in path:
        field = next(f for f in model.model_fields.values() if f.alias == key)
        model = field.annotation
    return [field.alias or name for name, field in model.model_fields.items()]
