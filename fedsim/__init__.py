"""fedsim: private federated learning, simulated and deployed on Flower.

``fedsim.run(fedsim.RunConfig.load("run.toml"))`` runs one config, ``fedsim.load("runs/x")`` gives
what a run has left; the packages below it
(`strategies`, `mechanisms`, `clients`, `cohorts`, `partitions`, `engines`, `privacy`) are
usable on their own.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fedsim.version import VERSION

if sys.platform == "win32":
    _WHERE_IT_RUNS = "fedsim runs on Linux and macOS, and on Windows in WSL: it locks its files."
    # Of the command, which finds no code of its own before this: a sentence and no traceback.
    if sys.argv[:1] == ["-m"] or sys.argv[0].lower().endswith(("fedsim", "fedsim.exe")):
        print(f"fedsim: {_WHERE_IT_RUNS}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(_WHERE_IT_RUNS)

if TYPE_CHECKING:
    from fedsim.config import RunConfig
    from fedsim.reports.notebook import Live
    from fedsim.runs.callbacks import Callback, RunStatus
    from fedsim.runs.runner import run
    from fedsim.runs.saved import load

__version__ = VERSION
__all__ = ["Callback", "Live", "RunConfig", "RunStatus", "__version__", "load", "run"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Imported on first use: `import fedsim.privacy` must not load torch or Flower.
    if name == "RunConfig":
        from fedsim.config import RunConfig

        return RunConfig
    if name in ("Callback", "RunStatus"):
        from fedsim.runs import callbacks

        return getattr(callbacks, name)
    if name == "Live":
        from fedsim.reports.notebook import Live

        return Live
    if name == "run":
        from fedsim.runs.runner import run

        return run
    if name == "load":
        from fedsim.runs.saved import load

        return load
    raise AttributeError(f"module 'fedsim' has no attribute {name!r}")
