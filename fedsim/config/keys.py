"""How the tables of a config read and check their keys.

A key that belongs to some choices of its table's ``name`` only says so (`only`), and is
refused beside another name: a setting that would silently do nothing is a mistake.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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

__all__ = [
    "Maybe",
    "Multiplier",
    "Name",
    "NamesOf",
    "Range",
    "Section",
    "TargetEpsilon",
    "Work",
    "belongs_to",
    "from_empty",
    "only",
    "setting",
    "shown",
    "to_empty",
]

# Beyond these a number is a mistake, and single precision or Flower's records cannot hold it.
LARGEST_FLOAT, LARGEST_INT, LONGEST_STRING = 1e30, 2**63 - 1, 10_000


def shown(value: Any) -> str:
    """A value as a sentence shows it: not at its full length, however long that is."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def from_empty(value: Any) -> Any:
    """None where a config has the empty string, which means unset."""
    return None if value == "" else value


def to_empty(value: Any) -> Any:
    """The empty string for None."""
    return "" if value is None else value


Maybe = Annotated[float | None, BeforeValidator(from_empty), PlainSerializer(to_empty)]
"""A number, or unset (written as the empty string)."""


@dataclass(frozen=True)
class NamesOf:
    """Marks a key whose value is names of things of a kind, each with its options."""

    kind: str


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
            raise ValueError(f"{key} = {shown(value)}; it must be {allowed}.")

    @model_validator(mode="after")
    def _no_value_beyond_use(self) -> Section:
        for attribute, field in type(self).model_fields.items():
            value, key = getattr(self, attribute), f"{self.table}.{field.alias}".lstrip(".")
            if isinstance(value, float):
                self.require(abs(value) <= LARGEST_FLOAT, key, value, f"at most {LARGEST_FLOAT:g}")
            elif isinstance(value, int):
                self.require(abs(value) <= LARGEST_INT, key, value, "at most 2^63 - 1")
            elif isinstance(value, str):
                self.require(
                    len(value) <= LONGEST_STRING,
                    key,
                    value,
                    f"at most {LONGEST_STRING:,} characters",
                )
                self.require(
                    not re.search("[\x00-\x1f\x7f-\x9f\ud800-\udfff]", value),
                    key,
                    value,
                    "without control characters and valid UTF-8",
                )
        return self

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> Section:
        for attribute, field in type(self).model_fields.items():
            names = belongs_to(field)
            value = getattr(self, attribute)
            chosen = getattr(self, "name", "")
            if names and chosen not in names and value != field.default:
                key = f"{self.table}.{field.alias}"
                raise ValueError(
                    f"{key} = {value!r} has no effect with {self.table}.name = '{chosen}'; it "
                    f"belongs to {', '.join(names)}."
                )
        return self


def belongs_to(field: FieldInfo) -> list[str]:
    """The names of its table beside which alone a key has a meaning; none for any."""
    extra = field.json_schema_extra
    names = extra.get("only") if isinstance(extra, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _check_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", value, re.ASCII) or not value.strip("."):
        raise PydanticCustomError(
            "name",
            "1 to 100 letters a to z, digits, '.', '_' and '-', and not only dots (it names "
            "files); any other words go into title",
        )
    return value


Name = Annotated[str, AfterValidator(_check_name)]
"""What may stand in a path as one part of it."""


def _check_multiplier(value: float | None) -> float | None:
    if value is not None and value != 0 and not 1e-3 <= value <= 1e9:
        raise PydanticCustomError("multiplier", "0.0, or from 0.001 to 1e9")
    return value


Multiplier = Annotated[Maybe, AfterValidator(_check_multiplier)]
"""A noise multiplier, 0 for no noise, or unset."""


def _check_target(value: float | None) -> float | None:
    if value is not None and not 1e-6 <= value <= 1e6:
        raise PydanticCustomError("target", "from 1e-6 to 1e6")
    return value


TargetEpsilon = Annotated[Maybe, AfterValidator(_check_target)]
"""The epsilon that noise is calibrated to, or unset."""


def _check_range(value: str) -> str:
    if not re.fullmatch(r"([0-9]{0,18}:[0-9]{0,18})?", value, re.ASCII):
        raise PydanticCustomError("range", "a range such as '10000:' or ':10000', or ''")
    return value


def _check_work(value: str) -> str:
    drawn = re.fullmatch(r"whole\((\d{1,7}), *(\d{1,7})\)", value)
    if "(" in value and (not drawn or not 1 <= int(drawn[1]) <= int(drawn[2])):
        raise PydanticCustomError(
            "work", "whole(low,high) with whole numbers from 1 on, the path of a file, or ''"
        )
    return value


Work = Annotated[str, AfterValidator(_check_work)]
"""How much each client does: ``whole(1,5)``, a file, or empty for the same for all."""


Range = Annotated[str, AfterValidator(_check_range)]
"""Where a range of examples begins and ends: ``10000:``, ``:500``, or empty for all."""
