"""Base class of the tables in ``experiment.toml`` and ``judgement.toml``, validated by pydantic."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from fedsim.arguments import shown
from fedsim.errors import FedsimError

_WORDS = {
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "a string",
    "model_type": "a table",
    "dict_type": "a table",
}


class Section(BaseModel):
    """A table with kebab-case keys; unknown keys and wrong types are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        alias_generator=lambda name: name.replace("_", "-"),
        validate_by_name=True,
        validate_by_alias=True,
    )

    @classmethod
    def read(cls, tree: Mapping[str, Any]) -> Self:
        """Validate a table that was read from TOML.

        Raises
        ------
        FedsimError
            Naming the first key that is not allowed.
        """
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise FedsimError(_sentence(cls, error.errors()[0])) from None


def _sentence(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    key, said = ".".join(str(step) for step in problem["loc"]), str(problem["msg"])
    if problem["type"] == "missing":
        return f"{key} is not set; it must be given."
    if problem["type"] == "extra_forbidden":
        keys = [str(field.alias) for field in model.model_fields.values()]
        close = difflib.get_close_matches(str(problem["loc"][-1]), keys, n=1)
        hint = f" did you mean '{close[0]}'? It" if close else " it"
        return f"unknown key '{key}';{hint} must be one of {', '.join(keys)}."
    allowed = _WORDS.get(problem["type"]) or said.removeprefix("Input should be ")
    return f"{key} = {shown(problem['input'])}; it must be {allowed}."
