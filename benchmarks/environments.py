"""Virtual environments for other packages, which also see this environment's packages (torch)."""

from __future__ import annotations

import subprocess
import sys
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
    # With this environment's pip: an own one comes with setuptools that may be too old for torch.
    new = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(directory)]
    subprocess.run(new, check=True)
    packages = next(directory.glob("lib/python*/site-packages"))
    lent = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    # A .pth file's paths come after the environment's own packages, which so take precedence.
    (packages / "zz_lent.pth").write_text("\n".join(lent) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    pip += ["--quiet", "--disable-pip-version-check"]
    without = [] if dependencies else ["--no-deps"]
    # The output is captured: pip would warn about conflicts with this environment's packages.
    subprocess.run([*pip, *without, *requirements], check=True, capture_output=True, text=True)
    ready.touch()
    return str(python)
