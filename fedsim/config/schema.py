"""The JSON schema of a config: what an editor completes and checks a TOML file by."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from fedsim import registry
from fedsim.config.choices import Choice, model_of
from fedsim.config.keys import Section
from fedsim.config.run_config import RunConfig
from fedsim.settings import Doc

__all__ = ["schema"]


def schema() -> dict[str, Any]:
    """Draft 2020-12, a table with the keys of the thing that it names."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fedsim config",
        **_table(RunConfig),
    }


def _table(section: type[Section]) -> dict[str, Any]:
    properties = _properties(section)
    table: dict[str, Any] = {"type": "object", "description": section.__doc__}
    if not issubclass(section, Choice):
        return {**table, "properties": properties, "additionalProperties": False}
    selector, names = section.selector, registry.names(section.kind)
    named = {**properties[selector]}
    named["anyOf"] = [{"enum": list(names)}, {"type": "string", "pattern": ":|/|\\.npz$"}]
    named.pop("type", None)
    properties[selector] = named
    branches = []
    for name in names:
        own = _properties(model_of(section, name))
        own[selector] = named
        default = section.model_fields[selector].default
        chosen: dict[str, Any] = {"properties": {selector: {"const": name}}}
        if name != default:
            chosen["required"] = [selector]
        branches.append(
            {
                "if": chosen,
                "then": {
                    "properties": {**own, "options": _OPTIONS},
                    "additionalProperties": False,
                },
            }
        )
    return {**table, "properties": {**properties, "options": _OPTIONS}, "allOf": branches}


_OPTIONS = {
    "type": ["object", "string"],
    "description": "Settings of a class or function of your own, by their names.",
}


def _properties(section: type[Section]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    generated = section.model_json_schema(by_alias=True, schema_generator=_Generator)["properties"]
    for field in section.model_fields.values():
        key, inner = str(field.alias), field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            properties[key] = _table(inner)
            continue
        said = {k: v for k, v in generated[key].items() if k not in ("only", "affects-release")}
        said.pop("title", None)
        doc = [m.documentation for m in field.metadata if isinstance(m, Doc)]
        doc += [m.doc for m in field.metadata if hasattr(m, "doc")]
        properties[key] = {**said, "description": doc[0] if doc else ""}
    return properties


class _Generator(GenerateJsonSchema):
    """What is written as the empty string for unset may be that."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        return {"anyOf": [inner, {"const": ""}]}
