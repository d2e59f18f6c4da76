"""Workers that are killed at any instant of a round, twice in each: the bytes of nobody's death."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from slow_cases import slow_but

from fedsim.clients import SGD
from fedsim.cohorts import FixedCohort
from fedsim.engines import LocalGrid, array_record
from fedsim.federation.engines.forked import CAN_FORK
from fedsim.mechanisms import AdaClip, Clipping, NoPrivacy, PerLayer, PrivateScalar
from fedsim.randomness import Randomness
from fedsim.strategies import ClientMetrics, DPFedAvg
from fedsim.training import ClientData, ExamplePrivacy, Trainer

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="processes cannot be forked here")

CLIENTS, COHORT, ROUNDS = 24, 18, 6
# A chunk that loses its worker twice is tried client by client; a third loss would be a client's.
DEATHS = 2


class Killed(LocalGrid):
    """A grid whose workers are killed at random instants after every third call's start.

    One that is killed late may be noticed in the call that follows, as a loss of its clients: with
    deaths of that call's own a client would lose its worker three times.
    """

    def __init__(self, trainer, *, seed, within, **settings):
        super().__init__(trainer, **settings)
        self._random = np.random.default_rng(seed)
        self._within = within
        self._timers = []
        self._calls = 0
        self.deaths = 0

    def send_and_receive(self, messages, *, timeout=None):
        for timer in self._timers:
            timer.cancel()
        replies = super().send_and_receive(messages, timeout=timeout)
        # Training and evaluation take turns: both are met.
        instants = self._random.uniform(0, self._within, 0 if self._calls % 3 else DEATHS)
        self._calls += 1
        self._timers = [
            threading.Timer(seconds, self._kill, [int(self._random.integers(2))])
            for seconds in instants
        ]
        for timer in self._timers:
            timer.start()
        return replies

    def _kill(self, number):
        pool = self._pool
        with suppress(ProcessLookupError, IndexError, AttributeError):
            os.kill(pool.workers[number].pid, signal.SIGKILL)
            self.deaths += 1


def trainer(**settings):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(CLIENTS * 12, 6, generator=generator)
    y = torch.randint(3, (len(x),), generator=generator)
    parts = np.array_split(np.arange(len(x)), CLIENTS)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view(parameter.shape))
    settings = {"algorithm": SGD(lr=0.2), "block_size": 2, **settings}
    return Trainer(
        model,
        data=ClientData(x, y, parts),
        batch_size=4,
        steps=30,
        randomness=Randomness(3, "a release"),
        **settings,
    )


def run(grid, trainer, mechanism, noise):
    strategy = DPFedAvg(
        mechanism=mechanism,
        cohort=FixedCohort(COHORT, CLIENTS),
        noise_multiplier=noise,
        seed=1,
        metrics=ClientMetrics(unprotected=True),
    )
    initial = array_record(trainer.layout.unflatten(trainer.initial()))
    usable = []
    result = strategy.start(
        grid, initial, ROUNDS, on_round=lambda *_: usable.append(strategy.report.usable)
    )
    arrays = result.arrays
    digest = hashlib.sha256(b"".join(arrays[k].numpy().tobytes() for k in arrays)).hexdigest()
    metrics = {number: dict(r) for number, r in result.train_metrics_clientapp.items()}
    states = {name: values.numpy().tobytes() for name, values in trainer.state().items()}
    return digest, usable, metrics, states


CASES = {
    "clipping": ({}, Clipping(0.5), 1.0),
    "layer by layer": ({}, PerLayer(Clipping(0.5)), 1.0),
    "a scalar beside": ({}, PrivateScalar(AdaClip(), name="loss", high=3.0), 1.0),
    "weighed by examples": ({}, NoPrivacy("num-examples"), 0.0),
    "a momentum is kept": (
        {"algorithm": SGD(lr=0.2, momentum=0.9), "state": "client"},
        Clipping(0.5),
        1.0,
    ),
}


@pytest.mark.parametrize("name", slow_but(("a momentum is kept",), CASES))
def test_workers_killed_at_random_instants_change_no_byte(name):
    settings, mechanism, noise = CASES[name]
    alone = trainer(**settings)
    began = time.perf_counter()
    expected = run(LocalGrid(alone), alone, mechanism, noise)
    within = (time.perf_counter() - began) / ROUNDS
    mine = trainer(**settings)
    with Killed(mine, seed=5, within=within, workers=2) as grid:
        assert run(grid, mine, mechanism, noise) == expected
        assert grid.deaths > 0


@pytest.mark.slow
def test_clients_whose_workers_are_killed_are_charged_once():
    privacy = ExamplePrivacy(Clipping(1.0), 1.0)
    alone, mine = trainer(privacy=privacy), trainer(privacy=privacy)
    expected = run(LocalGrid(alone), alone, NoPrivacy("uniform"), 0.0)
    with Killed(mine, seed=6, within=0.2, workers=2) as grid:
        assert run(grid, mine, NoPrivacy("uniform"), 0.0) == expected
        assert grid.deaths > 0
    spent = [
        {client: history.counts for client, history in trainer.ledger.histories.items()}
        for trainer in (alone, mine)
    ]
    assert spent[0].keys() == set(range(CLIENTS))
    assert spent[0] == spent[1]
