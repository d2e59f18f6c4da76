"""Where a command may put a file, asked before the work that makes it."""

from __future__ import annotations

import os
from pathlib import Path

from fedsim.errors import FedsimError


def check_picture(path: Path) -> None:
    """Refuse a place where no PNG can be written.

    Raises
    ------
    FedsimError
    """
    _check(path, ".png")


def check_page(path: Path) -> None:
    """Refuse a place where no HTML page can be written.

    Raises
    ------
    FedsimError
    """
    _check(path, ".html")


def _check(path: Path, suffix: str) -> None:
    if path.suffix.lower() != suffix or path.is_dir():
        raise FedsimError(f"--out is {path}; it must be a file that ends in {suffix}.")
    directory = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise FedsimError(
            f"{path} cannot be made: {directory} is no directory that can be written; name another "
            "place by --out."
        )
