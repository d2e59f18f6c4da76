"""Environments of other packages' own, with this one's torch and numpy."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def environment(directory: Path, *requirements: str, dependencies: bool = True) -> str:
    """The interpreter of an environment with requirements, which is made if there is none.

    Parameters
    ----------
    directory : Path
        Where it is; one that was made before is used unchanged.
    requirements : str
        As pip has them.
    dependencies : bool
        Whether pip installs what they require, where this environment has not.

    Raises
    ------
    subprocess.CalledProcessError
        If they cannot be installed.
    """
    # Not resolved: the link to the interpreter is what makes it this environment's.
    python = directory.absolute() / "bin" / "python"
    ready = directory / "ready"
    if ready.exists():
        return str(python)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    packages = next(directory.glob("lib/python*/site-packages"))
    lent = sysconfig.get_paths()["purelib"]
    # After the environment's own packages: what it has itself comes first.
    (packages / "zz_lent.pth").write_text(f"{lent}\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    without = [] if dependencies else ["--no-deps"]
    # What it says of conflicts is of packages that are lent.
    subprocess.run([*pip, *without, *requirements], check=True, capture_output=True, text=True)
    ready.touch()
    return str(python)
