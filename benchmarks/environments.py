"""Virtual environments for other packages, which also see this environment's packages (torch)."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def environment(directory: Path, *requirements: str, dependencies: bool = True) -> str:
    """Interpreter of an environment with the given requirements, created if it does not exist.

    Parameters
    ----------
    directory : Path
        The environment's directory; an existing environment is used unchanged.
    requirements : str
        Requirements for pip.
    dependencies : bool
        Whether pip also installs their dependencies that this environment lacks.

    Raises
    ------
    subprocess.CalledProcessError
        If they cannot be installed.
    """
    # Not resolved: Python finds its environment by the path of the link it was started as.
    python = directory.absolute() / "bin" / "python"
    ready = directory / "ready"
    if ready.exists():
        return str(python)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    packages = next(directory.glob("lib/python*/site-packages"))
    lent = sysconfig.get_paths()["purelib"]
    # A .pth file's paths come after the environment's own packages, which so take precedence.
    (packages / "zz_lent.pth").write_text(f"{lent}\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    without = [] if dependencies else ["--no-deps"]
    # The output is captured: pip would warn about conflicts with this environment's packages.
    subprocess.run([*pip, *without, *requirements], check=True, capture_output=True, text=True)
    ready.touch()
    return str(python)
