"""How the tables of a config read and check their keys.

A key that belongs to some choices of its table's ``name`` only says so (`only`), and is
refused beside another name: a setting that would silently do nothing is a mistake.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

__all__ = ["Maybe", "MaybeBool", "Range", "Section", "one_of", "only", "setting"]


def _from_empty(value: Any) -> Any:
    return None if value == "" else value


Maybe = Annotated[
    float | None,
    BeforeValidator(_from_empty),
    PlainSerializer(lambda value: "" if value is None else value),
]
"""A number, or unset (written as the empty string)."""

MaybeBool = Annotated[
    bool | None,
    BeforeValidator(_from_empty),
    PlainSerializer(lambda value: "" if value is None else value),
]
"""True, false, or unset."""


def only(*names: str, default: Any, **bounds: Any) -> Any:
    """A key that has a meaning only where its table's ``name`` is one of ``names``."""
    return Field(default, json_schema_extra={"only": list(names)}, **bounds)


def setting(default: Any, *, affects_release: bool, **bounds: Any) -> Any:
    """A key or a table that says whether it may change what a run releases; others may."""
    return Field(default, json_schema_extra={"affects-release": affects_release}, **bounds)


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

    table: ClassVar[str] = ""

    @staticmethod
    def require(holds: bool, key: str, value: Any, allowed: str) -> None:
        """Raise the sentence ``key = value; it must be allowed`` unless ``holds``."""
        if not holds:
            raise ValueError(f"{key} = {value!r}; it must be {allowed}.")

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> Section:
        for attribute, field in type(self).model_fields.items():
            names = _choices(field)
            value = getattr(self, attribute)
            chosen = getattr(self, "name", "")
            # A user's own class ("module:Class") may take any key.
            if names and ":" not in chosen and chosen not in names and value != field.default:
                key = f"{self.table}.{field.alias}"
                raise ValueError(
                    f"{key} = {value!r} has no effect with {self.table}.name = '{chosen}'; it "
                    f"belongs to {', '.join(names)}."
                )
        return self


def _choices(field: FieldInfo) -> list[str]:
    extra = field.json_schema_extra
    names = extra.get("only") if isinstance(extra, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def one_of(*names: str) -> AfterValidator:
    """One of ``names``, or a class of the user's own (``module:Class``)."""

    def check(value: str) -> str:
        if value not in names and ":" not in value:
            allowed = ", ".join(f"'{name}'" for name in names)
            raise PydanticCustomError(
                "choice", "{allowed}", {"allowed": f"{allowed} or 'module:name'"}
            )
        return value

    return AfterValidator(check)


def _check_range(value: str) -> str:
    if not re.fullmatch(r"([0-9]*:[0-9]*)?", value, re.ASCII):
        raise PydanticCustomError("range", "a range such as '10000:' or ':10000', or ''")
    return value


Range = Annotated[str, AfterValidator(_check_range)]
"""Where a range of examples begins and ends: ``10000:``, ``:500``, or empty for all."""
