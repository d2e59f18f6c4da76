"""Without a config, a strategy's noise is keyed by its own settings beside the seed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flwr.serverapp.strategy import FedAdam, FedYogi

from fedsim.clients import SGD
from fedsim.cohorts import FullCohort, InclusionSampler, PoissonCohort
from fedsim.errors import FedsimError
from fedsim.federation.aggregation.share_sums import ClientShares
from fedsim.mechanisms import Clipping, NoPrivacy, Normalization, PerLayer
from fedsim.privacy import Independent, ReleasePlan
from fedsim.privacy.digest import digest_of
from fedsim.privacy.placement import CLIENTS
from fedsim.randomness import Randomness
from fedsim.strategies import (
    Availability,
    ClientMetrics,
    ClientTraining,
    DPFedAvg,
    SecureAggregation,
    adam,
    sgd,
)


class Nights(InclusionSampler):
    """One of the user's own, told apart by an array that it keeps."""

    def __init__(self, rates: list[float]) -> None:
        super().__init__(50, 0.5)
        self.rates = np.array(rates)

    def probabilities(self, round: int) -> npt.NDArray[np.float64]:
        return np.full(50, self.rates[round % len(self.rates)])


def every_few(round: int, clients: npt.NDArray[np.int64], every: int) -> npt.NDArray[np.bool_]:
    return clients % every == 0


def replying(every: object) -> Availability:
    return Availability(replying=partial(every_few, every=every))


def release_of(**changed: object) -> str | None:
    settings = {
        "mechanism": Clipping(1.0),
        "cohort": PoissonCohort(0.1, 50),
        "noise_multiplier": 1.0,
        "seed": 1,
    }
    return DPFedAvg(**{**settings, **changed}).randomness.release


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 2},
        {"mechanism": Clipping(2.0)},
        {"mechanism": Normalization(1.0)},
        {"mechanism": PerLayer(Clipping(1.0))},
        {"cohort": PoissonCohort(0.2, 50)},
        {"cohort": FullCohort(50)},
        {"noise_multiplier": 2.0},
        {"placement": "client"},
        {"hardened_noise": False},
        {"server_optimizer": adam(0.1)},
        {"server_optimizer": sgd(0.5)},
        {"server_optimizer": FedAdam(eta=0.1)},
        {"seed": Randomness(1, "ab")},
        {"cohort": Nights([0.1, 0.2])},
        {"clients": ClientTraining(algorithm=SGD(lr=0.3))},
        {"availability": replying(2)},
    ],
    ids=lambda changed: str(changed).split(" at 0x")[0].split(" object at ")[0],
)
def test_strategies_of_one_seed_that_release_different_things_have_different_keys(changed) -> None:
    assert release_of(**changed) != release_of()


@pytest.mark.parametrize(
    "one",
    [
        lambda n: {"cohort": Nights([0.1, 0.1 * n])},
        lambda n: {"cohort": Nights([0.1] * 20_000 + [0.1 * n])},
        lambda n: {"availability": replying(torch.full((20_000,), float(n)))},
        lambda n: {"availability": replying(n)},
        lambda n: {"availability": replying({n, 7, "a"})},
    ],
)
def test_objects_that_differ_in_what_they_hold_only_have_different_keys_too(one) -> None:
    assert release_of(**one(1)) != release_of(**one(2))
    assert release_of(**one(2)) == release_of(**one(2))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"noise_multiplier": 1},
        {"seed": Randomness(1)},
        {"delta": 1e-6},
        {"max_epsilon": 50.0},
        {"availability": Availability(max_failed_rounds=9)},
        {"metrics": ClientMetrics(unprotected=True)},
    ],
    ids=str,
)
def test_what_cannot_change_a_release_does_not_change_the_key(changed) -> None:
    assert release_of(**changed) == release_of()
    assert release_of(server_optimizer=FedYogi(eta=0.1)) == release_of(
        server_optimizer=FedYogi(eta=0.1)
    )


def test_who_adds_the_noise_is_in_the_digest_under_one_name() -> None:
    full = {"cohort": FullCohort(10)}
    digests = [
        str(release_of(**full, placement=placement))[:12]
        for placement in ("server", "client", SecureAggregation(4, 1))
    ]
    # Renaming anything in them would re-key seeded runs.
    assert digests == ["1a5038988369", "e32fb7362db6", "e70bdc3084d2"]
    plan = DPFedAvg(mechanism=Clipping(1.0), noise_multiplier=1.0, seed=1, **full).plan
    assert digest_of({"plan": plan}) == digest_of({"plan": replace(plan, placement=CLIENTS)})


def test_a_plan_has_a_placement_and_no_other_is_given_beside_it() -> None:
    plan = ReleasePlan(
        level="client",
        sampler=FullCohort(10),
        mechanism=Clipping(1.0),
        noise=Independent(1.0),
        placement=CLIENTS,
    )
    assert DPFedAvg(plan=plan, seed=1).aggregation is ClientShares
    with pytest.raises(FedsimError, match="placement is given together with plan="):
        DPFedAvg(plan=plan, placement="server")
    with pytest.raises(FedsimError, match="must be 'server' with NoPrivacy"):
        replace(plan, mechanism=NoPrivacy("uniform"), noise=Independent(0.0))
    with pytest.raises(FedsimError, match=r"secagg\.threshold is 11; it must be at most 10"):
        replace(plan, placement=SecureAggregation(11))
