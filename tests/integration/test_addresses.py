"""Where every random number of a run comes from."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import fedsim
from fedsim import RunConfig
from fedsim.clients import SGD
from fedsim.cohorts import FullCohort
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import array_record, tensors
from fedsim.mechanisms import Clipping
from fedsim.randomness import Address, Purpose, Randomness
from fedsim.strategies import DPFedAvg
from fedsim.training import ClientData, ExamplePrivacy, Trainer

# Client-level noise in the clients' shares, over clients that are private at example level.
BOTH_LEVELS = RunConfig().replace(
    **{
        "rounds": 3,
        "partition.clients": 12,
        "partition.max-examples": 60,
        "cohort.name": "poisson",
        "cohort.rate": 0.7,
        "mechanism.name": "clipping",
        "noise.multiplier": 1.0,
        "noise.placement": "client",
        "client.batch-size": 20,
        "client.mechanism.name": "clipping",
        "client.noise.multiplier": 1.0,
        "evaluate.clients-every": 1,
        "evaluate.fraction": 0.5,
        "evaluate.unprotected": True,
    }
)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    addresses: list[Address] = []
    monkeypatch.setattr(Randomness, "address_observer", staticmethod(addresses.append))
    return addresses


@pytest.mark.parametrize("placement", ["server", "client"])
@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_no_address_is_used_twice_in_a_run_at_both_levels(
    watched: list[Address], placement: str, sampling: str
) -> None:
    settings = {"noise.placement": placement, "client.noise.sampling": sampling}
    fedsim.run(BOTH_LEVELS.replace(**settings))
    twice = {address: times for address, times in Counter(watched).items() if times > 1}
    assert not twice
    purposes = {(address.level, address.purpose) for address in watched}
    assert purposes == {
        ("run", Purpose.INIT),
        ("run", Purpose.PARTITION),
        ("client", Purpose.AMPLIFIED_SAMPLE),
        ("client", Purpose.EVALUATE),
        # The server's noise, also with shares: what absent clients would have added.
        ("client", Purpose.NOISE),
        *([("client", Purpose.SHARE)] if placement == "client" else []),
        ("example", Purpose.AMPLIFIED_SAMPLE if sampling == "poisson" else Purpose.SAMPLE),
        ("example", Purpose.NOISE),
    }
    assert {address.round for address in watched if address.purpose == Purpose.NOISE} == {1, 2, 3}


def test_a_share_does_not_cancel_the_noise_of_the_clients_own_steps() -> None:
    d, noise_multiplier = 2000, 3.0
    # The client's only step adds noise of std 1 to its update, and its share one of std 1.
    model = nn.Linear(d // 2, 2, bias=False).double()
    trainer = Trainer(
        model,
        SGD(lr=1e3 / noise_multiplier),
        ClientData(torch.zeros(1, d // 2, dtype=torch.float64), torch.zeros(1), [np.arange(1)]),
        batch_size=1,
        steps=1,
        randomness=Randomness(1),
        privacy=ExamplePrivacy(Clipping(1e-3), noise_multiplier),
        loss=lambda outputs, targets: outputs.sum(1) * 0,
    )
    strategy = DPFedAvg(
        mechanism=Clipping(1e6),
        cohort=FullCohort(1),
        noise_multiplier=1e-6,
        placement="client",
        hardened_noise=False,
        seed=1,
    )
    before = trainer.initial()
    result = strategy.start(LocalGrid(trainer), array_record(dict(model.named_parameters())), 1)
    after = torch.cat([value.reshape(-1) for value in tensors(result.arrays).values()])
    # A chi-square with 2000 degrees of freedom: five standard deviations are 8 %.
    assert (after - before).std().item() == pytest.approx(2**0.5, rel=0.08)


def released(config: RunConfig) -> np.ndarray:
    return np.concatenate([a.numpy().ravel() for a in fedsim.run(config).arrays.values()])


# Clients that do not move: what is released is noise.
STILL = RunConfig().replace(
    **{
        "rounds": 1,
        "partition.clients": 4,
        "partition.max-examples": 20,
        "mechanism.name": "clipping",
        "noise.multiplier": 1.0,
        "client.lr": 1e-30,
        "evaluate.every": 0,
    }
)


def test_two_runs_of_one_seed_that_release_different_things_share_no_noise() -> None:
    start = released(STILL.replace(**{"mechanism.clip-norm": 1e-20}))
    once = released(STILL)
    # 650 parameters; correlations of independent noise have a standard deviation of .04.
    for change in ({"client.lr": 2e-30}, {"mechanism.clip-norm": 0.5}, {"noise.multiplier": 2.0}):
        other = released(STILL.replace(**change))
        assert abs(np.corrcoef(once - start, other - start)[0, 1]) < 0.2
    # What cannot affect a release leaves every byte as it is; the seed still starts the model.
    same = STILL.replace(name="other", **{"client.block-size": 1})
    assert (released(same) == once).all()


@pytest.mark.parametrize("placement", ["server", "client"])
def test_consecutive_releases_of_a_run_differ_in_their_noise(placement: str) -> None:
    settings = {"noise.placement": placement}
    ends = [released(STILL.replace(rounds=t, **settings)) for t in range(4)[1:]]
    start = released(STILL.replace(**{"mechanism.clip-norm": 1e-20}))
    noise = np.diff([start, *ends], axis=0)
    # 650 parameters; correlations of independent noise have a standard deviation of .04.
    assert np.abs(np.corrcoef(noise)[np.triu_indices(3, 1)]).max() < 0.2
    assert noise.std(axis=1) == pytest.approx(np.full(3, noise.std()), rel=0.2)


def test_consecutive_steps_and_rounds_at_example_level_differ_in_their_noise() -> None:
    d = 600
    data = ClientData(torch.zeros(3, d // 2, dtype=torch.float64), torch.zeros(3), [np.arange(3)])

    def noise(steps: int, round: int) -> np.ndarray:
        trainer = Trainer(
            nn.Linear(d // 2, 2, bias=False).double(),
            SGD(lr=1.0),
            data,
            batch_size=0,
            steps=steps,
            randomness=Randomness(1, "ab"),
            privacy=ExamplePrivacy(Clipping(1.0), 1.0),
            loss=lambda outputs, targets: outputs.sum(1) * 0,
        )
        end = trainer.fit(trainer.initial(), np.arange(1), round).theta[0]
        return (end - trainer.initial()).numpy()

    first = noise(1, 1)
    draws = [first, noise(2, 1) - first, noise(1, 2)]
    assert np.abs(np.corrcoef(draws)[np.triu_indices(3, 1)]).max() < 0.2
