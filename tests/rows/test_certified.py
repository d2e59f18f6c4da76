"""No row adds more than its bound, however much cancels in what its norm is made of."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from clients_helpers import as_trained, reading_of
from release_helpers import releaser
from torch import nn

from fedsim.mechanisms import AdaClip, Clipping, Mechanism, Normalization, QuantileClipping
from fedsim.rows import Layout, LinearPart, OuterRows
from fedsim.rows.packing import Packing
from fedsim.training.paths.examples import BY_STRUCTURE
from fedsim.training.paths.factored import PositionsPart
from fedsim.training.probe import gradient_methods


def layout_of(rows: OuterRows) -> Layout:
    return Layout.of({"w": rows.dense()[0]})


def squared(vector: torch.Tensor) -> Fraction:
    """Exactly."""
    return sum((Fraction(value) ** 2 for value in vector.double().tolist()), Fraction(0))


def added(mechanism: Mechanism, rows: OuterRows, state, k: int) -> torch.Tensor:
    """What row ``k`` adds to the sum, in the bound's own coordinates."""
    layout = layout_of(rows)
    total = releaser(mechanism, layout, 0.0).start(state)
    total.add(rows, weights=torch.eye(rows.count)[k])
    return total.grids["sum"].value()


def linear_rows(seed: int, inputs: int = 7, outputs: int = 3, dtype=torch.float32) -> OuterRows:
    rng = np.random.default_rng(seed)
    x, delta = (torch.from_numpy(rng.normal(size=(4, w))).to(dtype) for w in (inputs, outputs))
    return OuterRows((LinearPart(x, delta),))


@pytest.mark.parametrize("h1", [1e-12, 1e-20, 1e-40])
@pytest.mark.parametrize("closeness", [0.0, 1e-12, 1e-9, 1e-7, 1e-5, 1e-3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adaclip_bounds_rows_that_lie_close_to_their_centre(h1, closeness, dtype):
    worst = Fraction(0)
    for seed in range(4):
        rows = linear_rows(seed, dtype=dtype)
        mechanism = AdaClip(h1=h1)
        state = mechanism.init(layout_of(rows))
        away = torch.from_numpy(np.random.default_rng(seed).normal(size=state["m"].shape))
        state["m"] = rows.dense()[1].double() * (1 + closeness * away)
        state["s"] = torch.full_like(state["s"], h1**0.5)
        worst = max(worst, squared(added(mechanism, rows, state, 1)))
    assert worst <= 1


def cancelling(seed: int, L: int, size: tuple[int, int], apart: float) -> OuterRows:
    """Rows whose positions nearly cancel, as a normalisation behind the layer makes them."""
    rng = np.random.default_rng(seed)
    outputs, inputs = size
    x = torch.from_numpy(rng.normal(size=(2, 1, inputs))).float().expand(2, L, inputs)
    delta = torch.from_numpy(rng.normal(size=(2, L, outputs))).float()
    # What is left of a sum over positions is rounding.
    delta[:, -1] -= delta.sum(1) * (1 - apart)
    return OuterRows((PositionsPart(x.contiguous(), delta, bias=False),))


@pytest.mark.parametrize("mechanism", [Normalization(1.0), Clipping(1e-9)], ids=repr)
@pytest.mark.parametrize("apart", [0.0, 1e-7, 1e-5, 1e-3, 1.0])
@pytest.mark.parametrize(
    ("L", "size"), [(3, (6, 40)), (4, (5, 9)), (16, (20, 30)), (9, (2, 3))], ids=str
)
def test_gram_matrices_bound_rows_whose_positions_cancel(mechanism, apart, L, size):
    for seed in range(4):
        rows = cancelling(seed, L, size, apart)
        for k in range(2):
            bound = Fraction(mechanism.clip_norm) ** 2
            assert squared(added(mechanism, rows, {}, k)) <= bound


def test_a_convolution_before_a_group_norm_is_bounded():
    torch.manual_seed(0)
    # A scale of its inputs that the normalisation takes out again: the gradient is rounding.
    model = nn.Sequential(
        nn.Conv2d(16, 4, 1, bias=False),
        nn.GroupNorm(4, 4, affine=False, eps=0.0),
        nn.Flatten(),
        nn.Tanh(),
        nn.Linear(16, 3),
    )
    model[4].requires_grad_(False)
    # The channels are multiples of each other: one weight a channel, and its gradient is zero.
    x = (torch.randn(5, 1, 2, 2) * torch.linspace(0.5, 2, 16).view(1, 16, 1, 1))[None]
    y = torch.randint(3, (1, 5))
    layout = Layout.of({n: p for n, p in model.named_parameters() if p.requires_grad})
    packing = Packing(layout)
    theta = packing.pack(layout.flatten(dict(model.named_parameters()))[None])
    reading = reading_of(model, (16, 2, 2))
    way = gradient_methods(as_trained(model, packing, reading, None))[0]
    assert way.evidence == BY_STRUCTURE
    (examples,) = way.rows(theta, x, y, [5], None)
    rows = examples.rows[0, slice(None)]
    for k in range(5):
        assert squared(added(Normalization(1.0), rows, {}, k)) <= 1


@pytest.mark.parametrize("mechanism", [Normalization(1.0), AdaClip(), QuantileClipping()], ids=repr)
def test_what_is_certain_of_a_row_is_its_own_and_not_its_neighbours(mechanism):
    """Beside a row that cancels, the others add the same bits."""
    sure = OuterRows((PositionsPart(*_positions(1), bias=False),))
    beside = OuterRows((PositionsPart(*_positions(1, spoilt=True), bias=False),))
    state = mechanism.init(layout_of(sure))
    if "m" in state:
        state["m"] = beside.dense()[0].double() * (1 + 1e-9)
    assert torch.equal(added(mechanism, sure, state, 1), added(mechanism, beside, state, 1))
    both = releaser(mechanism, layout_of(sure), 0.0).start(state)
    both.add(beside)
    parts = sum(added(mechanism, beside, state, k) for k in range(3))
    torch.testing.assert_close(both.grids["sum"].value(), parts, rtol=0, atol=1e-6)


def _positions(seed: int, spoilt: bool = False):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(3, 4, 9))).float()
    delta = torch.from_numpy(rng.normal(size=(3, 4, 5))).float()
    if spoilt:
        x[0] = x[0, :1]
        delta[0, -1] = -delta[0, :-1].sum(0)
    return x, delta


@pytest.mark.parametrize("size", [1e-38, 1e-160, 1e-200, 1e150, 1e200])
def test_norms_that_leave_the_range_of_squares_bound_all_the_same(size):
    dtype = torch.float32 if size == 1e-38 else torch.float64
    rows = linear_rows(0, dtype=torch.float64)
    part = rows.layers[0]
    scaled = OuterRows((LinearPart((part.x * size).to(dtype), part.delta.to(dtype), bias=False),))
    for mechanism in (Normalization(1.0), Clipping(1.0)):
        assert squared(added(mechanism, scaled, {}, 1)) <= 1
