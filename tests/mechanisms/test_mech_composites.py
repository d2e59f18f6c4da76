from __future__ import annotations

import math

import pytest
import torch
from release_helpers import one_round as released
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms import (
    AdaptiveNoise,
    Clipping,
    Mechanism,
    NoPrivacy,
    Normalization,
    PerLayer,
    PrivateScalar,
    QuantileClipping,
    Release,
)
from fedsim.rows import Layout

LAYOUT = Layout.of(
    {
        "fc1.weight": torch.empty(2, 2),
        "fc1.bias": torch.empty(2),
        "fc2.weight": torch.empty(1, 2),
        "norm.weight": torch.empty(2),
        "fc2.bias": torch.empty(()),
    }
)


def one_round(
    mechanism: Mechanism,
    rows: Tensor,
    z: float = 1.0,
    side_scalars: dict[str, Tensor] | None = None,
) -> Release:
    state = mechanism.init(LAYOUT)
    return released(mechanism, state, rows, z, 4.0, layout=LAYOUT, side_scalars=side_scalars)


def test_every_module_is_a_layer_of_its_own() -> None:
    rows = torch.randn(3, LAYOUT.d, generator=torch.Generator().manual_seed(0)) * 9
    mechanism = PerLayer(Normalization(2.0))
    bounded = LAYOUT.unflatten(mechanism.bound(rows, layout=LAYOUT))
    for names in (["fc1.weight", "fc1.bias"], ["fc2.weight", "fc2.bias"], ["norm.weight"]):
        part = torch.cat([bounded[name].reshape(3, -1) for name in names], dim=1)
        torch.testing.assert_close(part.norm(dim=1), torch.full((3,), 2.0))
    assert mechanism.sensitivity(mechanism.init(LAYOUT), LAYOUT) == pytest.approx(2 * 3**0.5)


def test_patterns_give_layers_their_own_bounds_and_shares() -> None:
    mechanism = PerLayer((("fc1.*", Clipping(3.0)), ("*", Clipping(4.0))), shares=(0.25, 0.75))
    state = mechanism.init(LAYOUT)
    assert mechanism.sensitivity(state, LAYOUT) == pytest.approx(5.0)
    split = mechanism.noise_multipliers(1.5, 4.0, LAYOUT)
    assert split == {"0.sum": pytest.approx(3.0), "1.sum": pytest.approx(1.5 / 0.75**0.5)}


def test_equal_shares_give_each_of_l_parts_z_sqrt_l_on_its_own_c() -> None:
    mechanism = PerLayer(Clipping(4.0))
    split = mechanism.noise_multipliers(1.5, 4.0, LAYOUT)
    assert list(split.values()) == [pytest.approx(1.5 * 3**0.5)] * 3


def test_one_layer_is_the_mechanism_itself_to_the_byte() -> None:
    rows = torch.randn(3, LAYOUT.d, generator=torch.Generator().manual_seed(0))
    one = one_round(PerLayer((("*", Clipping(0.7)),)), rows)
    assert torch.equal(one.mean, one_round(Clipping(0.7), rows).mean)


def test_states_and_scalars_of_layers_keep_apart() -> None:
    mechanism = PerLayer(QuantileClipping(bit_noise=10.0))
    release = one_round(mechanism, torch.randn(3, LAYOUT.d))
    assert set(release.side_scalars) == {"0.unclipped", "1.unclipped", "2.unclipped"}
    assert {"0.clip_norm", "1.clip_norm", "2.clip_norm"} <= set(release.state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerLayer((("fc1.*", Clipping(1.0)),)).init(LAYOUT), "fc2.weight"),
        (
            lambda: PerLayer((("*", Clipping(1.0)), ("fc1.*", Clipping(1.0)))).init(LAYOUT),
            "matches no parameter that",
        ),
        (lambda: PerLayer(Clipping(1.0), shares=(0.5, 0.4)), "shares"),
        (lambda: PerLayer(Clipping(1.0), shares=(0.5, 0.5)).init(LAYOUT), "shares"),
        (lambda: PerLayer((("*", Clipping(1.0)),), shares=(0.5, 0.5)), "shares"),
        (lambda: PerLayer(PrivateScalar(Clipping(1.0))), "around PerLayer"),
        (lambda: PerLayer((("*", PerLayer(Clipping(1.0))),)), "no PerLayer inside"),
        (lambda: PrivateScalar(PrivateScalar(Clipping(1.0))), "name"),
        (lambda: PrivateScalar(NoPrivacy("num-examples")), "examples"),
        (lambda: PrivateScalar(Clipping(1.0), fraction=1.0), "fraction"),
        (lambda: PrivateScalar(Clipping(1.0), high=0.0), "high"),
    ],
)
def test_impossible_combinations_are_refused(make: object, message: str) -> None:
    with pytest.raises(FedsimError, match=message):
        make()


def test_one_part_without_a_guarantee_voids_the_whole() -> None:
    raw = AdaptiveNoise(1.0, 0.0, 1.0, unsafe_non_private_raw_statistics=True)
    assert PerLayer(raw).guarantee == "none"
    assert PrivateScalar(raw).guarantee == "none"
    assert PrivateScalar(PerLayer(Clipping(1.0))).guarantee == "gaussian"


def test_a_scalar_with_infinite_noise_changes_nothing() -> None:
    rows = torch.randn(3, LAYOUT.d, generator=torch.Generator().manual_seed(0))
    plain = one_round(Clipping(0.7), rows)
    scalar = PrivateScalar(Clipping(0.7), fraction=0.0)
    beside = one_round(scalar, rows, side_scalars={"loss": torch.ones(3)})
    assert torch.equal(plain.mean, beside.mean)
    assert beside.side_scalars == {}
    assert scalar.noise_multipliers(1.3, 4.0, LAYOUT) == {"sum": 1.3, "loss": math.inf}


def test_a_scalar_is_clamped_centred_and_divided_by_the_fixed_denominator() -> None:
    values = torch.tensor([1.0, 7.0, -3.0, math.nan, math.inf])
    release = one_round(
        PrivateScalar(Clipping(1.0), name="loss", high=4.0),
        torch.zeros(5, LAYOUT.d),
        z=0.0,
        side_scalars={"loss": values},
    )
    assert release.side_scalars["loss"] == pytest.approx(2 + ((1 - 2) + 2 - 2 + 0 + 2) / 4)


def test_a_missing_scalar_is_named() -> None:
    with pytest.raises(FedsimError, match="accuracy"):
        one_round(PrivateScalar(Clipping(1.0), name="accuracy"), torch.zeros(5, LAYOUT.d))


def test_two_scalars_nest() -> None:
    mechanism = PrivateScalar(PrivateScalar(Clipping(1.0), "loss"), "accuracy", fraction=0.5)
    split = mechanism.noise_multipliers(1.0, 4.0, LAYOUT)
    assert sum(z**-2 for z in split.values()) == pytest.approx(1.0)
    side_scalars = {"loss": torch.zeros(2), "accuracy": torch.ones(2)}
    release = one_round(mechanism, torch.zeros(2, LAYOUT.d), z=0.0, side_scalars=side_scalars)
    assert release.side_scalars == {"loss": 0.25, "accuracy": 0.75}
