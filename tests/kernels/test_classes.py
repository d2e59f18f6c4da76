"""Cross-entropy of classes in one pass: torch's numbers, and the same bytes without a compiler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from fedsim.kernels import classes
from fedsim.kernels.classes import ClassBatches

compiled = pytest.mark.skipif(classes._compiled() is None, reason="there is no C compiler")

AWKWARD = [0.0, -0.0, 1e-45, 1e30, -1e30, 88.0, -87.0, -87.5, np.inf, -np.inf, np.nan]


@st.composite
def batches(draw):
    """Outputs of some batches with a gap between them, targets and weights of more."""
    count, rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 33)), draw(st.integers(1, 40))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    first, gap = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    block = (10 * random.standard_normal((count, rows * width + gap))).astype(np.float32)
    for _ in range(draw(st.integers(0, 3))):
        block[random.integers(count), random.integers(rows * width)] = draw(
            st.sampled_from(AWKWARD)
        )
    outputs = torch.from_numpy(block)[:, : rows * width].view(count, rows, width)
    targets = torch.from_numpy(random.integers(0, width, (first + count, rows)))
    weights = torch.from_numpy(random.random((first + count, rows), dtype=np.float32))
    return outputs, targets, weights, first


def gone_through(outputs, targets, weights, first, *, compiled=True):
    batches = ClassBatches(targets, weights, torch.ones_like(targets, dtype=torch.bool))
    if not compiled:
        batches._compiled = None
    return batches.deltas(outputs, first), batches.values()


@compiled
@given(batches())
def test_the_bytes_are_the_same_without_a_compiler(batch) -> None:
    with np.errstate(all="ignore"):
        for one, other in zip(
            gone_through(*batch), gone_through(*batch, compiled=False), strict=True
        ):
            # What is no number is none in both, whatever its payload.
            assert torch.equal(one.isnan(), other.isnan())
            assert one.nan_to_num(7.0).numpy().tobytes() == other.nan_to_num(7.0).numpy().tobytes()


@given(batches())
def test_gradients_and_losses_are_torchs(batch) -> None:
    outputs, targets, weights, first = batch
    outputs = outputs.clamp(-1e4, 1e4)
    if outputs.isnan().any():
        return
    gradients, losses = gone_through(outputs, targets, weights, first)
    leaf = outputs.double().requires_grad_()
    wanted = cross_entropy(leaf.flatten(0, 1), targets[first:].flatten(), reduction="none")
    (wanted * weights[first:].flatten()).sum().backward()
    torch.testing.assert_close(gradients.double(), leaf.grad, rtol=0, atol=2e-6)
    torch.testing.assert_close(
        losses[first:].flatten().double(), wanted.detach(), rtol=1e-6, atol=2e-6
    )
    assert not losses[:first].any()


def test_the_exponential_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-87, 0, 400_001, dtype=np.float32)
    errors = classes._exponentials(x) / np.exp(x.astype(np.float64)) - 1
    assert np.abs(errors).max() < 2**-22
    assert (classes._exponentials(np.full(1, -87.1, np.float32)) == 0).all()


def test_one_batch_alone_is_that_batch_among_others() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(5, 7, 3, generator=generator)
    targets, weights = torch.arange(35).view(5, 7) % 3, torch.rand(5, 7, generator=generator)
    together, losses = gone_through(outputs, targets, weights, 0)
    alone = ClassBatches(targets, weights, torch.ones_like(targets, dtype=torch.bool))
    for batch in (3, 0, 4, 1, 2):
        assert torch.equal(alone.deltas(outputs[batch], batch), together[batch])
    assert torch.equal(alone.values(), losses)
