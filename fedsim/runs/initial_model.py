"""The model that a run starts from."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedsim import models
from fedsim.config import RunConfig
from fedsim.config.things import find, settings_for
from fedsim.datasets import Dataset
from fedsim.errors import FedsimError, printable

__all__ = ["copied_model", "named_model", "prepared_model"]


def named_model(config: RunConfig, dataset: Dataset) -> nn.Module:
    """The model that a config names, for the examples of a data set."""
    settings = config.model
    return models.build(
        settings.name,
        dataset.input_shape,
        dataset.num_outputs,
        vocabulary=dataset.vocabulary,
        dtype=getattr(torch, settings.dtype),
        seed=config.seed,
        **settings_for(settings, find(settings), models.OFFERED),
    )


def copied_model(model: nn.Module) -> nn.Module:
    """A copy of a model from Python.

    Raises
    ------
    FedsimError
        If it cannot be copied.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a user's code
        raise FedsimError(
            f"model= cannot be copied ({type(error).__name__}: {printable(error)}); it must be a "
            "module that copy.deepcopy takes, with parameters and buffers alone for tensors."
        ) from error


def prepared_model(config: RunConfig, model: nn.Module) -> tuple[nn.Module, list[str]]:
    """A model as the run trains it, on the CPU, and sentences about what was done to it.

    Raises
    ------
    FedsimError
        If such a run may not train it.
    """
    settings, notes = config.model, list[str]()
    dtype = getattr(torch, settings.dtype)
    others = {p.dtype for p in model.parameters() if p.is_floating_point()} - {dtype}
    model = model.cpu().to(dtype)
    if others:
        given = " and ".join(sorted(map(str, others)))
        notes.append(f"The model's parameters of {given} are trained as {dtype} (model.dtype).")
    if settings.fix:
        model, changes = models.fix_normalisation(model)
        notes += changes
    if settings.personal:
        names = [name for name, _ in model.named_parameters()]
        models.localise(model, models.matching("model.personal", settings.personal, names))
    if settings.weights:
        models.load_weights(model, settings.weights, settings.weights_for)
    models.refuse_unusable_parameters(model)
    models.freeze(model, settings.trainable)
    if config.private:
        models.refuse_running_statistics(model)
    return model, notes
