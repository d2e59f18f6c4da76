"""A target in another environment: one process that is asked with lines of JSON and .npy files.

`serve` runs there, by this file's path: it needs numpy and what the target needs, not fedsim. Each
line on its input is a request, ``{"rows": path, "examples": path, ...}`` with the other attributes
of a `SyntheticFederation`, and each line on its output an answer, ``{"models": path, "sampled":
..., "statistics": ...}`` or ``{"error": words}``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def load(name: str) -> Callable[..., Any]:
    """What ``module:callable`` or ``path/to/file.py:callable`` names.

    Raises
    ------
    ValueError
        If there is no such thing.
    """
    source, _, attribute = name.rpartition(":")
    if not source:
        raise ValueError(
            f"{name!r} names no callable; it must be module:callable or file.py:callable"
        )
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location(f"audited_{Path(source).stem}", source)
        if spec is None or spec.loader is None or not Path(source).is_file():
            raise ValueError(f"there is no file {source}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(0, str(Path(source).resolve().parent))
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(source)
    found: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(found):
        raise ValueError(f"{source} has no callable {attribute!r}")
    return found


def serve(name: str) -> None:
    """Answer requests until the input ends."""
    # What a target prints is not an answer.
    _let_adapters_be_imported()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    federation_file = Path(__file__).with_name("federation.py")
    federations = load(f"{federation_file}:SyntheticFederation")
    released = load(f"{federation_file}:TargetRelease")
    try:
        target: Callable[..., Any] | None = load(name)
        error = ""
    except (Exception, SystemExit) as raised:
        target, error = None, f"{type(raised).__name__}: {raised}"
    with tempfile.TemporaryDirectory() as directory:
        for line in sys.stdin:
            if target is None:
                answer: dict[str, Any] = {"error": error}
            else:
                try:
                    answer = _answer(target, federations, released, json.loads(line), directory)
                except (Exception, SystemExit) as raised:
                    answer = {"error": f"{type(raised).__name__}: {raised}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _let_adapters_be_imported() -> None:
    """As ``fedsim.audit.adapters``, where fedsim is not installed: they need nothing of it."""
    if importlib.util.find_spec("fedsim") is not None:
        return
    audit = Path(__file__).parents[1]
    for name, directory in (("fedsim", audit.parent), ("fedsim.audit", audit)):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(directory)]


def _answer(
    target: Callable[..., Any],
    federations: Callable[..., Any],
    released: Any,
    request: dict[str, Any],
    directory: str,
) -> dict[str, Any]:
    for key in ("rows", "examples"):
        request[key] = np.load(request[key])
    request["shapes"] = [tuple(shape) for shape in request["shapes"]]
    federation = federations(**request)
    release = released.of(target(federation), federation)
    path = os.path.join(directory, "models.npy")
    np.save(path, release.models)
    statistics = {key: values.tolist() for key, values in release.statistics.items()}
    return {"models": path, "sampled": release.sampled, "statistics": statistics}


if __name__ == "__main__":
    # Its own directory has modules of fedsim's, which others may be named like.
    sys.path.pop(0)
    serve(sys.argv[1])
