"""A trained model in another format, with its normalisation, for whoever has no fedsim."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialise
from torch import Tensor

from fedsim.errors import FedsimError, printable
from fedsim.runs.saved import SavedRun

__all__ = ["FORMATS", "default_path", "export"]


def export(saved: SavedRun, to: str) -> bytes:
    """A run's model as a file of another format.

    Parameters
    ----------
    saved : SavedRun
    to : "onnx", "torchscript" or "safetensors"
        The first two take inputs as they lie in the data set, normalise them, and take batches of
        any size. The last holds the weights, but for those that clients keep, and in its metadata
        what a caller must know.

    Raises
    ------
    FedsimError
        If there is no such format, what makes it is not installed, or the model does not fit it.
    """
    if to not in FORMATS:
        raise FedsimError(f"--to is '{to}'; it must be one of {', '.join(FORMATS)}.")
    return FORMATS[to](saved)


def _onnx(saved: SavedRun) -> bytes:
    missing = [name for name in ("onnx", "onnxscript") if not importlib.util.find_spec(name)]
    if missing:
        raise FedsimError(
            f"--to onnx needs {' and '.join(missing)}: install fedsim with its extra `onnx`."
        )
    model, example = saved.model, _example(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program: Any = torch.onnx.export(
                model,
                (example,),
                input_names=["inputs"],
                output_names=["outputs"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                verbose=False,
            )
        except Exception as error:
            raise _does_not_fit(saved, "onnx", error) from error
    return bytes(program.model_proto.SerializeToString())


def _torchscript(saved: SavedRun) -> bytes:
    model, example, file = saved.model, _example(saved), io.BytesIO()
    with warnings.catch_warnings():
        # torch asks for its successor, which only torch can read.
        warnings.simplefilter("ignore")
        try:
            traced: Any = torch.jit.trace  # has no types
            torch.jit.save(traced(model, example), file)
        except Exception as error:
            raise _does_not_fit(saved, "torchscript", error) from error
    return file.getvalue()


def _safetensors(saved: SavedRun) -> bytes:
    about = {
        "model": saved.config.model.name,
        "input-shape": list(saved.input_shape),
        "input": str(_example(saved).dtype).removeprefix("torch."),
        "mean": _numbers(saved.statistics[0]),
        "std": _numbers(saved.statistics[1]),
        "labels": list(saved.labels),
    }
    tensors = {
        name: value.clone(memory_format=torch.contiguous_format)
        for name, value in saved.trained.state_dict().items()
        if name not in saved.personal
    }
    return serialise(tensors, metadata={"about": json.dumps(about)})


def _numbers(statistic: Tensor | None) -> list[float] | None:
    return None if statistic is None else statistic.flatten().tolist()


def _example(saved: SavedRun) -> Tensor:
    """Two made-up examples, of the dtype that the data set has."""
    shape = (2, *saved.input_shape)
    return torch.zeros(shape, dtype=saved.input_dtype)


def _does_not_fit(saved: SavedRun, to: str, error: Exception) -> FedsimError:
    # torch wraps the reason in advice of many lines, with colours.
    reason: BaseException = error
    while reason.__cause__ is not None:
        reason = reason.__cause__
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    said = printable(re.sub(r"\x1b\[[0-9;]*m", "", lines[0])).rstrip(".")
    return FedsimError(
        f"the model {saved.config.model.name} cannot be put into {to} ({said}); "
        "`--to safetensors` always works."
    )


FORMATS: dict[str, Callable[[SavedRun], bytes]] = {
    "onnx": _onnx,
    "torchscript": _torchscript,
    "safetensors": _safetensors,
}
"""How each format is made."""

SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt", "safetensors": ".safetensors"}
"""What files of each format are called."""


def default_path(saved: SavedRun, to: str) -> Path:
    """Where an export goes that nobody has named a place for: beside the run's directory."""
    path = saved.directory.path.absolute()
    return path.with_name(path.name + SUFFIXES[to])
