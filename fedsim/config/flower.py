"""The table of an app's defaults: Flower lets a run change those keys that stand in one."""

from __future__ import annotations

from typing import Any

from fedsim import registry
from fedsim.config.choices import Choice, own_settings
from fedsim.config.keys import Section, belongs_to, to_empty
from fedsim.config.run_config import RunConfig

__all__ = ["flower_table"]


def flower_table() -> dict[str, Any]:
    """The defaults, with every key that any choice has.

    Settings of the things that tables name are the empty string: each has its own defaults.
    """
    return _table(RunConfig, RunConfig().to_tree())


def _table(section: type[Section], tree: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    inner: dict[str, Any] = {}
    for field in section.model_fields.values():
        key, model = str(field.alias), field.annotation
        if isinstance(model, type) and issubclass(model, Section):
            inner[key] = _table(model, tree[key])
        else:
            table[key] = to_empty(field.default) if belongs_to(field) else tree[key]
    if issubclass(section, Choice):
        for name in registry.names(section.kind):
            if name not in registry.plugins(section.kind):
                table |= {setting.key: "" for setting in own_settings(section, name)}
        table["options"] = ""
    return table | inner
