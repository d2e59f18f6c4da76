"""A model on one example, before anything is trained or written."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.errors import FedsimError, printable, users_place
from fedsim.runs.build import Build
from fedsim.training.hidden_draws import left_as_it_was

__all__ = ["try_model"]


def try_model(build: Build) -> None:
    """Let the model take an example of its data, once as in training and once as in evaluation.

    Raises
    ------
    FedsimError
        If the model fails, with its error and where that is; or if what it gives is no row of
        numbers for each example, or nothing that training could change.
    """
    parts = build.parts
    example = next((indices[0] for indices in parts if len(indices)), None)
    if example is None:
        return
    data = build.client_data(build.dataset.train, parts)
    dtype = getattr(torch, build.config.model.dtype)
    # Two: layers that normalise a batch do not take one, and are refused by name later.
    x = data.inputs(torch.from_numpy(np.full(2, example)).to(data.x.device), dtype)
    model = build.model.to(data.x.device)
    for training in (True, False):
        with left_as_it_was(model, x.device), torch.enable_grad():
            _check(_outputs(model.train(training), x), x)


def _outputs(model: nn.Module, x: Tensor) -> object:
    try:
        return model(x.clone())
    except (Exception, SystemExit) as error:  # a user's code
        lines = str(error).strip().splitlines() or [""]
        place = users_place(error.__traceback__)
        raise FedsimError(
            f"the model ends in {type(error).__name__} ({printable(lines[0])})"
            f"{_module(model, error)}{place and f', at {place}'}; it must take {_given(x)}, as its "
            "data are."
        ) from error


def _check(outputs: object, x: Tensor) -> None:
    """Refuse outputs with which no loss could begin."""
    if not isinstance(outputs, Tensor):
        raise FedsimError(
            f"the model gives {type(outputs).__name__} for {_given(x)}; it must give one "
            "torch.Tensor [B, ...], such as logits alone."
        )
    if outputs.shape[:1] != x.shape[:1]:
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
            "what the model gives does not depend on a parameter that is trained, or has no "
            "gradient any more (by detach or torch.no_grad); there must be one."
        )


def _given(x: Tensor) -> str:
    return f"a batch [B, {', '.join(map(str, x.shape[1:]))}] of {x.dtype}"


def _module(model: nn.Module, error: BaseException) -> str:
    """Which of the model's parts an error is of: the innermost that was running."""
    trace, running = error.__traceback__, ""
    parts = {id(module): (name, module) for name, module in model.named_modules() if name}
    while trace is not None:
        name, module = parts.get(id(trace.tb_frame.f_locals.get("self")), ("", model))
        if name:
            said = type(module).__name__ if any(module.children()) else repr(module)
            running = f" in its '{name}', {printable(said)}"
        trace = trace.tb_next
    return running
