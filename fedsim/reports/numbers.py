"""Numbers as a reader wants them."""

from __future__ import annotations

import math

__all__ = ["brief", "duration", "size"]


def brief(value: float | None, percent: bool = False) -> str:
    """Four digits, or a share of a hundred; a dash where there is no number.

    Examples
    --------
    >>> brief(0.92504, percent=True), brief(1234567), brief(0.00001234), brief(None)
    ('92.50 %', '1,234,567', '1.234e-05', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    if percent:
        return f"{100 * value:.2f} %"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """In the two largest units.

    Examples
    --------
    >>> duration(0.04), duration(61), duration(7325)
    ('0.04 s', '1 min 1 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def size(count: float) -> str:
    """Bytes in the unit that leaves three digits.

    Examples
    --------
    >>> size(2960), size(3.2e9), size(math.nan)
    ('2.96 kB', '3.2 GB', '–')
    """
    if not math.isfinite(count):
        return brief(count)
    units = ("bytes", "kB", "MB", "GB", "TB")
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {units[power]}"
