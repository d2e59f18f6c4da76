"""Local optimisers against PyTorch's, and their schedules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import joined, make_data, make_mlp
from torch import nn

from fedsim.clients import (
    SGD,
    AdadpLR,
    AdadpNoise,
    Adam,
    LocalAlgorithm,
    Proximal,
    RMSProp,
    Schedule,
    Step,
)
from fedsim.clients.base import DenseGradient, RunFacts
from fedsim.errors import FedsimError
from fedsim.randomness import Randomness
from fedsim.training import Trainer

ALGORITHMS = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    Adam(lr=0.01, weight_decay=0.01),
    RMSProp(lr=0.01),
    AdadpNoise(lr=0.01),
    AdadpLR(lr=0.3),
    AdadpLR(lr=0.3, keep="half", discard=False, exponent=0.5),
    Proximal(SGD(lr=0.1), mu=0.5),
    Proximal(AdadpLR(lr=0.1), mu=0.5),
]
IDS = np.arange(6)


def quadratic(algorithm, steps, theta, hessian):
    """Run an algorithm on 1/2 theta' H theta, one client."""
    numbers = {k: torch.tensor([v], dtype=torch.float64) for k, v in algorithm.numbers().items()}
    state = algorithm.init(theta.clone().unsqueeze(0), numbers)
    for index in range(steps):
        gradient = DenseGradient(algorithm.point(state) @ hessian)
        algorithm.step(state, gradient, Step(1, index))
    return algorithm.finish(state)[0], state


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
        (Adam, torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
        (RMSProp, torch.optim.RMSprop, {"lr": 0.05, "weight_decay": 0.1}),
    ],
)
def test_an_optimiser_steps_as_pytorchs_does(ours, theirs, settings):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    hessian, start = root @ root.T, torch.randn(5, generator=generator, dtype=torch.float64)
    got, _ = quadratic(ours(**settings), 20, start, hessian)
    parameter = nn.Parameter(start.clone())
    optimizer = theirs([parameter], **settings)
    for _ in range(20):
        optimizer.zero_grad()
        parameter.grad = hessian @ parameter.detach()
        optimizer.step()
    torch.testing.assert_close(got, parameter.detach(), rtol=0, atol=1e-12)


def test_xus_optimiser_has_its_constant_inside_the_root():
    algorithm = AdadpNoise(lr=1.0, decay=0.75, eps=0.21)
    theta, _ = quadratic(
        algorithm, 1, torch.tensor([2.0], dtype=torch.float64), torch.eye(1).double()
    )
    # E = 0.25 * 4; the step is 2 / sqrt(1 + 0.21).
    assert theta.item() == pytest.approx(2 - 2 / math.sqrt(1.21))


def test_the_proximal_term_pulls_towards_the_global_model():
    start = torch.tensor([1.0, -2.0], dtype=torch.float64)
    hessian = torch.eye(2, dtype=torch.float64)
    got, _ = quadratic(Proximal(SGD(lr=0.1), mu=3.0), 2, start, hessian)
    first = start - 0.1 * start
    expected = first - 0.1 * (first + 3.0 * (first - start))
    torch.testing.assert_close(got, expected)


def test_a_proximal_term_of_zero_changes_nothing():
    data = make_data([8, 9, 10], dtype=torch.float64)
    rows = [
        Trainer(make_mlp(dtype=torch.float64), a, data, batch_size=4, randomness=Randomness(1))
        .fit(torch.zeros(53, dtype=torch.float64), np.arange(3), 1)
        .theta
        for a in (Adam(lr=0.1), Proximal(Adam(lr=0.1), mu=0.0))
    ]
    assert torch.equal(*rows)


def test_a_proximal_algorithm_has_every_hook_of_the_one_inside():
    facts = RunFacts(private_examples=True)
    inner = AdadpLR(lr=0.1)
    assert Proximal(inner, mu=0.5).for_run(facts) == Proximal(inner.for_run(facts), mu=0.5)
    hooks = {name for name in vars(LocalAlgorithm) if not name.startswith("_")}
    # `example_state` is made of other hooks.
    assert hooks - set(vars(Proximal)) == {"example_state"}


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_every_algorithm_has_the_same_bytes_in_every_block_size(algorithm):
    data = make_data([9, 4, 13, 1, 30, 7], features=37)
    reference = None
    for block_size in (1, 2, 4, 6):
        trainer = Trainer(
            make_mlp(37, 19), algorithm, data, batch_size=4, epochs=3,
            randomness=Randomness(1), block_size=block_size,
        )  # fmt: skip
        blocks = list(trainer.train(trainer.initial(), IDS, 1))
        rows = torch.cat([b.rows for b in blocks])
        if reference is None:
            reference = rows
        assert torch.equal(rows, reference)
        assert torch.isfinite(rows).all()


@pytest.mark.spanning
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("path", ["layered", "func"])
def test_every_algorithm_agrees_with_the_plain_path(algorithm, path):
    data = make_data([9, 4, 13, 1, 30, 7], dtype=torch.float64)
    finals = []
    for name in ("plain", path):
        trainer = Trainer(
            make_mlp(dtype=torch.float64), algorithm, data, batch_size=4, epochs=1,
            randomness=Randomness(1), path=name,
        )  # fmt: skip
        vector = trainer.initial()
        for t in range(1, 11):
            vector = vector + joined(trainer.train(vector, IDS, t))[0].mean(0)
        finals.append(vector)
    torch.testing.assert_close(*finals, rtol=0, atol=1e-10)


def test_a_schedule_multiplies_the_rate_by_round_and_by_step():
    inverse = Schedule("inverse", decay=0.5)
    assert [inverse(Step(t, 7)) for t in (1, 2, 3)] == [1, 1 / 1.5, 1 / 2]
    stairs = Schedule("staircase", decay=0.5, length=2, over="step")
    assert [stairs(Step(9, i)) for i in range(5)] == [1, 1, 0.5, 0.5, 0.25]
    assert Schedule("exponential", decay=0.9)(Step(3, 0)) == pytest.approx(0.81)
    cosine = Schedule("cosine", length=4)
    assert [cosine(Step(t, 0)) for t in (1, 3, 5, 9)] == pytest.approx([1, 0.5, 0, 0])
    theta, _ = quadratic(
        SGD(lr=1.0, schedule=Schedule("exponential", decay=0.5, over="step")),
        2,
        torch.ones(1, dtype=torch.float64),
        0.1 * torch.eye(1).double(),
    )
    assert theta.item() == pytest.approx(0.9 * 0.95)


@pytest.mark.parametrize(("shape", "power"), [("exponential", 1), ("staircase", 5)])
def test_a_schedule_that_outgrows_any_rate_is_refused(shape, power):
    schedule = Schedule(shape, decay=2.0, length=power)
    assert schedule(Step(1 + 99 * power, 0)) == 2.0**99
    for turn in (100 * power, 10**6 * power):
        with pytest.raises(FedsimError, match=f"above 1e.30 at round {turn + 1}; its decay"):
            schedule(Step(turn + 1, 0))


def test_a_schedule_is_read_as_a_config_writes_it():
    assert Schedule.parse("") == Schedule()
    assert Schedule.parse("inverse(decay=0.1, over=step)") == Schedule("inverse", 0.1, 1, "step")
    assert Schedule.parse("cosine(length=50)") == Schedule("cosine", length=50)
    for wrong in ("linear", "inverse(rate=2)", "cosine(length=0)", "inverse(over=epoch)", "cosine",
                  "cosine(length=5", "inverse(decay=nan)", "inverse(decay=inf)"):  # fmt: skip
        with pytest.raises(FedsimError, match="schedule"):
            Schedule.parse(wrong)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: SGD(lr=-1.0), "client.lr"),
        (lambda: SGD(lr=1.0, momentum=1.0), "client.momentum"),
        (lambda: Adam(beta2=1.0), "client.beta2"),
        (lambda: RMSProp(eps=0.0), "client.eps"),
        (lambda: Proximal(SGD(lr=1.0), mu=-1.0), "client.mu"),
        (lambda: AdadpLR(lr=0.0), "client.lr"),
        (lambda: AdadpLR(lr=1.0, keep="both"), "client.keep"),
        (lambda: AdadpLR(lr=1.0, alpha_min=1.2), "client.alpha-min"),
        (lambda: AdadpLR(eta_max=0.0), "client.eta-max"),
        (lambda: AdadpLR(lr=20.0), "client.lr is 20; .* client.eta-max, 10"),
        (lambda: AdadpLR(lr=2.0, eta_max=1.0), "client.lr is 2; .* client.eta-max, 1"),
        (lambda: AdadpLR(lr=1e-9), "client.lr is 1e-09; .* client.eta-min, 1e-08"),
    ],
)
def test_settings_out_of_range_are_named(make, key):
    with pytest.raises(FedsimError, match=key):
        make()


def test_the_rows_of_a_block_depend_on_the_loss_that_is_given():
    data = make_data([9, 4])

    def doubled(outputs, targets):
        return 2 * F.cross_entropy(outputs, targets, reduction="none")

    one, two = (
        Trainer(
            make_mlp(), SGD(lr=lr), data, batch_size=0, steps=1, loss=loss,
            randomness=Randomness(1),
        ).fit(torch.zeros(53), np.arange(2), 1).theta
        for loss, lr in ((doubled, 0.1), (lambda o, t: doubled(o, t) / 2, 0.2))
    )  # fmt: skip
    torch.testing.assert_close(one, two)
