"""The loop that plan, ledger, releaser and trainer document: by hand, the strategy's own bytes."""

from __future__ import annotations

import torch
from clients_helpers import make_data, make_mlp

from fedsim.clients import SGD
from fedsim.cohorts import PoissonCohort
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import array_record, tensors
from fedsim.mechanisms import Clipping, NoiseSource, Releaser
from fedsim.privacy import Independent, Ledger, ReleasePlan
from fedsim.randomness import Draws, Purpose, Randomness
from fedsim.rows import DenseRows
from fedsim.strategies import DPFedAvg
from fedsim.training import Trainer


def test_rounds_by_hand_are_the_strategys_and_cost_the_same() -> None:
    randomness = Randomness(7, "ab" * 32)
    plan = ReleasePlan(
        level="client",
        sampler=PoissonCohort(rate=0.6, population=8),
        mechanism=Clipping(1.0),
        noise=Independent(0.7),
        rounds=3,
    )

    def trainer_of_run() -> Trainer:
        return Trainer(make_mlp(), SGD(lr=0.1), make_data([6] * 8), randomness=randomness)

    trainer, ledger = trainer_of_run(), Ledger(delta=1e-5)
    releaser, vector = Releaser(plan, trainer.layout), trainer.initial()
    initial, state = trainer.layout.unflatten(vector), plan.mechanism.init(trainer.layout)
    draws = Draws(randomness, level="client", amplified=plan.amplified)
    for number in range(1, plan.rounds + 1):
        total = releaser.start(state)
        for block in trainer.train(vector, plan.sampler.draw(number, draws), number):
            total.add(DenseRows(block.rows))
        with ledger.release(plan, number):
            generator = randomness.generator(Purpose.NOISE, level="client", round=number)
            release = releaser.release(total, NoiseSource(generator, plan.noise.hardened))
        vector, state = vector + release.mean.to(vector), release.state

    strategy = DPFedAvg(plan=plan, seed=randomness)
    arrays = array_record({name: value.clone() for name, value in initial.items()})
    result = strategy.start(LocalGrid(trainer_of_run()), arrays, num_rounds=3)
    assert torch.equal(vector, trainer.layout.flatten(tensors(result.arrays)))
    assert ledger.epsilon() == strategy.ledger.epsilon(1e-5) == plan.epsilon(1e-5)
