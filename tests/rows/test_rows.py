from __future__ import annotations

import numpy as np
import pytest
import torch
from release_helpers import releaser, source
from torch import Tensor, nn

from fedsim.mechanisms import (
    AdaClip,
    Clipping,
    CoordinateClipping,
    Mechanism,
    Normalization,
    PerLayer,
    QuantileClipping,
)
from fedsim.rows import DenseRows, Layout, LinearPart, OuterRows, Rows


def outer_rows(dtype: torch.dtype = torch.float64) -> OuterRows:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype)

    return OuterRows(
        (LinearPart(draw(7, 5), draw(7, 4)), LinearPart(draw(7, 4), draw(7, 3), bias=False))
    )


def test_dense_norms_are_scaled_and_centred() -> None:
    block = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    scale, center = torch.rand(9).double() + 0.1, torch.randn(9).double()
    expected = ((block.double() - center) * scale).norm(dim=1)
    torch.testing.assert_close(DenseRows(block).norms(scale, center), expected)


def test_dense_sums_leave_out_rows_of_weight_zero_even_if_they_are_nan() -> None:
    block = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [3.0, 4.0]])
    total = DenseRows(block).sum(torch.tensor([1.0, 0.0, 2.0]))
    torch.testing.assert_close(total, torch.tensor([7.0, 10.0], dtype=torch.float64))


def test_columns_are_the_same_rows_over_fewer_coordinates() -> None:
    block = torch.arange(12.0).reshape(2, 6)
    picked = DenseRows(block).columns([slice(4, 6), slice(0, 1)]).dense()
    assert torch.equal(picked, block[:, [4, 5, 0]])


def test_implicit_rows_of_a_model_are_its_per_example_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    hidden = model[0](x)
    active = torch.tanh(hidden)
    logits = model[2](active)
    loss = nn.functional.cross_entropy(logits, y, reduction="sum")
    delta1, delta2 = torch.autograd.grad(loss, [hidden, logits])
    rows = OuterRows((LinearPart(x, delta1), LinearPart(active.detach(), delta2)))
    layout = Layout.of(dict(model.named_parameters()))
    for k in range(6):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[k : k + 1]), y[k : k + 1]).backward()
        gradient = layout.flatten({n: p.grad for n, p in model.named_parameters()})
        torch.testing.assert_close(rows.dense()[k], gradient)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_implicit_norms_and_sums_equal_the_dense_ones(scaled: bool, centred: bool) -> None:
    rows = outer_rows()
    dense = DenseRows(rows.dense())
    d = dense.tensor.shape[1]
    generator = torch.Generator().manual_seed(1)
    scale = torch.rand(d, generator=generator).double() + 0.1 if scaled else None
    center = torch.randn(d, generator=generator).double() if centred else None
    torch.testing.assert_close(rows.norms(scale, center), dense.norms(scale, center))
    weights = torch.rand(7, generator=generator).double()
    torch.testing.assert_close(rows.sum(weights), dense.sum(weights))


@pytest.mark.parametrize(
    "mechanism",
    [
        Clipping(0.8),
        Normalization(0.8, smoothing=0.01),
        QuantileClipping(initial_clip_norm=4.0, bit_noise=1.0),
        AdaClip(clip_norm=3.0),
        AdaClip(clip_norm=3.0, center=False),
        CoordinateClipping(0.3),
        PerLayer(Clipping(0.8)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("rounds", [1, 3])
def test_mechanisms_release_the_same_from_implicit_rows_as_from_dense_ones(
    mechanism: Mechanism, rounds: int
) -> None:
    implicit = outer_rows()
    layout = Layout.of(
        {
            "0.weight": torch.empty(4, 5, dtype=torch.float64),
            "0.bias": torch.empty(4, dtype=torch.float64),
            "2.weight": torch.empty(3, 4, dtype=torch.float64),
        }
    )
    releasing = releaser(mechanism, layout, 0.3, 7.0)
    means = []
    kinds: tuple[Rows, Rows] = (implicit, DenseRows(implicit.dense()))
    for rows in kinds:
        state = mechanism.init(layout)
        for t in range(rounds):
            total = releasing.start(state)
            total.add(rows, weights=torch.tensor([1.0, 1, 0, 1, 0.5, 1, 1]))
            release = releasing.release(total, source(t))
            state = release.state
            assert total.count == 6
        means.append(release.mean)
    torch.testing.assert_close(means[0], means[1], atol=2e-5, rtol=0)


def test_a_non_finite_example_contributes_nothing_to_an_implicit_sum() -> None:
    rows = outer_rows()
    rows.layers[0].x[2, 1] = float("nan")
    mechanism = Clipping(1.0)
    releasing = releaser(mechanism, Layout.of({"w": rows.dense()[0]}))
    total = releasing.start({})
    assert total.add(rows).tolist() == [True, True, False, True, True, True, True]
    assert (total.count, total.rejected) == (6, 1)
    release = releasing.release(total, source(0))
    assert bool(torch.isfinite(release.mean).all())


def test_columns_of_whole_layers_stay_implicit() -> None:
    rows = outer_rows()
    dense = rows.dense()
    first, second, mixed = slice(0, 24), slice(24, 36), slice(20, 30)
    assert isinstance(rows.columns([first]), OuterRows)
    assert isinstance(rows.columns([first, second]), OuterRows)
    assert isinstance(rows.columns([mixed]), DenseRows)
    for part in (first, second, mixed):
        torch.testing.assert_close(rows.columns([part]).dense(), dense[:, part])


@pytest.mark.parametrize("shaped", [False, True])
def test_rows_of_several_clients_are_those_of_each(shaped: bool) -> None:
    rng = np.random.default_rng(8)
    x, delta = (torch.from_numpy(rng.normal(size=(3, 7, width))) for width in (5, 4))
    outer = OuterRows((LinearPart(x, delta), LinearPart(delta, x, bias=False)))
    d = outer.dense().shape[2]
    scale, center = (torch.from_numpy(rng.normal(size=(3, d))) for _ in range(2))
    weights = torch.from_numpy(rng.random((3, 7)))
    weights[:, 2] = 0
    for rows in (outer, DenseRows(outer.dense())):
        assert rows.count == 7
        vectors = (scale, center) if shaped else ()
        norms, sums = rows.norms(*vectors), rows.sum(weights)
        for k in range(3):
            own = rows[k, slice(None)]
            torch.testing.assert_close(norms[k], own.norms(*(v[k] for v in vectors)))
            torch.testing.assert_close(sums[k], own.sum(weights[k]))
            torch.testing.assert_close(own.dense(), outer.dense()[k])
            few = rows.columns([slice(0, 24)])[1:, 2:5]
            torch.testing.assert_close(few.dense(), outer.dense()[1:, 2:5, :24])
