"""The tutorial's bound, and what it takes to write one."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from clients_helpers import make_data, make_mlp
from release_helpers import one_round, plan_of, shares_of, sources

from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    CoordinateClipping,
    Normalization,
    PerLayer,
    PrivateScalar,
    QuantileClipping,
    Releaser,
)
from fedsim.privacy.noise import Independent
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.training import ExamplePrivacy, Trainer

TUTORIAL = Path(__file__).parents[2] / "docs" / "your_own_mechanism.md"
BLOCKS = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), flags=re.DOTALL)
NAMES: dict[str, object] = {}
exec(BLOCKS[0], NAMES)
SmoothClipping = NAMES["SmoothClipping"]


@pytest.mark.parametrize("size", [1e-200, 1e-3, 1.0, 1e3, 1e200])
def test_the_tutorials_bound_keeps_every_row_in_the_ball(size):
    rows = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bounded = SmoothClipping(0.7).bound(rows * size)
    assert bool((bounded.norm(dim=1) <= 0.7).all())
    if 1e-100 < size < 1e100:
        norms = (rows * size).norm(dim=1)
        expected = norms / (1 + (norms / 0.7) ** 4) ** 0.25
        torch.testing.assert_close(bounded.norm(dim=1), expected, rtol=1e-9, atol=0)
    rows[3, 2] = torch.nan
    assert not SmoothClipping(0.7).bound(rows * size)[3].any()


def test_the_tutorials_bound_goes_wherever_clipping_does():
    rows = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    for mechanism in (SmoothClipping(1.0), PrivateScalar(PerLayer(SmoothClipping(1.0)))):
        side_scalars = dict.fromkeys(mechanism.side_scalar_names, torch.ones(6))
        release = one_round(mechanism, {}, rows, 1.0, 6.0, side_scalars=side_scalars)
        assert bool(torch.isfinite(release.mean).all())
        shares = shares_of(mechanism, {}, rows, 1.0, 6.0, sources(0, 6), side_scalars=side_scalars)
        assert shares.usable.all()
    trainer = Trainer(
        make_mlp(12, 5), SGD(lr=0.1), make_data([9, 4, 7], features=12), batch_size=3,
        randomness=Randomness(1), privacy=ExamplePrivacy(SmoothClipping(1.0), 1.0),
    )  # fmt: skip
    (block,) = trainer.train(trainer.initial(), np.arange(3), 1)
    assert block.ok.all()


def test_the_tutorials_release_runs():
    names = dict(NAMES)
    exec(BLOCKS[1], names)
    assert names["total"].count == 100


def test_bounds_without_state_are_those_that_a_correlated_noise_may_have():
    layout = Layout.of({"w": torch.empty(4)})
    stay = (Clipping(1.0), Normalization(1.0), CoordinateClipping(1.0), SmoothClipping(1.0))
    change = (QuantileClipping(), AdaClip(), AdaptiveNoise(1.0, 1.0, 1.0))
    assert not any(mechanism.init(layout) for mechanism in stay)
    assert all(mechanism.init(layout) for mechanism in change)


def test_a_scalar_cannot_have_the_name_of_what_is_released_beside_it():
    layout = Layout.of({"row": torch.zeros(3)})
    for name in ("sum", "unclipped"):
        mechanism = PrivateScalar(QuantileClipping(bit_noise=0.5), name=name)
        with pytest.raises(FedsimError, match=f"the scalar '{name}' has the name"):
            Releaser(plan_of(mechanism, Independent(1.0), 20.0), layout)


@pytest.mark.parametrize(
    ("split", "told"),
    [
        ({"sum": 0.2}, "protect no better than one of 0.2"),
        ({"sum": 0.0}, "protect no better than one of 0 "),
        ({"sum": 1.0, "bit": 1.0}, "protect no better than one of 0.707107"),
        ({"sum": float("nan")}, "no noise multiplier to 'sum'"),
        ({"sum": float("inf")}, "no noise multiplier to 'sum'"),
        ({"bit": 1.0}, "no noise multiplier to 'sum'"),
    ],
)
def test_a_bound_that_splits_noise_into_less_than_is_charged_is_refused(split, told):
    class Splitting(Clipping):
        def split(self, noise_multiplier, denominator):
            return split

    layout = Layout.of({"row": torch.zeros(3)})
    with pytest.raises(FedsimError, match=told):
        Releaser(plan_of(Splitting(1.0), Independent(1.0), 20.0), layout)
    inside = PerLayer(Splitting(1.0))
    with pytest.raises(FedsimError, match=told.replace("'sum'", "'0.sum'")):
        Releaser(plan_of(inside, Independent(1.0), 20.0), layout)
