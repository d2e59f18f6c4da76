"""The synthetic federation that a target is run on, and the release that it returns.

This file needs only numpy. It can be run by its path in another environment, without fedsim:
`serve` answers requests by a protocol of JSON lines and .npy files. Each line of input is a
request, ``{"rows": path, "examples": path, ...}`` with the other attributes of a
`SyntheticFederation`; each line of output is an answer, ``{"models": path, "sampled": ...,
"statistics": ...}`` or ``{"error": words}``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.array_types import Floats

SHAPES: tuple[tuple[int, ...], ...] = ((4, 8), (16,), (2, 8))
"""Shapes of the model's arrays: three, of unequal size."""


@dataclass(frozen=True)
class SyntheticFederation:
    """Input of a target: a number of rounds over clients whose updates are known.

    Attributes
    ----------
    rows : float64 ``[population, d]``
        Unbounded update of each client, or gradient of each example, the same in every round.
    examples : float64 ``[population]``
        Number of examples that each client reports.
    rounds : int
    seed : int
        Seed of all the target's draws; a target that cannot be seeded may ignore it.
    rate : float
        Claimed expected share of the population in a round.
    clip_norm, noise_multiplier : float
        Claimed values; 0 if the claim does not give them.
    shapes : sequence of tuple of int
        Shapes of the model's arrays, which have ``d`` entries in total.
    """

    rows: Floats
    examples: Floats
    rounds: int
    seed: int
    rate: float = 1.0
    clip_norm: float = 1.0
    noise_multiplier: float = 1.0
    shapes: Sequence[tuple[int, ...]] = SHAPES

    @property
    def population(self) -> int:
        """Number of clients, or of examples."""
        return len(self.rows)

    @property
    def initial(self) -> list[Floats]:
        """The initial model's arrays: zeros."""
        return [np.zeros(shape) for shape in self.shapes]

    def update(self, client: int) -> list[Floats]:
        """A client's update, or an example's gradient, as the model's arrays."""
        return self.arrays(self.rows[client])

    def arrays(self, vector: Floats) -> list[Floats]:
        """A vector ``[d]`` as the model's arrays."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        pieces = np.split(np.asarray(vector, dtype=np.float64), ends[:-1])
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


@dataclass(frozen=True)
class TargetRelease:
    """Output of a target: what it released.

    Attributes
    ----------
    models : float64 ``[rounds, d]``
        The model after each round.
    sampled : sequence of sequence of int, optional
        Ids of the participants of each round, repeated if sampled repeatedly; None if not visible.
    statistics : mapping of name to float64 ``[rounds]``
        Numbers that are released in addition to the model.
    """

    models: Floats
    sampled: Sequence[Sequence[int]] | None = None
    statistics: Mapping[str, Floats] = field(default_factory=dict)

    @classmethod
    def from_result(cls, result: Any, federation: SyntheticFederation) -> TargetRelease:
        """Make it from a target's result: this class, a mapping of its attributes, or the models.

        Raises
        ------
        ValueError
            If it is not one model for each round.
        """
        if isinstance(result, Mapping):
            hooks = ("models", "sampled", "statistics")
            if "models" not in result or not set(result) <= set(hooks):
                known = ", ".join(hooks)
                raise ValueError(f"released {', '.join(map(repr, result))}; known: {known}.")
            result = cls(**result)
        if not isinstance(result, cls):
            result = cls(result)
        rounds, d = federation.rounds, federation.rows.shape[1]
        expected = f"it must be [{rounds}, {d}]: one after each round."
        try:
            vectors = [flat(model) for model in result.models]
        except (TypeError, ValueError) as error:
            raise ValueError(f"released no models ({error}); {expected}") from error
        lengths = {len(vector) for vector in vectors}
        if lengths != {d} or len(vectors) != rounds:
            shape = [len(vectors), *sorted(lengths)]
            raise ValueError(f"released models of shape {shape}; {expected}")
        models = np.array(vectors)
        numbers = {name: flat(values) for name, values in sorted(result.statistics.items())}
        for name, values in numbers.items():
            if len(values) != rounds:
                raise ValueError(f"released {len(values)} of {name!r}; there are {rounds} rounds.")
        sampled = result.sampled
        if sampled is not None:
            sampled = [[int(client) for client in of_round] for of_round in sampled]
            if len(sampled) != rounds:
                raise ValueError(f"sampled in {len(sampled)} rounds; there are {rounds}.")
        return cls(models, sampled, numbers)


def flat(arrays: Any) -> Floats:
    """Flatten a model's arrays, or one array, to a vector."""
    if not isinstance(arrays, np.ndarray) or arrays.dtype == object:
        arrays = np.concatenate([np.ravel(array) for array in arrays])
    if np.iscomplexobj(arrays):
        raise ValueError("complex numbers, of which only the real part would be examined")
    return np.array(arrays, dtype=np.float64).ravel()


def load(name: str) -> Callable[..., Any]:
    """Import the callable that ``module:callable`` or ``path/to/file.py:callable`` names.

    Raises
    ------
    ValueError
        If there is no such callable.
    """
    source, _, attribute = name.rpartition(":")
    if not source:
        raise ValueError(
            f"{name!r} does not name a callable; it must be module:callable or file.py:callable"
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
    target: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(target):
        raise ValueError(f"{source} has no callable {attribute!r}")
    return target


def serve(name: str) -> None:
    """Answer requests until the input ends."""
    _let_adapters_be_imported()
    # A target that imports these classes from fedsim gets them, not others of the same names.
    sys.modules["fedsim.audit.federation"] = sys.modules[__name__]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the audit alone tells of Ctrl-C
    # What the target prints must not be mixed with answers: its stdout becomes stderr. Nor may it
    # read requests: its stdin is empty.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # Otherwise the audit would wait for answers of a process that has ended but left children.
    os.register_at_fork(after_in_child=answers.close)
    try:
        target: Callable[..., Any] | None = load(name)
        error = ""
    except (Exception, SystemExit) as raised:
        target, error = None, f"{type(raised).__name__}: {raised}"
    with tempfile.TemporaryDirectory() as directory:
        for line in requests:
            if target is None:
                answer: dict[str, Any] = {"error": error}
            else:
                try:
                    answer = _answer(target, json.loads(line), directory)
                except (Exception, SystemExit) as raised:
                    answer = {"error": f"{type(raised).__name__}: {raised}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _let_adapters_be_imported() -> None:
    """Make ``fedsim.audit.adapters`` importable without fedsim, of which they need nothing."""
    if importlib.util.find_spec("fedsim") is not None:
        return
    audit = Path(__file__).parents[1]
    for name, directory in (("fedsim", audit.parent), ("fedsim.audit", audit)):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(directory)]


def _answer(target: Callable[..., Any], request: dict[str, Any], directory: str) -> dict[str, Any]:
    for key in ("rows", "examples"):
        request[key] = np.load(request[key])
    request["shapes"] = [tuple(shape) for shape in request["shapes"]]
    federation = SyntheticFederation(**request)
    release = TargetRelease.from_result(target(federation), federation)
    path = os.path.join(directory, "models.npy")
    np.save(path, release.models)
    statistics = {key: values.tolist() for key, values in release.statistics.items()}
    return {"models": path, "sampled": release.sampled, "statistics": statistics}


if __name__ == "__main__":
    # This file's directory has modules whose names could hide those of other packages.
    sys.path.pop(0)
    serve(sys.argv[1])
