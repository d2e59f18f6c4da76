"""Squared errors without a graph are those of autograd, to the byte."""

from __future__ import annotations

import pytest
import torch
from tensor_bytes import same_bytes

from fedsim.errors import FedsimError
from fedsim.tasks.losses import SquaredError
from fedsim.training.paths.losses import LossesByAutograd, SquaredErrors, prepare_losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("shape", [(7,), (5, 3), (1,), (1000,)])
def test_gradients_and_losses_are_autograds_to_the_byte(shape, absent, dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    y, outputs = (torch.randn(4, 9, *shape, dtype=dtype, generator=generator) for _ in range(2))
    weight = torch.rand(4, 9, dtype=dtype, generator=generator)
    weight[1, 5:] = 0
    if absent:
        y[2, 3] = float("nan")
    ours = prepare_losses(SquaredError(), y, weight)
    assert isinstance(ours, SquaredErrors)
    autograds = LossesByAutograd(SquaredError(), y, weight)
    given = outputs.clone()
    assert same_bytes(ours.deltas(given[1:], 1), autograds.deltas(outputs[1:], 1))
    assert same_bytes(ours.deltas(given[:1], 0), autograds.deltas(outputs[:1], 0))
    assert same_bytes(given, outputs)  # a pass's outputs are not written to
    assert same_bytes(ours.values(), autograds.values())


def test_outputs_of_another_shape_are_refused_as_ever() -> None:
    ours = prepare_losses(SquaredError(), torch.zeros(1, 2, 3), torch.ones(1, 2))
    with pytest.raises(FedsimError, match="one number for each target"):
        ours.deltas(torch.zeros(1, 2, 4), 0)
