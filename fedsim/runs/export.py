"""Exports a trained model, with its normalisation, to formats for use without fedsim."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import tomli_w
import torch
from safetensors.torch import save as serialise
from torch import Tensor

from fedsim import optional_packages
from fedsim.config import RunConfig
from fedsim.config.release_keys import keys_outside_release, path_keys
from fedsim.config.run_config import nested
from fedsim.errors import FedsimError, printable
from fedsim.privacy.durable import named_errors
from fedsim.privacy.verification import METADATA
from fedsim.runs.directory import missing_directories
from fedsim.runs.saved import SavedRun

PEFT = "peft"
"""The only format that is a folder."""


def export(saved: SavedRun, to: str) -> bytes:
    """A run's model as the content of a file in another format.

    Parameters
    ----------
    saved : SavedRun
    to : "onnx", "torchscript" or "safetensors"
        The first two take raw inputs, as in the data set, in batches of any size, and normalise
        them. The last has the weights, without personal ones; its metadata describes inputs,
        normalisation and labels.

    Raises
    ------
    FedsimError
        If a required package is not installed, or the model cannot be converted.
    """
    return FORMATS[to](saved)


def _onnx(saved: SavedRun) -> bytes:
    optional_packages.require("--to onnx", "onnx", "onnxscript")
    model, example = saved.model, _example(saved)
    with _explain_conversion_errors(saved, "onnx"):
        program: Any = torch.onnx.export(
            model,
            (example,),
            input_names=["inputs"],
            output_names=["outputs"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    return bytes(program.model_proto.SerializeToString())


def _torchscript(saved: SavedRun) -> bytes:
    model, example, file = saved.model, _example(saved), io.BytesIO()
    with _explain_conversion_errors(saved, "torchscript"):
        traced: Any = torch.jit.trace  # has no types
        torch.jit.save(traced(model, example), file)
    return file.getvalue()


@contextmanager
def _explain_conversion_errors(saved: SavedRun, to: str) -> Iterator[None]:
    """Turn an error of a conversion into a sentence that says why the model does not fit."""
    with warnings.catch_warnings():
        # torch warns that TorchScript is deprecated; its successor can be read by torch only.
        warnings.simplefilter("ignore")
        try:
            yield
        except Exception as error:
            raise _export_error(saved, to, error) from error


def _safetensors(saved: SavedRun) -> bytes:
    about = {
        "model": saved.config.model.name,
        "input-shape": saved.input_shape,
        "input": _names_of(saved.input_dtype),
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


def _names_of(dtype: torch.dtype | dict[str, torch.dtype]) -> Any:
    if isinstance(dtype, dict):
        return {name: _names_of(one) for name, one in dtype.items()}
    return str(dtype).removeprefix("torch.")


def _example(saved: SavedRun) -> Tensor:
    """A batch of two zero examples, of the inputs' dtype."""
    shape, dtype = saved.input_shape, saved.input_dtype
    if isinstance(shape, dict) or isinstance(dtype, dict):
        raise FedsimError(
            f"the model takes {', '.join(map(str, shape))} by name, and a file of its graph takes "
            "one input; `--to safetensors` always works."
        )
    return torch.zeros((2, *shape), dtype=dtype)


def _export_error(saved: SavedRun, to: str, error: Exception) -> FedsimError:
    # torch wraps the cause in many lines of advice, with colours.
    reason: BaseException = error
    while reason.__cause__ is not None:
        reason = reason.__cause__
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    message = printable(re.sub(r"\x1b\[[0-9;]*m", "", lines[0])).rstrip(".")
    return FedsimError(
        f"the model {saved.config.model.name} cannot be put into {to} ({message}); "
        "`--to safetensors` always works."
    )


FORMATS: dict[str, Callable[[SavedRun], bytes]] = {
    "onnx": _onnx,
    "torchscript": _torchscript,
    "safetensors": _safetensors,
}
"""Function that makes each format."""

SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt", "safetensors": ".safetensors", PEFT: "-adapter"}
"""Suffix of each format's file, or of peft's folder."""


def default_path(saved: SavedRun, to: str) -> Path:
    """Default path of an export: next to the run's directory."""
    path = saved.directory.path.absolute()
    return path.with_name(path.name + SUFFIXES[to])


def export_adapter(saved: SavedRun, out: Path) -> Path:
    """Write a run's adapter as a folder in peft's format.

    Parameters
    ----------
    saved : SavedRun
    out : path
        A directory that does not exist.

    Raises
    ------
    FedsimError
        If the run has no adapter, or one that peft does not know; if parts of it are personal;
        if ``out`` exists.
    """
    if saved.config.adapter.name == "none" or saved.merge or saved.personal:
        obstacle = "merges its adapter" if saved.merge else "has no adapter that all clients share"
        raise FedsimError(f"--to peft writes an adapter, but {saved.directory.path} {obstacle}.")
    files = saved.config.adapter.make().files(saved.trained)
    with _new_directory(out) as draft:
        for name, content in files.items():
            (draft / name).write_bytes(content)
    return out


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """Make a directory that is renamed to ``out`` once its content is complete.

    Raises
    ------
    FedsimError
        If ``out`` exists.
    """
    if os.path.lexists(out):
        raise FedsimError(f"--out {out} already exists; choose another directory.")
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    created = missing_directories(out.parent)
    try:
        # Of the draft's files users know nothing.
        with named_errors(out):
            draft.mkdir(parents=True)
            yield draft
            draft.rename(out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):
            for directory in created:
                directory.rmdir()
        raise


_EXAMPLES_TOO = (
    "Clients protect their examples too: the cost of that depends on who took part, which is not "
    "revealed here."
)

_NO_HEAD = (
    "The ledger's final hash is left out: it depends on the seed too, so that the seed, and with "
    "it the noise, could be found from it."
)


BUNDLE = {
    "statement.html": "the guarantee on one page, for an ethics board",
    "statement.txt": "the guarantee in full",
    "statement.json": "the same, for programs",
    "model.safetensors": "the model",
    "config.toml": "what determines the releases",
}
"""Files of a public bundle, each with what it is."""


def publish(saved: SavedRun, out: Path, client_noun: str = "") -> Path:
    """Write a private run's public bundle: model, statement and config.

    ``statement.html`` is the statement on one page, in words for an ethics board.

    It has only what the guarantee covers, and nothing by which the seed of simulated noise could
    be found.

    Parameters
    ----------
    saved : SavedRun
    out : path
        A directory that does not exist.
    client_noun : str
        What that page calls a client; by default, what the owners' column is called.

    Raises
    ------
    FedsimError
        If the run has no guarantee, or ``out`` exists.
    """
    covered = [s for s in saved.record.statements if s.private and s.cost.releases]
    statements = [s for s in covered if s.level == "client"] or covered
    if not statements:
        raise FedsimError(
            f"{saved.directory.path} has no privacy guarantee, so nothing in it is covered; "
            "--public is for runs with a mechanism and noise."
        )
    simulated = any(statement.simulated for statement in statements)
    if simulated:
        statements = [replace(s, head="") for s in statements]
    # Reports are not imported here: they are a layer above.
    page = resolve_name("fedsim.reports.board_page:board_page")(
        saved.config.title or saved.config.name,
        statements,
        client_noun or saved.record.client_noun or "client",
        examples_too=len(statements) < len(covered),
    )
    if simulated:
        statements = [
            replace(s, added_sentence=f"{s.added_sentence} {_NO_HEAD}".strip()) for s in statements
        ]
    weights = saved.weights  # read before anything is written
    with _new_directory(out) as draft:
        # Not the run's own metadata: from a release digest the seed can be found by search.
        about = [{"head": s.head, "lines": s.lines, "level": s.level} for s in statements]
        model = serialise(weights, metadata={METADATA: json.dumps(about, sort_keys=True)})
        (draft / "model.safetensors").write_bytes(model)
        # Without the ledger's path on the operator's machine.
        texts = [
            "\n".join(line for line in s.sentences() if not line.startswith("Ledger: "))
            for s in statements
        ]
        texts += [_EXAMPLES_TOO] if len(statements) < len(covered) else []
        (draft / "statement.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
        (draft / "statement.html").write_text(page, encoding="utf-8")
        facts = [{k: v for k, v in s.to_dict().items() if k != "ledger"} for s in statements]
        (draft / "statement.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        settings = tomli_w.dumps(_public_config(saved.config, simulated))
        (draft / "config.toml").write_text(settings, encoding="utf-8")
    return out


def _public_config(config: RunConfig, simulated: bool) -> dict[str, Any]:
    """Settings that determine the releases; keys in `keys_outside_release` are left out."""
    public: dict[str, Any] = {"title": config.title, "rounds": config.rounds}
    outside, paths = keys_outside_release(), path_keys(config)
    for key, value in config.to_run_config().items():
        if key not in outside and not (simulated and key == "seed"):
            if key in paths and "/" in str(value):  # of a path only the last name
                path = str(value).removeprefix(paths[key].prefix)
                value = str(value).removesuffix(path) + Path(path).name
            public[key] = value
    return nested(public)
