"""Losses: one number for each example, and nothing of what does not count."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedsim import registry
from fedsim.errors import FedsimError
from fedsim.tasks import (
    IGNORED,
    absolute_error,
    binary_cross_entropy,
    cross_entropy,
    loss_named,
    squared_error,
)


def test_the_loss_of_a_sequence_is_the_mean_over_the_positions_that_count() -> None:
    z = torch.randn(3, 6, 5, requires_grad=True)
    y = torch.randint(5, (3, 6))
    y[0, 2:], y[2] = IGNORED, IGNORED
    losses = cross_entropy(z, y)
    assert losses[0].item() == pytest.approx(F.cross_entropy(z[0, :2], y[0, :2]).item())
    assert losses[1].item() == pytest.approx(F.cross_entropy(z[1], y[1]).item())
    assert losses[2].item() == 0
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    assert gradient[2].abs().sum() == 0
    assert gradient[0, 2:].abs().sum() == 0
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("loss", [squared_error, absolute_error, binary_cross_entropy])
def test_numbers_that_do_not_count_have_no_part_in_a_loss_or_its_gradient(loss) -> None:
    z, y = torch.randn(3, 4), (torch.rand(3, 4) < 0.5).float()
    masked = y.clone()
    masked[0, 1:], masked[2] = math.nan, math.nan
    z.requires_grad_()
    losses = loss(z, masked)
    assert losses[0].item() == pytest.approx(loss(z[:1, :1], y[:1, :1]).item())
    assert losses[1].item() == pytest.approx(loss(z[1:2], y[1:2]).item())
    assert losses[2].item() == 0
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    assert bool(gradient.isfinite().all())
    assert gradient[0, 1:].abs().sum() == gradient[2].abs().sum() == 0


def test_losses_of_numbers_are_pytorchs() -> None:
    z, y = torch.randn(7, 1), torch.randn(7)
    torch.testing.assert_close(squared_error(z, y), (z[:, 0] - y) ** 2)
    torch.testing.assert_close(absolute_error(z[:, 0], y), (z[:, 0] - y).abs())
    labels = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    expected = F.binary_cross_entropy_with_logits(z[:, 0], labels.float(), reduction="none")
    torch.testing.assert_close(binary_cross_entropy(z, labels), expected)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (cross_entropy, torch.zeros(2, 3), torch.zeros(2)),
        (cross_entropy, torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64)),
        (squared_error, torch.zeros(2, 3), torch.zeros(2)),
        (binary_cross_entropy, torch.zeros(2, 3), torch.zeros(2, 4)),
    ],
)
def test_outputs_that_do_not_fit_end_with_a_sentence(loss, outputs, targets) -> None:
    with pytest.raises(FedsimError, match=r"the model gives outputs .*model\.loss"):
        loss(outputs, targets)


@pytest.mark.parametrize("name", registry.names("loss"))
def test_every_loss_gives_one_number_for_each_example_under_vmap(name: str) -> None:
    outputs = torch.randn(4, 3, 5)
    classes = name == "cross-entropy"
    targets = torch.randint(5, (4, 3)) if classes else (torch.rand(4, 3, 5) < 0.5).float()
    loss = loss_named(name)
    apart = torch.stack([loss(z, y) for z, y in zip(outputs, targets, strict=True)])
    torch.testing.assert_close(torch.func.vmap(loss)(outputs, targets), apart)
