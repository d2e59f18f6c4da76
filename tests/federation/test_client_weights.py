"""Declared weights of clients: they multiply bounded updates, and no row moves the sum by more."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fixed_clients import Fixed

import fedsim
from fedsim import RunConfig, registry
from fedsim.audit.user_checks import hostile_rows
from fedsim.cohorts import FullCohort, PoissonCohort
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record, tensors
from fedsim.mechanisms import Clipping, CoordinateClipping, NoPrivacy, Normalization
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import ReleasePlan
from fedsim.rows import Layout
from fedsim.strategies import DPFedAvg

UPDATES = torch.tensor([[3.0, 4.0], [0.3, -0.4], [0.0, 2.0]])
WEIGHTS = (4.0, 1.0, 2.0)


CLIPPING, ALL = Clipping(1.0), FullCohort(3)


def plan_of(mechanism=CLIPPING, cohort=ALL, weights=WEIGHTS):
    return ReleasePlan(
        level="client", sampler=cohort, mechanism=mechanism, noise=Independent(0.0), weights=weights
    )


def moved(plan, updates=UPDATES, seed=1, **trainer) -> np.ndarray:
    strategy = DPFedAvg(plan=plan, seed=seed, delta=1e-5)
    grid = LocalGrid(Fixed(updates, **trainer))
    result = strategy.start(grid, array_record({"w": torch.zeros(2, dtype=torch.float64)}), 1)
    return tensors(result.arrays)["w"].numpy()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bounded_updates_are_weighed_and_divided_by_the_declared_mean_weight(size: int) -> None:
    bounded = np.array([[0.6, 0.8], [0.3, -0.4], [0.0, 1.0]])
    expected = np.average(bounded, axis=0, weights=WEIGHTS)
    # Whatever clients say that they have, and however they are blocked.
    for examples in ([1, 1, 1], [1000, 1, 7]):
        got = moved(plan_of(), block_size=size, examples=examples)
        assert got == pytest.approx(expected, abs=1e-8)


def test_without_a_bound_it_is_the_weighted_mean_of_those_that_reply() -> None:
    plan = plan_of(NoPrivacy())
    expected = np.average(UPDATES.numpy(), axis=0, weights=WEIGHTS)
    assert moved(plan, examples=[9, 1, 5]) == pytest.approx(expected, abs=1e-6)
    others = np.average(UPDATES.numpy()[1:], axis=0, weights=WEIGHTS[1:])
    assert moved(plan, failing=(0,)) == pytest.approx(others, abs=1e-6)


def test_only_mechanisms_that_bound_and_add_take_weights() -> None:
    taking = {"clipping", "normalization", "coordinate-clipping", "norm-bound", "none"}
    assert {
        name
        for name in registry.names("mechanism")
        if getattr(registry.find("mechanism", name, "")(), "takes_weights", False)
    } == taking


@pytest.mark.parametrize("weights", [(1.0, math.nan, 1.0), (1.0, math.inf, 1.0), (1.0, -1.0, 1.0)])
def test_a_weight_is_a_number_from_0_on(weights) -> None:
    with pytest.raises(FedsimError, match="numbers of at least 0, of which one is above 0"):
        plan_of(weights=weights)


def test_a_denominator_counts_nobody() -> None:
    # Two of three fail, or a Poisson cohort is small: what is divided by is declared all the same.
    assert plan_of().denominator == pytest.approx(3 * np.mean(WEIGHTS) / max(WEIGHTS))
    rate = plan_of(cohort=PoissonCohort(rate=0.5, population=3)).denominator
    assert rate == pytest.approx(0.5 * sum(WEIGHTS) / max(WEIGHTS))
    got = moved(plan_of(), failing=(1, 2))
    assert got == pytest.approx(np.array([0.6, 0.8]) * WEIGHTS[0] / sum(WEIGHTS), abs=1e-8)


def test_equal_weights_change_nothing() -> None:
    assert (moved(plan_of(weights=(7.0,) * 3)) == moved(plan_of(weights=()))).all()


@pytest.mark.parametrize(
    "mechanism", [Clipping(0.5), Normalization(0.5), CoordinateClipping(0.25)], ids=str
)
@pytest.mark.parametrize("client", [0, 1, 2])
def test_no_row_moves_the_sum_by_more_than_its_clients_share_of_the_bound(
    mechanism, client: int
) -> None:
    # The rows of the audit's check of bounds, as one client's update among others'.
    layout = Layout.of({"w": torch.zeros(2)})
    plan = plan_of(mechanism)
    allowed = mechanism.sensitivity({}, layout) * WEIGHTS[client] / max(WEIGHTS)
    absent = moved(plan, failing=(client,)) * plan.denominator
    for row in hostile_rows(mechanism, {}, layout)[::3]:
        updates = UPDATES.double()
        updates[client] = row
        difference = moved(plan, updates) * plan.denominator - absent
        assert np.linalg.norm(difference) <= allowed * (1 + 1e-6)


CONFIG = RunConfig().replace(
    **{
        "rounds": 2,
        "partition.clients": 4,
        "client.steps": 2,
        "evaluate.every": 0,
        "engine.device": "cpu",
        "mechanism.weights": "3,1,2,1",
    }
)
CLIENTS = {"mechanism.name": "clipping", "noise.multiplier": 1.0}
EXAMPLES = {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}


@pytest.mark.parametrize("level", [CLIENTS, EXAMPLES, CLIENTS | EXAMPLES], ids=["c", "e", "both"])
def test_weights_cost_nothing_at_either_level_and_are_public(level, tmp_path) -> None:
    weighted = fedsim.run(CONFIG.replace(**level), out=tmp_path / "run")
    equal = fedsim.run(CONFIG.replace(**level, **{"mechanism.weights": ""}))
    epsilons = [[s.epsilon for s in result.statements] for result in (weighted, equal)]
    assert epsilons[0] == epsilons[1]
    arrays = [tensors(result.arrays) for result in (weighted, equal)]
    assert any((arrays[0][name] != arrays[1][name]).any() for name in arrays[0])
    if level is not EXAMPLES:
        assert "Public: the declared weight of each client in the mean." in str(weighted.privacy)
        assert "weight of each client" not in str(equal.privacy)
    again = CONFIG.replace(**level, **{"client.block-size": 3})
    assert all(
        (tensors(fedsim.run(again).arrays)[name] == arrays[0][name]).all() for name in arrays[0]
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mechanism.weights": "1,2,3"}, "one number for each of the 4 clients"),
        ({"mechanism.weights": "0,0,0,0"}, "of which one is above 0"),
        ({"mechanism.weights": "9,1e-6,0,1"}, "are 0, or at least 1e-06 of the largest"),
        ({"mechanism.weights": "1,-2,3,1"}, "must be numbers from 0 to 1,000,000"),
        ({"mechanism.weights": "1,nan,3,1"}, "must be numbers from 0 to 1,000,000"),
        ({"mechanism.name": "none", "noise.multiplier": "", "mechanism.weighting": "uniform"},
         "empty with mechanism.weighting = 'uniform'"),
        ({"mechanism.name": "quantile-clipping"}, "empty with QuantileClipping"),
        ({"mechanism.name": "median", "noise.multiplier": ""}, "empty with Median"),
        ({"mechanism.per-layer": True}, "empty with PerLayer"),
        ({"mechanism.private-scalar": "loss"}, "empty with PrivateScalar"),
        ({"noise.placement": "client"}, "empty unless the server adds the noise"),
        ({"cohort.name": "poisson", "cohort.rate": 0.5, "noise.cohort-size": 3},
         "must be 0 with mechanism.weights"),
        ({"client.name": "scaffold"}, "needs its plain mean"),
        ({"cohort.name": "buffered", "cohort.concurrency": 2, "cohort.buffer": 2,
          "devices.seconds-per-step": 1}, "empty with cohort.name = 'buffered'"),
    ],
)  # fmt: skip
def test_where_weights_would_not_be_what_they_say_they_are_refused(changes, why, tmp_path) -> None:
    with pytest.raises(FedsimError, match=why):
        fedsim.run(CONFIG.replace(**{**CLIENTS, **changes}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_large_population_has_weights_in_a_time_that_grows_with_it_alone() -> None:
    population = 1_000_000
    plan = plan_of(
        cohort=PoissonCohort(rate=0.1, population=population), weights=(2.0, 4.0) * 500_000
    )
    assert plan.denominator == pytest.approx(0.1 * population * 0.75)
    assert plan.relative_weights[:2] == (0.5, 1.0)
