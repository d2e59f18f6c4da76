"""Noise that is correlated over the steps of a client's round: what is drawn, and what it costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.audit.local_training import ExampleEvidence, TrainerTarget
from fedsim.audit.plan_checks import passes
from fedsim.clients import SGD
from fedsim.config import RunConfig
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping, QuantileClipping
from fedsim.privacy import Accountant, Event
from fedsim.privacy.laws import shuffle
from fedsim.privacy.laws.base import Participation
from fedsim.privacy.local_work import LocalWork
from fedsim.privacy.noise import Independent
from fedsim.privacy.noise.banded import Banded
from fedsim.privacy.noise.bisr import BISR
from fedsim.privacy.noise.blt import BLT
from fedsim.privacy.noise.lambda_cgd import LambdaCGD
from fedsim.privacy.noise.tree import Tree
from fedsim.randomness import Purpose, Randomness
from fedsim.runs.resolve import calibrated
from fedsim.training import ClientData, ExamplePrivacy, Trainer

FAMILIES = [LambdaCGD(2.0, hardened=False), BISR(2.0, hardened=False), Tree(2.0, hardened=False)]
SIZE, BATCH, EPOCHS = 12, 3, 2
WORK = LocalWork(BATCH, EPOCHS)


def privacy_of(noise, **settings) -> ExamplePrivacy:
    privacy = ExamplePrivacy(Clipping(1.0), noise=noise, sampling="shuffle", **settings)
    return privacy.fitted(WORK, [SIZE])


def trainer_of(noise, seed=1, clients=3, width=40, ones=False, **settings) -> Trainer:
    """Clients whose gradients are zero, unless their inputs are ones: what moves is noise."""
    examples = SIZE * clients
    x = torch.ones(examples, width) if ones else torch.zeros(examples, width)
    data = ClientData(
        x.double(), torch.arange(examples) % 2, np.split(np.arange(examples), clients)
    )
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(width, 50, bias=False)).double()
    return Trainer(
        model, SGD(1.0), data, batch_size=BATCH, epochs=EPOCHS, metrics={},
        randomness=Randomness(seed, "release"), **({"privacy": privacy_of(noise)} | settings),
    )  # fmt: skip


def moved(trainer: Trainer, number: int = 1) -> torch.Tensor:
    blocks = trainer.train(trainer.initial(), np.arange(trainer.population), number)
    return torch.cat([block.rows.clone() for block in blocks])


@pytest.mark.parametrize("seed", [1, None], ids=["seeded", "system"])
@pytest.mark.parametrize("noise", [*FAMILIES, Independent(2.0, hardened=False)], ids=repr)
def test_a_round_ends_with_the_noise_of_the_sum_of_its_steps(noise, seed):
    trainer = trainer_of(noise, seed)
    steps = SIZE // BATCH * EPOCHS
    made = trainer.privacy.plan(WORK, SIZE).noise
    wanted = 2.0 * np.sqrt(made.variances(steps)[-1]) / BATCH
    rows = moved(trainer)
    # 6000 values: five standard errors of a standard deviation are 4.6 %.
    assert float(rows.std()) == pytest.approx(wanted, rel=5 / np.sqrt(2 * rows.numel()))
    correlation = np.corrcoef(rows.numpy())[np.triu_indices(len(rows), 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(rows.shape[1])


def test_each_step_takes_away_a_part_of_the_noise_before_it():
    """Step by step, from the addresses of the draws: ``N_t = Z_t - lambda Z_(t-1)``."""
    trainer = trainer_of(LambdaCGD(2.0, hardened=False, coefficients="0.7"), clients=2)
    (first, second), steps = moved(trainer, 5), SIZE // BATCH * EPOCHS
    for client, row in ((0, first), (1, second)):
        draws = [
            trainer.randomness.repeated()
            .generator(Purpose.NOISE, level="example", round=5, client=client, part=64 * t)
            .normal(size=trainer.layout.d)
            for t in range(steps)
        ]
        total = sum(draws) - 0.7 * sum(draws[:-1])
        np.testing.assert_allclose(row.numpy(), -2.0 * total / BATCH, rtol=0, atol=1e-6)


def test_rounds_share_no_draws():
    trainer = trainer_of(LambdaCGD(2.0, hardened=False), clients=1)
    rows = torch.cat([moved(trainer, number) for number in (1, 2, 3)])
    correlation = np.corrcoef(rows.numpy())[np.triu_indices(3, 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(rows.shape[1])


@pytest.mark.parametrize("noise", FAMILIES, ids=repr)
@pytest.mark.parametrize(
    ("size", "work"),
    [
        (12, LocalWork(3, 2)),
        (10, LocalWork(4, 3)),
        (12, LocalWork(3, None, 7)),
        (5, LocalWork(0, 4)),
    ],
)
def test_a_round_costs_one_gaussian_of_the_worst_example(noise, size, work):
    """By brute force over the places of an example in a pass, and the signs of its gradients."""
    privacy = ExamplePrivacy(Clipping(1.0), noise=noise, sampling="shuffle").fitted(work, [size])
    plan = privacy.plan(work, size, rounds=3)
    steps, apart = work.steps_of(size), -(-size // work.batch_of(size))
    matrix = np.abs(plan.noise.matrix(steps))
    if isinstance(noise, Tree):
        # C has a row for each node: a column's entries are 1 in the nodes of its step.
        worst = np.sqrt(plan.noise.bands.bit_length() * -(-steps // apart))
    else:
        worst = max(np.linalg.norm(matrix[:, place::apart].sum(1)) for place in range(apart))
    event = plan.event()
    assert (event.count, event.law.rounds) == (1, 1)
    assert event.law.gaussian(2.0) == pytest.approx(worst / 2.0, rel=1e-6)
    alone = Accountant([Event(noise_multiplier=2.0 / worst, count=3)]).epsilon(1e-5)
    assert plan.epsilon(1e-5) == pytest.approx(alone, rel=1e-6)
    assert [plan.charge(t).count for t in (1, 2, 3)] == [1, 1, 1]


def test_all_passes_of_a_round_go_in_one_order_and_rounds_in_others():
    privacy = privacy_of(FAMILIES[0])
    seen = []
    for number in (1, 2):
        batches = privacy.batches(WORK, [np.arange(SIZE)], np.array([0]), [Randomness(3)], number)
        seen.append(batches.index[0, :, 0])
        half = len(seen[-1]) // EPOCHS
        assert np.array_equal(seen[-1][:half], seen[-1][half:])
        assert sorted(seen[-1][:half, :BATCH].flatten().tolist()) == list(range(SIZE))
    assert not np.array_equal(*seen)


@pytest.mark.parametrize("noise", FAMILIES, ids=repr)
def test_updates_do_not_depend_on_blocks(noise):
    whole = moved(trainer_of(noise, clients=4, ones=True))
    for block_size in (1, 3):
        assert torch.equal(
            moved(trainer_of(noise, clients=4, ones=True, block_size=block_size)), whole
        )


def test_clients_of_other_sizes_have_their_own_sensitivities():
    privacy = ExamplePrivacy(Clipping(1.0), noise=Tree(1.0), sampling="shuffle")
    sizes = [6, 12, 31]
    fitted = privacy.fitted(WORK, sizes)
    plans = [fitted.plan(WORK, size) for size in sizes]
    # The smallest client's pass has two steps: no tree may be longer.
    assert {plan.noise.coefficients for plan in plans} == {"2"}
    assert [plan.noise.participation for plan in plans] == [
        Participation(WORK.steps_of(size), -(-size // BATCH)) for size in sizes
    ]


def test_the_audit_sees_a_round_whose_passes_go_in_other_orders(monkeypatch):
    target = TrainerTarget.smaller(privacy_of(FAMILIES[0]), WORK, SIZE, SIZE).with_rounds(2)
    draws = [
        [np.arange(SIZE)[first : first + BATCH] for first in range(0, SIZE, BATCH)] * EPOCHS * 2
    ]
    length = SIZE // BATCH
    assert passes(target, length, draws).p_value > 0.5
    other = [list(one) for one in draws]
    other[0][4], other[0][5] = other[0][5], other[0][4]
    assert passes(target, length, other).p_value < 1e-6
    assert isinstance(ExampleEvidence.of(target, 2, 2, 1), ExampleEvidence)
    assert shuffle.ShuffledPasses(3, 12, one_order=True).participation(8).separation == 4
    assert shuffle.ShuffledPasses(3, 12).participation(8).separation == 1


@pytest.mark.parametrize("noise", [Banded(1.0), BLT(1.0)], ids=repr)
def test_noise_that_keeps_vectors_of_many_steps_is_refused(noise):
    privacy = ExamplePrivacy(Clipping(1.0), noise=noise, sampling="shuffle")
    others = "'independent', 'bisr', 'lambda-cgd' or 'tree'"
    with pytest.raises(FedsimError, match=rf"client\.noise\.name is '.*', which stores .*{others}"):
        privacy.plan(WORK, SIZE)


def test_noise_whose_coefficients_follow_from_sizes_is_refused_where_clients_are_protected():
    settings = (
        "mechanism.name=clipping", "noise.multiplier=1.0", "client.mechanism.name=clipping",
        "client.noise.multiplier=1.0", "client.noise.name=tree", "client.noise.sampling=shuffle",
    )  # fmt: skip
    calibrated(RunConfig.of(settings[2:]))
    with pytest.raises(FedsimError, match="must be 'independent' while mechanism"):
        calibrated(RunConfig.of(settings))


def test_poisson_batches_and_bounds_that_adapt_are_refused():
    with pytest.raises(FedsimError, match=r"client\.noise\.sampling is 'poisson'.*'shuffle'"):
        ExamplePrivacy(Clipping(1.0), noise=LambdaCGD(1.0))
    adapting = ExamplePrivacy(QuantileClipping(1.0), noise=FAMILIES[0], sampling="shuffle")
    with pytest.raises(FedsimError, match=r"over steps \(client.noise.name\), .*Quantile"):
        trainer_of(FAMILIES[0], privacy=adapting)


def test_a_bound_that_leaves_no_noise_for_steps_is_refused_before_the_first_round():
    few_rows = ExamplePrivacy(QuantileClipping(bit_noise=0.05), noise_multiplier=1.0)
    with pytest.raises(FedsimError, match=r"bit-noise 0.05 and 3 expected rows .*batch-size"):
        trainer_of(FAMILIES[0], privacy=few_rows)


def test_no_clients_size_decides_whether_a_bound_and_noise_are_refused():
    few_rows = ExamplePrivacy(QuantileClipping(bit_noise=0.2), noise_multiplier=1.0)
    data = ClientData(torch.zeros(3, 2), torch.zeros(3).long(), np.split(np.arange(3), [1]))
    settings = {"randomness": Randomness(1), "privacy": few_rows}
    for batch_size in (0, BATCH):  # BATCH rows leave noise for the sum; 1 or 2 do not
        trainer = Trainer(nn.Linear(2, 2), SGD(1.0), data, batch_size=batch_size, **settings)
        with pytest.raises(FedsimError, match=r"and [12] expected rows"):
            next(trainer.train(trainer.initial(), np.arange(2), 1))


def test_less_noise_stands_in_an_update_at_equal_cost():
    """Of a pass of 20 steps: the root mean square of the noise in sums of its steps."""
    work = LocalWork(1, 1)
    errors = {}
    for noise in (*FAMILIES, Independent(1.0)):
        privacy = ExamplePrivacy(Clipping(1.0), noise=noise, sampling="shuffle").fitted(work, [20])
        plan = privacy.plan(work, 20, rounds=1).calibrated(2.0, 1e-5)
        variances = plan.noise.variances(20)
        errors[type(plan.noise).__name__] = plan.noise.multiplier * np.sqrt(variances.mean())
    order = ["BISR", "LambdaCGD", "Tree", "Independent"]
    assert [*sorted(errors, key=errors.get)] == order
    for better, worse in itertools.pairwise(order):
        assert errors[better] < errors[worse]
    assert errors["BISR"] < 0.65 * errors["Independent"]
