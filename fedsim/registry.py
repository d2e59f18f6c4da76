"""Things of the user's own, written ``module:name`` in a config.

``module`` is a file in the current directory (``nets:Small`` is ``Small`` of ``./nets.py``) or
anything importable.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedsim.errors import FedsimError

__all__ = ["current_directory_importable", "load"]


def load(key: str, name: str) -> Callable[..., Any]:
    """Import the callable ``name`` that the config's ``key`` says.

    Raises
    ------
    FedsimError
        If there is no such module or callable. Errors of the user's own code come through as
        they are.
    """
    with current_directory_importable():
        return _find(key, name)


@contextmanager
def current_directory_importable() -> Iterator[None]:
    """Let the user's files be found first, as they are under ``python file.py``."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _find(key: str, name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise FedsimError(
            f"{key} is '{name}'; something of your own is written module:name, such as nets:Small "
            "for Small in nets.py."
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise FedsimError(
            f"{key} is '{name}', but there is neither a file {module_name.replace('.', '/')}.py in "
            f"{os.getcwd()} nor an installed module '{module_name}'."
        ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise FedsimError(f"{key} is '{name}', but '{module_name}' has no callable '{attribute}'.")
    return found  # type: ignore[no-any-return]
