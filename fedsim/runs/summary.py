"""summary.json (figures that are computed once, at a run's end) and report.html."""

from __future__ import annotations

import datetime
import logging
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedsim import models, regular_files
from fedsim.config import RunConfig
from fedsim.datasets import Dataset
from fedsim.datasets.dataset import class_labels
from fedsim.errors import FedsimError, keep_user_frames
from fedsim.federation.arrays import tensors
from fedsim.federation.buffered.timeline import timeline
from fedsim.named_tensors import by_name
from fedsim.partitions.base import by_largest_class, class_counts, class_shares
from fedsim.privacy.verification import model_metadata
from fedsim.runs.checkpoints import versions
from fedsim.runs.data_split import client_data, partition_of, test_examples_by
from fedsim.runs.directory import RunDirectory
from fedsim.runs.metrics import brief, finite_json
from fedsim.runs.record import RunRecord, RunResult
from fedsim.runs.resolve import CentralEvaluation, Resolved, evaluated, resolve
from fedsim.runs.resume import refuse_other_run
from fedsim.runs.run_ledgers import SUMMARY_FORMAT, RunOutcome
from fedsim.tasks.metrics import predicted_classes
from fedsim.training import Trainer
from fedsim.version import VERSION

_log = logging.getLogger("fedsim")


def write_report(
    resolved: Resolved, evaluation: CentralEvaluation, result: RunResult, failure: str = ""
) -> None:
    """Write a run's summary and its report, if it has a directory.

    The run is complete without them, so that errors here are only logged.

    Parameters
    ----------
    resolved : Resolved
    evaluation : CentralEvaluation
    result : RunResult
        The run's result.
    failure : str
        Why it failed; empty if it did not.
    """
    directory = result.directory
    if directory is None:
        return
    try:
        ending = (
            RunOutcome("failed", f"It failed: {failure}") if failure else result.ledgers.outcome
        )
        summary = summarise(resolved, evaluation, tensors(result.arrays), ending)
        directory.save_summary(summary)
        directory.write_manifest()
        directory.save_report(_page(RunRecord.read(directory.path, result.ledgers)))
    except (OSError, FedsimError) as error:
        _log.error("the run is complete, but its report could not be written: %s", error)
    except Exception as error:
        keep_user_frames(error)
        _log.exception("the run is complete, but its report could not be made")


def _page(record: RunRecord) -> str:
    html: str = resolve_name("fedsim.reports.run_page:run_page")(record)
    return html


def complete_record(path: Path) -> RunRecord:
    """Read a run's files; if it was interrupted, compute the missing summary from its model.

    Raises
    ------
    FedsimError
        See `RunRecord.read`.
    """
    record = RunRecord.read(path)
    model = RunDirectory(path).model
    if record.summary or not model.is_file():
        return record
    try:
        if model_metadata(model).get("round") != record.rounds:
            return record  # the saved model is older than the last row
        config = RunConfig.load(path / "config.toml")
        resolved = resolve(config)
        refuse_other_run(RunDirectory(path), resolved)
        saved = load_file(regular_files.require(model))
        arrays = {name: saved[name] for name in resolved.initial_arrays}
        summary = measured(resolved, CentralEvaluation(resolved), arrays)
    except Exception as error:  # data may be missing, and user's code may raise anything
        _log.warning("the model's errors cannot be measured: %s", error)
        return record
    why = "It was interrupted; the model is that of the last complete round."
    return replace(record, summary=summary | {"ended": "interrupted", "why": why})


MAX_CLASSES = 200
"""Largest number of classes for which a confusion matrix is stored and drawn."""

MAX_OWNERS = 200
"""Largest number of owners for which metrics of each are measured at a run's end."""

_MAX_COLUMNS = 120  # in the picture of all clients; if there are more, neighbours are averaged
_MAX_BARS = 24
_BINS = 20
_CHUNK = 256


def summarise(
    resolved: Resolved,
    evaluation: CentralEvaluation,
    arrays: Mapping[str, Tensor],
    ending: RunOutcome,
) -> dict[str, Any]:
    """Summary, for JSON, of a run that has just ended in this process.

    Parameters
    ----------
    resolved : Resolved
    evaluation : CentralEvaluation
    arrays : mapping of name to Tensor
        The final trained parameters.
    ending : RunOutcome
    """
    summary: dict[str, Any] = {
        **ending._asdict(),
        "ended-at": datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="minutes")[:16],
        "peak-memory": _peak_memory(),
        "machine": {
            "engine": resolved.config.engine.name,
            "device": resolved.trainer.device.type,
            "processor": platform.machine(),
            "system": platform.system(),
        },
        "versions": {
            "fedsim": VERSION,
            "python": platform.python_version(),
            **versions(),
        },
    }
    if resolved.trainer.device.type == "cuda":
        summary["peak-gpu-memory"] = torch.cuda.max_memory_allocated(resolved.trainer.device)
    return measured(resolved, evaluation, arrays) | summary


def measured(
    resolved: Resolved, evaluation: CentralEvaluation, arrays: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The part of a summary that follows from a run's config and its final parameters."""
    config = resolved.config
    summary: dict[str, Any] = {"format": SUMMARY_FORMAT}
    labels = resolved.data.dataset.labels
    if config.engine.name != "deployment":  # there the nodes have the data
        summary["data"] = _shape(resolved.data.dataset)
    summary["notes"] = list(resolved.notes)
    summary["parameters"] = sum(values.numel() for values in arrays.values())
    if config.evaluate.every:
        summary["test"] = _test_predictions(evaluation.trainers["test"], arrays, labels)
        for split in ("test", "validation"):
            summary[f"{split}-of-clients"] = split in resolved.read_client_splits
    if (schedule := resolved.devices.schedule) is not None:
        summary["timeline"] = timeline(schedule, resolved.devices.replying)
    if config.evaluate.unprotected or not config.protects:
        summary["partition"] = _partition(resolved, labels)
        if config.evaluate.every:
            summary["owners"] = finite_json(_by_owner(resolved, arrays))
    return summary


def _by_owner(
    resolved: Resolved, arrays: Mapping[str, Tensor]
) -> dict[str, dict[str, float]] | None:
    """Metrics on each owner's test examples; None if these have no owners, or too many."""
    dataset, trainer = resolved.data.dataset, resolved.trainer
    partition = partition_of(resolved.config, resolved.overrides)
    column = getattr(partition, "column", "owner")
    parts = test_examples_by(dataset, column) if column in dataset.test.columns else {}
    if not 0 < len(parts) <= MAX_OWNERS:
        return None
    examples = client_data(dataset, dataset.test, [*parts.values()])
    vector = trainer.layout.flatten(arrays).to(trainer.device)
    metrics = evaluated(
        resolved.trainer_for(examples, privacy=None), vector, resolved.config.rounds
    )
    return {
        owner: {"examples": len(parts[owner]), **of_owner}
        for owner, of_owner in zip(parts, metrics, strict=True)
    }


def _shape(dataset: Dataset) -> dict[str, Any]:
    """Shapes and constants of the data set that building the model needs, without examples."""
    x, y = dataset.train.x, dataset.train.y
    return {
        "x-shape": dataset.input_shape,
        "x-dtype": by_name(_dtype_name, x),
        "y-shape": list(y.shape[1:]),
        "y-dtype": _dtype_name(y),
        "classes": dataset.num_classes,
        "vocabulary": dataset.vocabulary,
        "mean": dataset.mean,
        "std": dataset.std,
        "feature_names": dataset.feature_names,
        "class_names": dataset.class_names,
    }


def _dtype_name(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _peak_memory() -> int:
    """Peak memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@torch.no_grad()
def _test_predictions(
    trainer: Trainer, arrays: Mapping[str, Tensor], names: Sequence[str]
) -> dict[str, Any] | None:
    """Predictions on test examples against the truth; None if they do not fit a picture."""
    count = len(trainer.data.y)
    if not count or not getattr(trainer.loss, "predicts_targets", True):
        return None
    model = trainer.model.eval()
    arrays = {name: values.to(trainer.data.y.device) for name, values in arrays.items()}
    predicted, target_parts = [], []
    for start in range(0, count, _CHUNK):
        index = torch.arange(start, min(start + _CHUNK, count), device=trainer.data.y.device)
        x = trainer.data.inputs(index, _dtype(arrays))
        outputs = models.call_with(model, arrays, x)
        targets = trainer.data.targets(index, _dtype(arrays))
        if targets.is_floating_point():
            if outputs.numel() != targets.numel():
                return None
            predicted.append(outputs.reshape(-1))
        elif outputs.shape[:-1] == targets.shape and outputs.shape[-1] <= MAX_CLASSES:
            predicted.append(predicted_classes(outputs).reshape(-1))
        else:
            return None
        target_parts.append(targets.reshape(-1))
    predictions, truths = torch.cat(predicted).cpu().numpy(), torch.cat(target_parts).cpu().numpy()
    if np.issubdtype(truths.dtype, np.floating):
        real = ~np.isnan(truths)  # NaN marks a missing target
        predictions, truths = predictions[real], truths[real]
        if len(truths) and np.isin(truths, (0.0, 1.0)).all():  # binary labels; outputs are logits
            return _confusion((predictions > 0).astype(np.int64), truths.astype(np.int64), names)
        return _binned(predictions.astype(np.float64), truths.astype(np.float64))
    return _confusion(predictions, truths, names)


def _dtype(arrays: Mapping[str, Tensor]) -> torch.dtype:
    return next(iter(arrays.values())).dtype


def _confusion(
    predictions: npt.NDArray[np.int64], truths: npt.NDArray[np.int64], names: Sequence[str]
) -> dict[str, Any] | None:
    has_target = truths >= 0  # positions of a sequence without a target have a negative class
    predictions, truths = predictions[has_target], truths[has_target]
    if not len(truths):
        return None
    classes = int(max(predictions.max(), truths.max())) + 1
    if classes > MAX_CLASSES:
        return None
    cells = np.bincount(truths * classes + predictions, minlength=classes * classes)
    return {
        "kind": "classes",
        "counts": cells.reshape(classes, classes).tolist(),
        "labels": class_labels(names, classes),
    }


def _binned(
    predictions: npt.NDArray[np.float64], truths: npt.NDArray[np.float64]
) -> dict[str, Any] | None:
    real = np.isfinite(predictions) & np.isfinite(truths)
    if not real.any():
        return None
    # Edges from the truth: a wild prediction would else put all other values into one bin.
    low, high = np.quantile(truths[real], [0.0, 1.0])
    edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
    shown = np.clip(predictions[real], edges[0], edges[-1])
    counts, _, _ = np.histogram2d(shown, truths[real], bins=[edges, edges])
    shares = counts / np.maximum(counts.sum(0, keepdims=True), 1)
    middles = [brief(middle) for middle in ((edges[:-1] + edges[1:]) / 2).tolist()]
    return {
        "kind": "numbers",
        "true": middles,
        "predicted": middles[::-1],
        "shares": shares[::-1].round(4).tolist(),
    }


def _partition(resolved: Resolved, names: Sequence[str]) -> dict[str, Any]:
    """Distribution of clients' numbers of examples and of classes."""
    data = resolved.trainer.data
    sizes = np.array([len(indices) for indices in data.indices], dtype=np.int64)
    least, median, most = np.quantile(sizes, [0, 0.5, 1])
    spread = f"{least:,.10g} at least, {median:,.10g} in the median, {most:,.10g} at most"
    y = data.y
    counts, labels = None, names
    if y.dim() == 1 and not y.is_floating_point() and len(y) and int(y.max()) < MAX_CLASSES:
        counts = class_counts(y.cpu().numpy(), data.indices, int(y.max()) + 1)
        labels = class_labels(names, counts.shape[1])
    said = f"{sizes.sum():,} training examples on {len(sizes):,} clients: {spread}."
    return {"said": said, **distribution(sizes, counts, labels)}


def distribution(
    sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64] | None, names: Sequence[str]
) -> dict[str, Any]:
    """Histograms of clients' examples and classes, and their shares of each class.

    Parameters
    ----------
    sizes : int64 ``[n]``
        Examples of each client.
    counts : int64 ``[n, K]`` or None
        Examples of each client and class; None if targets are no classes.
    names : sequence of str
        Names of the K classes.
    """
    if counts is None:
        return {"sizes": _bars(sizes)}
    return {"sizes": _bars(sizes), **_classes(counts, names)}


def _bars(values: npt.NDArray[np.int64]) -> dict[str, list[Any]]:
    """Histogram of whole numbers in at most `_MAX_BARS` bars of equal width."""
    low, high = int(values.min()), int(values.max())
    width = max(1, -(-(high - low + 1) // _MAX_BARS))
    counts = np.bincount((values - low) // width)
    starts = [low + width * k for k in range(len(counts))]
    labels = [str(start) if width == 1 else f"{start}–{start + width - 1}" for start in starts]
    return {"labels": labels, "counts": counts.tolist()}


def _classes(counts: npt.NDArray[np.int64], names: Sequence[str]) -> dict[str, Any]:
    """Clients' numbers of classes, and their shares of each class, from ``counts [n, K]``."""
    summary: dict[str, Any] = {"classes": _bars((counts > 0).sum(1))}
    if counts.shape[1] <= _BINS:
        shares, order = class_shares(counts), by_largest_class(counts)
        columns = np.array_split(order, min(len(order), _MAX_COLUMNS))
        summary["mixes"] = {
            "labels": names,
            "columns": [str(c[0]) if len(c) == 1 else f"{len(c)} neighbours" for c in columns],
            "shares": np.stack([shares[c].mean(0) for c in columns], 1).round(4).tolist(),
        }
    return summary
