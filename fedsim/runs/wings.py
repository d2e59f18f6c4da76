"""What packages above this one do for a run: each function is imported when a run needs it.

`fedsim.deploy` and `fedsim.reports` import `fedsim.runs`, so they are named here and not imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

WINGS: Mapping[str, str] = {
    "simulation": "fedsim.deploy.launch:run_simulation",
    "deployment": "fedsim.deploy.launch:run_deployment",
    "page": "fedsim.reports.run_page:run_page",
    "facts table": "fedsim.reports.page:facts_table",
}


def wing(task: str) -> Callable[..., Any]:
    """The function that does a task."""
    module, _, name = WINGS[task].partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
