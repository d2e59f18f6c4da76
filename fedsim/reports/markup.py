"""HTML that is safe by construction: what is not `Markup` is text, and is escaped."""

from __future__ import annotations

import html
import json
import math
from typing import Any

__all__ = ["Markup", "inert_json", "tag"]

_VOID = {"meta", "br", "hr", "input", "link", "img"}


class Markup(str):
    """Text that is HTML already; made by `tag`."""

    __slots__ = ()


def tag(element: str, /, *children: object, **attributes: object) -> Markup:
    """An element with its children.

    Parameters
    ----------
    element : str
        Its name.
    *children : object
        `Markup` as it is; anything else as text; None is left out.
    **attributes : object
        ``data_chart`` is ``data-chart``, ``class_`` is ``class``; True is an attribute without
        a value, False and None are none.

    Examples
    --------
    >>> tag("p", "a < b", tag("b", "!"), class_="x")
    '<p class="x">a &lt; b<b>!</b></p>'
    """
    opened = element + "".join(_attribute(key, value) for key, value in attributes.items())
    if element in _VOID:
        return Markup(f"<{opened}>")
    return Markup(f"<{opened}>{''.join(_text(child) for child in children)}</{element}>")


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    shown = key.rstrip("_").replace("_", "-")
    return f" {shown}" if value is True else f' {shown}="{html.escape(str(value))}"'


def _text(child: object) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Markup) else html.escape(str(child))


def inert_json(value: Any, identifier: str) -> Markup:
    """Data for the page's script: nothing in it can end the element, or run.

    Numbers that are not finite are null: JSON has none.
    """
    text = json.dumps(_finite(value), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    name = html.escape(identifier)
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(content) for key, content in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(content) for content in value]
    return value
