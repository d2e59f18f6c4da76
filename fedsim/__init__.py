"""fedsim: private federated learning, simulated and deployed on Flower.

``fedsim.run(fedsim.RunConfig.load("run.toml"))`` runs one config, and ``fedsim.load("runs/x")``
loads the model, metrics and privacy of a finished run. The packages below (`strategies`,
`mechanisms`, `clients`, `cohorts`, `partitions`, `engines`, `privacy`) can be used on their own.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

from fedsim.lazy import lazy_names
from fedsim.version import VERSION

if sys.platform == "win32":
    _WHERE_IT_RUNS = "fedsim runs on Linux and macOS, and on Windows in WSL: it locks its files."
    # The `fedsim` command imports this file before any code of its own, so its sentence (instead of
    # a traceback) must be printed here.
    if sys.argv[:1] == ["-m"] or sys.argv[0].lower().endswith(("fedsim", "fedsim.exe")):
        print(f"fedsim: {_WHERE_IT_RUNS}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(_WHERE_IT_RUNS)

_PARENT = os.path.dirname(os.path.dirname(__file__))
if any(re.match(r"fedsim-.*\.(dist|egg)-info$", name) for name in os.listdir(_PARENT)):
    # On PyPI the name `fedsim` belongs to another project; this one is `fedsim-dp`.
    raise ImportError(
        f"another package called fedsim is installed in {_PARENT}, and its files are mixed with "
        "fedsim-dp's: `pip uninstall fedsim fedsim-dp`, and then install fedsim-dp again."
    )

if TYPE_CHECKING:
    from fedsim.config import RunConfig
    from fedsim.errors import FedsimError
    from fedsim.reports.notebook import Live
    from fedsim.runs.callbacks import Callback, RunStatus
    from fedsim.runs.runner import run
    from fedsim.runs.saved import load

__version__ = VERSION
__all__ = [
    "Callback",
    "FedsimError",
    "Live",
    "RunConfig",
    "RunStatus",
    "__version__",
    "load",
    "run",
]


def __dir__() -> list[str]:
    return __all__


# Imported on first use: `import fedsim.privacy` must not load torch or Flower.
__getattr__ = lazy_names(__name__, __file__)
