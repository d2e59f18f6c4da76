"""A config to start from: every key of what it names, with what it means."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from fedsim.config.describe import Key, keys
from fedsim.config.run_config import RunConfig

__all__ = ["template"]


def template(config: RunConfig) -> str:
    """A config as commented TOML that reads as the same config."""
    described: dict[str, list[Key]] = {}
    for key in keys():
        described.setdefault(key.name, []).append(key)
    lines = ["# A run of fedsim. What is left out is at its default.", ""]
    lines += _table(config.to_tree(), "", described)
    return "\n".join(lines).rstrip() + "\n"


def _table(
    tree: Mapping[str, Any], table: str, described: Mapping[str, list[Key]]
) -> Iterator[str]:
    chosen = {value for value in tree.values() if isinstance(value, str)}
    inner = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    for key, value in tree.items():
        if key in inner:
            continue
        entries = described[f"{table}{key}"]
        entry = next((e for e in entries if chosen & {*e.belongs_to}), entries[0])
        words = f"{entry.doc} {entry.allowed[:1].upper()}{entry.allowed[1:]}".strip()
        words += "." if entry.allowed else ""
        yield from textwrap.wrap(words, 92, initial_indent="# ", subsequent_indent="# ")
        yield tomli_w.dumps({key: value}).rstrip()
    yield ""
    for key, value in inner.items():
        yield f"[{table}{key}]"
        if key == "options":
            yield from (tomli_w.dumps({k: v}).rstrip() for k, v in value.items())
            yield ""
        else:
            yield from _table(value, f"{table}{key}.", described)
