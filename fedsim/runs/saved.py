"""`fedsim.load`: loads a finished run for predictions, evaluation and its figures."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsim import regular_files
from fedsim.arguments import as_text, check_arguments
from fedsim.array_types import Array
from fedsim.config import RunConfig
from fedsim.config.release_keys import path_keys
from fedsim.datasets import Dataset, dataset_of
from fedsim.datasets.array_checks import UNUSABLE
from fedsim.datasets.files import data_files
from fedsim.datasets.load import kind_of
from fedsim.errors import FedsimError
from fedsim.models import load_weights, values_of
from fedsim.privacy import Statement
from fedsim.privacy.verification import model_metadata
from fedsim.runs.checkpoints import Checkpoints, RunState
from fedsim.runs.data_split import (
    all_test_examples,
    client_data,
    device_of,
    empty_dataset,
    input_statistics,
    load_dataset,
    resolve_data,
    test_examples_by,
)
from fedsim.runs.directory import RunDirectory
from fedsim.runs.factories import make_trainer
from fedsim.runs.model import (
    InferenceModel,
    initial_model,
    input_dtype,
    model_inputs,
    personal_parameters,
)
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.runs.record import RunRecord
from fedsim.runs.resolve import evaluated
from fedsim.runs.run_lock import is_marked
from fedsim.tasks.metrics import predicted_classes, with_class_axis
from fedsim.training import ClientData

_CHUNK = 256  # examples in a batch of `predict`


@check_arguments
def load(
    path: str | PathLike[str],
    *,
    model: nn.Module | None = None,
    best: bool = False,
    merge: bool = False,
) -> SavedRun:
    """Load a run that has ended, or was interrupted.

    Parameters
    ----------
    path : path
        The run's directory.
    model : nn.Module, optional
        For a run that was given ``model=``: a model of the same architecture. Its parameters and
        buffers are set to the run's, unless an adapter or `model.fix` gave the run other layers;
        `SavedRun.trained` is a copy in any case.
    best : bool
        Whether to load the model of the best round, which `checkpoint.best` saves.
    merge : bool
        Whether to merge the run's adapter into the model, whose parameters then have the names
        of the model without an adapter.

    Raises
    ------
    FedsimError
        If there is no run or one of another version, or its model is missing or does not fit.

    Examples
    --------
    >>> saved = load("runs/digits")
    >>> saved.config.rounds, len(saved.metrics)
    (2, 3)
    >>> saved.predict([[0.0] * 64] * 5).shape
    (5,)
    """
    directory = RunDirectory(path)
    record = RunRecord.read(directory.path)
    if not is_marked(directory.path):  # by the marker it is known whose code is in there
        raise FedsimError(
            f"{directory.path} is not a run's directory: it has no {regular_files.RUN_MARKER}; "
            "copy a run with all its files."
        )
    try:
        config = RunConfig.load(directory.config)
    except FedsimError as error:
        raise FedsimError(
            f"{directory.path} is a run of another version of fedsim, or its config has been "
            f"changed ({str(error).rstrip('.')}); load it with the fedsim that made it."
        ) from None
    if not directory.model.is_file():
        raise FedsimError(
            f"{directory.path} has no model.safetensors, which a run writes when it ends; "
            f"`fedsim run {directory.path} --resume` does so."
        )
    state = Checkpoints(directory.checkpoint).best() if best else None
    if best and state is None:
        raise FedsimError(
            f"{directory.path} has no checkpoint of the best round; a run keeps one with "
            "checkpoint.best."
        )
    if merge and (config.adapter.name == "none" or config.model.personal):
        raise FedsimError(f"{directory.path} has no adapter shared by all clients to merge.")
    saved = SavedRun(directory, config, record, model, state, merge)
    if model is not None:
        _set_values(model, saved.trained)
    return saved


@dataclass(frozen=True)
class SavedRun:
    """A finished run.

    Attributes
    ----------
    directory : RunDirectory
    config : RunConfig
        The resolved config.
    record : RunRecord
        Content of its files.
    template : nn.Module or None
        A model of the run's architecture, if the config does not name one.
    best : RunState or None
        State of the best round, to use its model; None for the last round's.
    merge : bool
        Whether an adapter is merged into the model.
    """

    directory: RunDirectory
    config: RunConfig
    record: RunRecord = field(repr=False)
    template: nn.Module | None = field(default=None, repr=False)
    best: RunState | None = field(default=None, repr=False)
    merge: bool = False

    def __repr__(self) -> str:
        return f"SavedRun({str(self.directory.path)!r}, round {self.round})"

    @property
    def round(self) -> int:
        """Round after which this was the model; a run that was resumed may have later metrics."""
        if self.best is not None:
            return self.best.round
        return int(model_metadata(self.directory.model).get("round", self.record.rounds))

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's parameters and buffers, by name.

        Raises
        ------
        FedsimError
            If model.safetensors is damaged.
        """
        path = self.directory.model
        try:
            saved = load_file(regular_files.require(path))
        except SafetensorError as error:
            raise FedsimError(
                f"{path} is damaged ({error}); restore the one that the run wrote."
            ) from None
        return saved | dict({} if self.best is None else self.best.parameters)

    @property
    def metrics(self) -> list[Mapping[str, float]]:
        """The rows of metrics.csv."""
        return [*self.record.rows]

    @property
    def privacy(self) -> Statement | None:
        """Main privacy statement: at client level, unless private at example level only."""
        return self.record.statements[0] if self.record.statements else None

    @property
    def example_privacy(self) -> Statement | None:
        """Privacy statement at example level; None if clients do not protect their examples."""
        return next((s for s in self.record.statements if s.level == "example"), None)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs; empty for other targets."""
        return self._dataset.labels

    @property
    def input_shape(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        """Shape of one example; of several inputs a dict of their shapes."""
        return self._dataset.input_shape

    @property
    def input_dtype(self) -> torch.dtype | dict[str, torch.dtype]:
        """Dtype of inputs: float32 for features, else the data set's own; a dict of several."""
        return input_dtype(self._dataset)

    @property
    def personal(self) -> list[str]:
        """Names of the personal parameters, whose trained values only clients have."""
        return personal_parameters(self._config, self.trained)

    @cached_property
    def model(self) -> InferenceModel:
        """The model, ready for inference on the CPU, with the normalisation of inputs included.

        Raises
        ------
        FedsimError
            If parts of it are personal.
        """
        self._require_whole()
        return InferenceModel(copy.deepcopy(self.trained), *self.statistics)

    @cached_property
    def trained(self) -> nn.Module:
        """The trained model without normalisation; personal parameters are initial."""
        if self.template is None and "model" in self.record.objects:
            path = str(self.directory.path)
            raise FedsimError(
                f"{path} was trained from an object, model=, which its config does not name; give "
                f"it again, in Python: fedsim.load({path!r}, model=...)."
            )
        model, _ = initial_model(self._config, self._dataset, ObjectOverrides(self.template))
        load_weights(model, self.directory.model)
        if self.best is not None:
            model.load_state_dict(dict(self.best.parameters), strict=False)
        return self.config.adapter.make().merged(model) if self.merge else model

    @property
    def statistics(self) -> tuple[Tensor | None, Tensor | None]:
        """Mean and standard deviation that normalise inputs; None without normalisation."""
        return input_statistics(self._dataset)

    def _require_whole(self) -> None:
        if self.personal:
            raise FedsimError(
                f"{self.directory.path} has model.personal = '{self.config.model.personal}': only "
                "clients have the whole model, and evaluate.clients-every measures it; the shared "
                "part is what `fedsim export --to safetensors` writes."
            )

    @torch.no_grad()
    def predict(self, x: Array | Tensor | Mapping[str, Any] | str | PathLike[str]) -> Array:
        """The model's predictions for some examples.

        Parameters
        ----------
        x : array ``[N, ...]``, or table
            Inputs as in the data set's files (uint8 images ``[N, H, W]`` or ``[N, H, W, C]``,
            features, tokens), or of the model's `input_shape`. For a model of several inputs, a
            mapping of their names to arrays. If the run was trained on a table: a data frame, a
            mapping of names to columns, or the path of a CSV file.

        Returns
        -------
        array in the shape of the targets, ``[N]``, ``[N, L]`` or ``[N, K]``
            Classes as integers, for each example or each of its positions; for regression, numbers;
            for several labels per example, their logits: above 0 for a label that is predicted.

        Raises
        ------
        FedsimError
            If the examples have another shape, other columns or another kind of numbers than the
            model's, or are not finite.
        """
        outputs, shape = self._outputs(x)
        if not self._dataset.num_classes:
            # A loss of the user's own may compare targets with outputs of another shape.
            numbers: Array = outputs.numpy()
            return numbers.reshape(shape) if numbers.size == prod(shape) else numbers
        return predicted_classes(with_class_axis(outputs, shape)).numpy()

    @torch.no_grad()
    def predict_proba(self, x: Array | Tensor | Mapping[str, Any] | str | PathLike[str]) -> Array:
        """Probabilities of classes for some examples, such as an AUC needs.

        Parameters
        ----------
        x : array ``[N, ...]``, or table
            As for `predict`.

        Returns
        -------
        float array ``[N, K]`` or ``[N, L, K]``
            Of each of K classes, in the order of `labels`; a model with one output for two classes
            gives both.

        Raises
        ------
        FedsimError
            Like `predict`, and if targets are not classes.
        """
        if not self._dataset.num_classes:
            raise FedsimError(
                "the model does not predict classes; saved.predict gives its outputs."
            )
        outputs, shape = self._outputs(x)
        logits = with_class_axis(outputs, shape).double()
        if logits.shape[-1] == 1:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
        probabilities: Array = torch.softmax(logits, dim=-1).numpy()
        return probabilities

    def _outputs(self, x: Any) -> tuple[Tensor, tuple[int, ...]]:
        """The model's outputs, and the shape of targets of these examples."""
        inputs = model_inputs(self._dataset, x)
        # Copies: a forward may write to its inputs, which may be the caller's own array.
        parts = (inputs[start : start + _CHUNK] for start in range(0, len(inputs) or 1, _CHUNK))
        outputs = torch.cat([self.model(part.clone()) for part in parts])
        return outputs, (len(inputs), *self._dataset.train.y.shape[1:])

    def evaluate(self, data: object = "") -> dict[str, float]:
        """Loss and metrics on test examples.

        Parameters
        ----------
        data : str, path, or what ``data=`` of a run may be
            Data set whose test examples are used: its name, its path or an object; the run's own
            if empty. Examples of a private run's clients are measured only if it has
            ``evaluate.unprotected``, under whatever name of the run's own data or its files they
            are asked for; a copy of them is the user's own act.

        Raises
        ------
        FedsimError
            If there is no such data set, its examples do not fit the model, the run's own data set
            was a Python object, or metrics of clients' examples may not be shown.
        """
        (metrics,) = self._evaluated(all_test_examples(self._dataset_for(data)))
        return metrics

    def evaluate_by(self, column: str, data: object = "") -> dict[str, dict[str, float]]:
        """Loss and metrics on the test examples of each value of a column, such as ``owner``.

        Parameters
        ----------
        column : str
            Column of the data set with one value an example, such as ``owner``; or what the run's
            table calls it.
        data : str, path, or what ``data=`` of a run may be
            As for `evaluate`, with the same refusals.

        Returns
        -------
        dict of str to dict of str to float
            By value, in order: ``examples``, the number of examples, the loss and the metrics.

        Raises
        ------
        FedsimError
            Like `evaluate`, and if there is no such column.
        """
        dataset = self._dataset_for(data)
        columns = dataset.test.columns
        own_names = {own: name for name, own in self.record.table_columns.items()}
        column = column if column in columns else own_names.get(column, column)
        if column not in columns or column == UNUSABLE:
            known = ", ".join(name for name in columns if name != UNUSABLE) or "no column"
            raise FedsimError(
                f"there is no column {as_text(column)} in the test data, only {known}."
            )
        parts = test_examples_by(dataset, column)
        metrics = self._evaluated(client_data(dataset, dataset.test, [*parts.values()]))
        return {
            value: {"examples": float(len(parts[value])), **of_part}
            for value, of_part in zip(parts, metrics, strict=True)
        }

    def _dataset_for(self, data: object) -> Dataset:
        """The data set to evaluate on, with inputs normalised as in this model's training."""
        self._require_whole()
        data = fspath(data) if isinstance(data, PathLike) else data
        is_own = isinstance(data, str) and (not data or self._is_own_data(data))
        dataset = self._own_dataset() if is_own else self._other_dataset(data)
        return replace(dataset, mean=self._dataset.mean, std=self._dataset.std)

    def _evaluated(self, examples: ClientData) -> list[dict[str, float]]:
        """Loss and metrics on the examples of each of these clients."""
        trainer = make_trainer(self._config, self.trained, examples, device=device_of(self._config))
        values = {k: p.detach() for k, p in self.trained.named_parameters() if p.requires_grad}
        return evaluated(trainer, trainer.layout.flatten(values), self.config.rounds)

    def _is_own_data(self, data: str) -> bool:
        """Whether a name or path is that of a private run's own data set.

        Raises
        ------
        FedsimError
            If it has some of that data set's files, and metrics of them may not be shown.
        """
        config = self.config
        if not config.protects or "data" in self.record.objects:
            return False
        own_files, files = (
            data_files(name, Path(config.data.dir or "data")) if kind_of(name) == "files" else set()
            for name in (config.data.name, data)
        )
        if data == config.data.name or (files and files == own_files):
            return True
        if files & own_files and not config.evaluate.unprotected:
            raise FedsimError(
                f"{data} has files of {config.data.name}, the run's own data, and metrics of "
                "clients' examples have no noise: of a private run they are measured only if it "
                "has evaluate.unprotected = true; name other examples by --data."
            )
        return False

    def _own_dataset(self) -> Dataset:
        """The run's data set; refused if metrics of its test examples may not be shown."""
        config, path = self.config, str(self.directory.path)
        if "data" in self.record.objects:
            raise FedsimError(
                f"{path} was trained from an object, data=, which its config does not name; name a "
                f"data set, or give an object, in Python: fedsim.load({path!r}).evaluate(...)."
            )
        of_cpu = {"engine.device": "cpu", "objects": "", "evaluate.every": 0}
        data = resolve_data(config.replace(**of_cpu))
        if "test" in data.client_splits and not config.evaluate.unprotected:
            raise FedsimError(
                f"the test examples of {config.data.name} are clients' own, and metrics of them "
                "have no noise: of a private run they are measured only if it has "
                "evaluate.unprotected = true; name other examples by --data."
            )
        return data.dataset

    def _other_dataset(self, data: object) -> Dataset:
        """Another data set; refused if the model cannot take its examples."""
        own = self._dataset
        dataset = self._named_dataset(data) if isinstance(data, str) else dataset_of(data)
        if misfit := dataset.misfit(own):
            mismatch, takes = misfit
            name = data if isinstance(data, str) else dataset.name
            raise FedsimError(f"{name} has {mismatch}; this model {takes}.")
        return dataset

    def _named_dataset(self, data: str) -> Dataset:
        """Others' examples, which the run does not protect."""
        own_dataset = self._dataset
        defaults = RunConfig().to_run_config()
        settings = {key: defaults[key] for key in defaults if key.startswith("data.")}
        settings |= {"data.name": data, "data.dir": self.config.data.dir}
        if kind_of(data) != kind_of(self.config.data.name):
            # Data of another kind does not take the keys that the run's kind has alone.
            own_keys = (key for key in self.config.to_run_config() if key.startswith("data."))
            settings |= {key: "" for key in own_keys if key not in defaults}
        if kind_of(data) == "files":  # such a file need not contain every class and token
            settings["data.classes"] = own_dataset.num_classes
            if isinstance(own_dataset.vocabulary, int):  # of several inputs a file declares its own
                settings["data.vocabulary"] = own_dataset.vocabulary
            if own_dataset.feature_names:  # a table, normalised as this model was trained
                settings["data.normalize"] = self.config.data.normalize
        return load_dataset(self.config.replace(**settings), protected=False)

    @cached_property
    def _config(self) -> RunConfig:
        """The run's config for inference: on the CPU, without files that only training reads.

        The kernel is left to the rule, since this machine need not have the run's.
        """
        files = path_keys(self.config, "training")
        unset = dict.fromkeys([*files, "model.weights-for", "objects"], "")
        on_cpu = {"engine.device": "cpu", "client.kernel": "auto", "client.matmul": "float32"}
        return self.config.replace(**unset, **on_cpu)

    @cached_property
    def _dataset(self) -> Dataset:
        """A data set of the run's shapes without examples, if noted; else the run's data set."""
        if (shape := self.record.summary.get("data")) is not None:
            return empty_dataset(self.config.data.name, shape)
        if "data" in self.record.objects:
            raise FedsimError(
                f"{self.directory.path} was interrupted and was trained from an object, data=, "
                "whose shape is written at a run's end; resume it in Python with data=."
            )
        return resolve_data(self._config).dataset


@torch.no_grad()
def _set_values(model: nn.Module, trained: nn.Module) -> None:
    """Give a model the values of another one, if it has the same tensors by name."""
    own, values = values_of(model), values_of(trained)
    shapes = ({name: value.shape for name, value in named.items()} for named in (own, values))
    if next(shapes) == next(shapes):
        for name, value in values.items():
            own[name].copy_(value)
