"""Turns a pydantic error into the one sentence that a user reads."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from fedsim.config.choices import Choice, takers
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
    "tuple_type": "a tuple, which only Python can give",
    "list_type": "a list, which only Python can give",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def sentence(model: type[BaseModel], error: ValidationError) -> str:
    """First problem of ``error`` as one sentence: key, value, what is allowed."""
    problems = error.errors()
    # Of a value that may be of several types, what is wrong with the one that it is of.
    first = next((p for p in problems if p["type"] == "finite_number"), problems[0])
    # A union such as "number or unset" reports its branch as part of the location.
    path = [
        str(step) for step in first["loc"] if "[" not in str(step) and step not in ("float", "bool")
    ]
    key, problem, value = ".".join(path), first["type"], first["input"]
    context = first.get("ctx", {})
    if problem == "extra_forbidden":
        return _unknown_key(model, [str(step) for step in first["loc"]], value)
    if problem == "missing":
        return f"{key} is not set; it must be given."
    if problem == "value_error":
        said = str(context["error"])
        return said if key in said else f"{key} = {shown(value)}: {said}"
    if problem == "literal_error":
        return f"{key} = {shown(value)}; it must be {context['expected']}."
    if problem in _BOUNDS:
        words, bound = _BOUNDS[problem]
        return f"{key} = {shown(value)}; it must be {words} {context[bound]}."
    branches = {p["type"] for p in problems if p["loc"][:-1] == first["loc"][:-1]}
    if problem == "bool_type" and "string_type" in branches:  # what an option may be
        return f"{key} = {shown(value)}; it must be a number, a string, or true or false."
    allowed = _KINDS.get(problem) or first["msg"].removeprefix("Input should be ")
    return f"{key} = {shown(value)}; it must be {allowed}."


def _unknown_key(model: type[BaseModel], path: list[str], value: Any) -> str:
    section = _section(model, path[:-1])
    key, table = path[-1], ".".join(path[:-1])
    if issubclass(section, Choice):
        names = takers(section, key)
        chosen = f"{table}.{section.selector} = '{section.named}'"
        if names:
            said = f"{table}.{key} = {shown(value)} has no effect with {chosen}"
            return f"{said}; it belongs to {', '.join(names)}."
        if "options" in section.model_fields:
            return f"unknown key '{table}.{key}'; settings of {chosen} stand in [{table}.options]."
    keys = [field.alias or name for name, field in section.model_fields.items()]
    close = [name for name in _ELSEWHERE.get(key, ()) if name in keys]
    close = close or difflib.get_close_matches(key, keys, n=1)
    hint = f" did you mean '{close[0]}'?" if close else ""
    where = f"[{table}]" if table else "the top level"
    return f"unknown key {shown('.'.join(path))};{hint} {where} takes {', '.join(keys)}."


_ELSEWHERE = {
    "learning-rate": ("lr", "server"),
    "eta": ("lr",),
    "batch": ("batch-size",),
    "local-epochs": ("epochs",),
    "num-epochs": ("epochs",),
    "num-rounds": ("rounds",),
    "num-clients": ("clients",),
    "population": ("clients",),
    "optimizer": ("name",),
    "algorithm": ("name",),
    "clip": ("clip-norm",),
    "clipping-norm": ("clip-norm",),
    "max-grad-norm": ("clip-norm",),
    "epsilon": ("target-epsilon",),
    "noise-multiplier": ("multiplier", "noise"),
    "sigma": ("multiplier", "noise"),
    "fraction": ("rate", "cohort"),
    "fraction-fit": ("rate", "cohort"),
    "fraction-train": ("rate", "cohort"),
}
"""What other libraries call a key, and what it, or its table, is called here."""


def _section(model: Any, path: list[str]) -> Any:
    for part in path:
        field = next(f for f in model.model_fields.values() if f.alias == part)
        model = field.annotation
    return model
