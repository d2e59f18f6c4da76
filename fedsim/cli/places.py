"""Where a command may put a file, asked before the work that makes it."""

from __future__ import annotations

import os
from pathlib import Path

from fedsim.errors import FedsimError

__all__ = ["check_picture"]


def check_picture(path: Path) -> None:
    """Refuse a place where no PNG can be written.

    Raises
    ------
    FedsimError
    """
    if path.suffix.lower() != ".png" or path.is_dir():
        raise FedsimError(f"--out is {path}; it must be a file that ends in .png.")
    directory = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise FedsimError(f"--out is {path}, but {directory} is no directory that can be written.")
