"""Shell-style patterns over a model's names, as configs have them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from fedsim.errors import FedsimError

__all__ = ["matching"]


def matching(key: str, patterns: str, names: Sequence[str]) -> list[str]:
    """Those ``names`` that match one of the ``patterns``, which commas separate.

    Raises
    ------
    FedsimError
        Naming the config's ``key``, if a pattern matches nothing.
    """
    each = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in each:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise FedsimError(
                f"{key} has the pattern '{pattern}', which matches no parameter; the model has "
                f"{', '.join(names)}."
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in each)]
