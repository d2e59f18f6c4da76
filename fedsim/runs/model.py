"""A run's model: made, tried on an example before any training, and wrapped for predictions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedsim import models, regular_files
from fedsim.adapters import Adapter, adapted
from fedsim.array_types import Array
from fedsim.config import RunConfig
from fedsim.datasets import Dataset
from fedsim.datasets.array_checks import torch_dtype
from fedsim.datasets.load import array_of, inputs_of
from fedsim.errors import FedsimError, printable, user_code_location
from fedsim.federation.arrays import array_record
from fedsim.models.carried_buffers import CarriedBuffers
from fedsim.named_tensors import NamedTensors, accept_named, by_name, each
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.server_optimizers.published import ServerSGD
from fedsim.training import ClientData
from fedsim.training.data import as_inputs
from fedsim.training.payload import Personal
from fedsim.training.side_effects import changed_buffers


def initial_model(
    config: RunConfig, dataset: Dataset, overrides: ObjectOverrides | None = None
) -> tuple[nn.Module, tuple[str, ...]]:
    """Make a run's initial model, on the CPU, and sentences about changes made to it.

    Raises
    ------
    FedsimError
        If a model from Python cannot be copied, or the model cannot be trained in such a run.
    """
    settings = config.model
    if overrides is None or overrides.model is None:
        model = models.build(
            settings.name,
            dataset.input_shape,
            dataset.num_outputs,
            vocabulary=dataset.vocabulary,
            dtype=getattr(torch, settings.dtype),
            seed=config.seed,
            **settings.settings_by_key,
        )
    else:
        model = _copy_model(overrides.model, "model=")
    model, notes = _prepare_model(config, model)
    if isinstance(dataset.train.x, NamedTensors):
        accept_named(model)
    if not config.protects and config.adapter.name == "none":
        notes += _carry_buffers(config, model, dataset)
    return model, notes


def _carry_buffers(config: RunConfig, model: nn.Module, dataset: Dataset) -> tuple[str, ...]:
    """Let updates carry the buffers that change as the model runs; with a note on them.

    Batch normalisation is left to the trainer, which refuses it.
    """
    if not any(True for _ in model.buffers()):
        return ()
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    changed = changed_buffers(model, as_inputs(_made_up_inputs(dataset), dtype))
    normalised = [
        n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]
    changed = [name for name in changed if name.rpartition(".")[0] not in normalised]
    if not changed:
        return ()
    carried = CarriedBuffers(model, changed)
    server = config.server.make()
    if carried.averaged and not (
        isinstance(server, ServerSGD) and server.lr <= 1 and not server.momentum
    ):
        raise FedsimError(
            f"the model changes its buffers {', '.join(carried.averaged)} as it runs, of which the "
            f"server takes the mean, and server.optimizer is '{config.server.optimizer}'; it must "
            "be 'sgd' or 'averaged', with server.lr of at most 1 and no momentum."
        )
    notes = []
    if carried.averaged:
        notes.append(
            f"The buffers {', '.join(carried.averaged)}, which change as the model runs, are sent "
            "and averaged like parameters."
        )
    if carried.restored:
        notes.append(
            f"The buffers {', '.join(carried.restored)}, which change as the model runs and cannot "
            "be averaged, begin each client's round as the model has them."
        )
    return tuple(notes)


def _made_up_inputs(dataset: Dataset) -> Tensor:
    """Inputs ``[4, ...]`` of the data set's shape that are no client's."""
    if dataset.public is not None:
        return dataset.public.to("cpu")[torch.arange(4) % len(dataset.public)]

    def made_up(one: Tensor) -> Tensor:
        return torch.cat([one.new_zeros(2, *one.shape[1:]), one.new_ones(2, *one.shape[1:])])

    return each(made_up, dataset.train.x)


def _copy_model(model: nn.Module, name: str) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a user's code
        raise FedsimError(
            f"{name} cannot be copied ({type(error).__name__}: {printable(error)}); it must be a "
            "module that copy.deepcopy takes, whose only tensors are parameters and buffers."
        ) from error


def _prepare_model(config: RunConfig, model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Convert a model for training (dtype, layers, weights, adapter); with notes on changes."""
    settings, notes = config.model, list[str]()
    models.give_logits(model)
    adapter: Adapter | None = None if config.adapter.name == "none" else config.adapter.make()
    dtype = getattr(torch, settings.dtype)
    other_dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} - {dtype}
    model = models.converted(model.cpu(), dtype)
    if other_dtypes and dtype is not torch.bfloat16:
        dtypes = " and ".join(sorted(map(str, other_dtypes)))
        notes.append(f"The model's parameters of {dtypes} are trained as {dtype} (model.dtype).")
    if settings.fix:
        model, changes = models.fix_normalisation(model)
        notes += changes
    if settings.personal and adapter is None:
        names = [name for name, _ in model.named_parameters()]
        models.localise(model, models.matching("model.personal", settings.personal, names))
    if kept := models.keep_statistics(model):
        layers = f"{kept[0]} and {len(kept) - 1} other layers" if len(kept) > 1 else kept[0]
        notes.append(f"The statistics of {layers}, in evaluation mode, stay as they are.")
    if settings.weights:
        models.load_weights(model, settings.weights, settings.weights_for)
    models.refuse_unusable_parameters(model)
    if adapter is not None:
        adapter_settings = settings.trainable, config.adapter.weights
        model = adapted(adapter, model, config.seed, *adapter_settings)
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in model.parameters())
        frozen = f", in float32; the others stay in {settings.dtype}" * (dtype is torch.bfloat16)
        notes.append(
            f"{adapter} (adapter.name): {count:,} of {total:,} parameters are trained{frozen}."
        )
    models.freeze(model, "" if adapter else settings.trainable)
    if config.private:
        models.refuse_running_statistics(model)
    return model, tuple(notes)


def personal_parameters(config: RunConfig, model: nn.Module) -> list[str]:
    """Names of the trained parameters that clients do not share."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    matching = models.matching("model.personal", config.model.personal, names)
    # Running statistics of normalisation layers are personal even if no pattern matches them.
    personal = {*models.running_statistics(model), *matching}
    return [name for name in names if name in personal]


def shared_arrays(model: nn.Module, personal: list[str]) -> ArrayRecord:
    """Copy of the trained parameters that are shared, in Flower's form."""
    parameters = dict(model.named_parameters())
    shared = Personal.from_model(model, personal).shared.layout
    return array_record(
        {entry.name: parameters[entry.name].detach().clone() for entry in shared.entries}
    )


def try_model(config: RunConfig, model: nn.Module, dataset: Dataset, clients: ClientData) -> None:
    """Call the model on an example of its data, in training mode and in evaluation mode.

    Raises
    ------
    FedsimError
        If the model fails (with its error and place), if it does not return floating outputs
        for each example, or if no trained parameter determines them.
    """
    if (one := clients.one_example(protected=config.protects)) is None:
        return
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    device = clients.x.device
    # A batch of two: batch normalisation fails on one example, and is refused by name later.
    x = one.inputs(torch.from_numpy(one.indices[0].repeat(2)).to(device), dtype)
    for training in (True, False):
        copied = _copy_model(model.to(device), "the model").train(training)
        with torch.random.fork_rng([device] if x.is_cuda else []), torch.enable_grad():
            outputs = _outputs(copied, x, config)
            _check_outputs(outputs, x)
            if config.adapter.name != "none":
                _check_adapter(copied, outputs)
            if not training:
                _check_one_example(copied, x[:1], outputs.shape[1:])
        if config.task.loss == "cross-entropy":
            _check_classes(dataset, outputs)


def _outputs(model: nn.Module, x: Tensor, config: RunConfig) -> Any:
    try:
        return model(x.clone())
    except (Exception, SystemExit) as error:  # a user's code
        lines = str(error).strip().splitlines() or [""]
        place = user_code_location(error.__traceback__)
        raise FedsimError(
            f"the model ends in {type(error).__name__} ({printable(lines[0])})"
            f"{_failing_submodule(model, error)}{place and f', at {place}'}; it must take "
            f"{_batch(x)}, as its data are{_layout_hint(x, config)}."
        ) from error


def _layout_hint(x: Tensor, config: RunConfig) -> str:
    """How to keep the axes of arrays that are read as images, if some may have been."""
    inputs = x.tensors.values() if isinstance(x, NamedTensors) else [x]
    image = any(one.is_floating_point() and one.dim() == 4 for one in inputs)
    if not image or config.to_run_config().get("data.layout") != "auto":
        return ""
    return " (with data.layout = 'as-is' no series or matrix is read as an image)"


def _check_outputs(outputs: Tensor, x: Tensor) -> None:
    """Refuse outputs of which no loss could be computed."""
    if not isinstance(outputs, Tensor):
        raise FedsimError(
            f"the model gives {type(outputs).__name__} for {_batch(x)}; it must give one "
            "torch.Tensor [B, ...], such as logits alone."
        )
    if outputs.shape[:1] != (len(x),):
        raise FedsimError(
            f"the model gives outputs {list(outputs.shape)} for {len(x)} examples; it must give "
            f"some for each, [{len(x)}, ...]."
        )
    if not outputs.is_floating_point():
        raise FedsimError(
            f"the model gives outputs of {outputs.dtype}; they must be real numbers, such as "
            "logits: classes are made of them later."
        )
    if not outputs.requires_grad:
        raise FedsimError(
            "the model's outputs depend on no trained parameter, or have lost their gradient (by "
            "detach or torch.no_grad); they must have one."
        )


def _check_one_example(model: nn.Module, x: Tensor, shape: torch.Size) -> None:
    """Refuse a model that drops the axis of a batch of one, as ``squeeze()`` does."""
    try:
        outputs = model(x.clone())
    except Exception:  # it may need more examples than one, which some clients do not have
        return
    if isinstance(outputs, Tensor) and outputs.shape != (1, *shape):
        raise FedsimError(
            f"the model gives outputs {list(outputs.shape)} for one example and {[2, *shape]} for "
            f"two; it must give {[1, *shape]} for one, as squeeze(-1) does in place of squeeze()."
        )


def _check_adapter(model: nn.Module, outputs: Tensor) -> None:
    """Refuse an adapter that the forward pass bypasses, as when layers are in a plain list."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(outputs.sum(), [*trained.values()], allow_unused=True)
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is None:
            raise FedsimError(
                f"adapter.targets or model.trainable lets {name} be trained, but the outputs do "
                "not depend on it: the model's forward skips that module; leave it out."
            )


def _check_classes(dataset: Dataset, outputs: Tensor) -> None:
    """Refuse a model with fewer outputs than there are classes."""
    classes = dataset.num_classes
    if not (classes or dataset.train.y.is_floating_point()):
        raise FedsimError(
            f"{dataset.name} does not say how many classes there are (num_classes of its "
            "Dataset), which task.loss = 'cross-entropy' needs; Dataset.from_arrays finds it."
        )
    if classes == 1 and outputs.dim() > 1 and outputs.shape[-1] == 1:
        raise FedsimError(
            f"{dataset.name} has one class, 0, which task.loss = 'cross-entropy' cannot learn: it "
            "must have two or more; check the labels, or say how many there are (data.classes)."
        )
    if outputs.dim() > 1 and outputs.shape[-1] < classes:
        raise FedsimError(
            f"the model has {outputs.shape[-1]} outputs, and the data have {classes} classes "
            "(data.classes); it must have one for each."
        )


def _batch(x: Tensor) -> str:
    if isinstance(x, NamedTensors):
        return f"{' and '.join(f'{name}=, {_batch(one)}' for name, one in x.tensors.items())}"
    return f"a batch [B, {', '.join(map(str, x.shape[1:]))}] of {x.dtype}"


def _failing_submodule(model: nn.Module, error: BaseException) -> str:
    """The innermost submodule that was running when the error was raised, for a message."""
    trace, place = error.__traceback__, ""
    parts = {id(module): (name, module) for name, module in model.named_modules() if name}
    while trace is not None:
        name, module = parts.get(id(trace.tb_frame.f_locals.get("self")), ("", model))
        if name:
            layer = type(module).__name__ if any(module.children()) else repr(module)
            place = f" in its '{name}', {printable(layer)}"
        trace = trace.tb_next
    return place


class InferenceModel(nn.Module):
    """A trained model that takes raw inputs, as in the data set, and normalises them.

    They are converted as batches are in training (`fedsim.training.data.as_inputs`); then the run's
    normalisation is applied, if it had one. Several inputs by name are `NamedTensors`.

    Parameters
    ----------
    model : nn.Module
        Becomes a submodule, whose parameters are frozen.
    mean, std : Tensor broadcastable to one example, or None
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(self, model: nn.Module, mean: Tensor | None, std: Tensor | None) -> None:
        super().__init__()
        self.model = model
        # As in training: a model in bfloat16 converts what it is given itself.
        first = next(parameter.dtype for parameter in model.parameters())
        self.dtype = torch.promote_types(first, torch.float32)
        for name, number in (("mean", mean), ("std", std)):
            number = None if number is None else number.to(self.dtype)
            self.register_buffer(name, number, persistent=False)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of the model, ``[B, ...]``."""
        x = as_inputs(x, self.dtype)
        if self.mean is not None and self.std is not None:
            x = (x - self.mean) / self.std
        outputs: Tensor = self.model(x)
        return outputs


def input_dtype(dataset: Dataset) -> torch.dtype | dict[str, torch.dtype]:
    """Dtype of inputs: float32 for features, else the data set's own; a dict of several."""
    dtype: torch.dtype | dict[str, torch.dtype] = by_name(_input_dtype, dataset.train.x)
    return dtype


def _input_dtype(x: Tensor) -> torch.dtype:
    is_image = x.dtype == torch.uint8 and x.dim() == 4
    is_number = x.is_floating_point() or x.dtype == torch.uint8
    return torch.float32 if is_number and not is_image else x.dtype


def model_inputs(dataset: Dataset, x: Any) -> Tensor:
    """Inputs of a data set's model, as tensors in the layout of the data set's own.

    Parameters
    ----------
    dataset : Dataset
        Only its shapes and dtypes matter.
    x : array ``[N, ...]``, mapping or table
        As in `SavedRun.predict`.

    Raises
    ------
    FedsimError
        If they have another shape, other columns or names, or another kind of numbers, or are not
        finite.
    """
    shape: Any = dataset.input_shape
    dtype: Any = input_dtype(dataset)
    vocabulary: Any = dataset.vocabulary
    if not isinstance(shape, dict):
        array = inputs_of("examples", x, dataset.feature_names)
        return _one_input("examples", array, shape, dtype, vocabulary)
    if not isinstance(x, Mapping) or x.keys() != shape.keys():
        given = ", ".join(map(str, x)) if isinstance(x, Mapping) else type(x).__name__
        raise FedsimError(
            f"examples are {given or 'without any input'}; they must be a mapping of "
            f"{', '.join(shape)} to arrays, the inputs of this model."
        )
    tensors = {
        name: _one_input(
            f"examples of {name}",
            array_of(name, x[name]),
            shape[name],
            dtype[name],
            vocabulary.get(name, 0),
        )
        for name in shape
    }
    if len({len(tensor) for tensor in tensors.values()}) > 1:
        lengths = ", ".join(f"{len(tensor)} of {name}" for name, tensor in tensors.items())
        raise FedsimError(f"examples are {lengths}; there must be as many of each input.")
    return NamedTensors(tensors)


def _one_input(
    noun: str, array: Array, shape: tuple[int, ...], dtype: torch.dtype, vocabulary: int
) -> Tensor:
    if array.ndim > 1 and array.size and array.shape[1:] != shape and array.dtype.kind in "uif":
        split = {"x": array, "y": np.zeros(len(array), dtype=np.int64)}
        array = Dataset.from_arrays("x", split, split).test.x.numpy()
    if not array.ndim or array.shape[1:] != shape:
        raise FedsimError(
            f"{noun} have shape {array.shape}; this model takes {('N', *shape)}, such as "
            "x[None] for one example x."
        )
    return examples_tensor(array, dtype, vocabulary)


def public_inputs(path: str, dataset: Dataset) -> Tensor:
    """Inputs in the file that `model.example` names.

    Raises
    ------
    FedsimError
        If it cannot be read, has fewer than two examples, or others than the data set's.
    """
    where = f"model.example = '{path}'"
    x: Any = path
    try:
        file = regular_files.require(Path(path))
        if Path(path).suffix.lower() != ".csv":
            x = np.load(file, allow_pickle=False)
            x = dict(x) if isinstance(x, Mapping) else x
    except Exception as error:  # NumPy's parsers may raise anything
        raise FedsimError(
            f"{where} could not be read ({printable(str(error))}); it must be a .npy file, an .npz "
            "with an array for each of several inputs, or a .csv of a table."
        ) from None
    try:
        inputs = model_inputs(dataset, x)
    except FedsimError as error:
        raise FedsimError(f"{where}: {error}") from None
    if len(inputs) < 2:
        raise FedsimError(f"{where} has {len(inputs)} examples; it must have two or more.")
    return inputs


def examples_tensor(array: npt.NDArray[Any], dtype: torch.dtype, vocabulary: int) -> Tensor:
    """Examples as a tensor: converted to ``dtype`` if that is floating, tokens to int64.

    Raises
    ------
    FedsimError
        If they are not numbers that a model of inputs of this dtype takes: tokens below
        ``vocabulary``, or images; or not finite in it (NaN would predict the first class).
    """
    kinds, allowed = "biuf", "real numbers"
    if vocabulary:
        kinds, allowed = "iu", f"tokens, whole numbers from 0 to {vocabulary - 1}"
    elif dtype == torch.uint8 and array.dtype != np.uint8:
        kinds, allowed = "f", "images of dtype uint8, or floating"
    if array.dtype.kind not in kinds:
        raise FedsimError(f"examples are of dtype {array.dtype}; they must be {allowed}.")
    if vocabulary and array.size and not 0 <= array.min() <= array.max() < vocabulary:
        raise FedsimError(
            f"examples are from {array.min()} to {array.max()}; they must be {allowed}."
        )
    numbers = torch.from_numpy(np.ascontiguousarray(array, torch_dtype(array)))
    if vocabulary or dtype.is_floating_point or dtype == torch.bool:
        numbers = numbers.to(torch.int64 if vocabulary else dtype)
    if not numbers.isfinite().all():
        raise FedsimError(
            f"examples have NaN or infinite numbers as {numbers.dtype}; all must be finite."
        )
    return numbers
