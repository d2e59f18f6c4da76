"""Server optimisers: torch's own arithmetic, over state that can be written down."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from flwr.serverapp import strategy as flower

from fedsim import registry
from fedsim.clients import Schedule, Step
from fedsim.errors import FedsimError
from fedsim.federation.optimizers import FlowerOptimizer, Scheduled
from fedsim.server_optimizers import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
)
from fedsim.strategies import ServerOptimizer, adam, sgd

CASES = [
    (lambda: sgd(0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    (lambda: sgd(1.0, 0.9), lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)),
    (
        lambda: adam(0.03, (0.8, 0.99), 1e-6),
        lambda p: torch.optim.Adam(p, lr=0.03, betas=(0.8, 0.99), eps=1e-6),
    ),
]


def updates(rounds: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    # The noisy mean is float64, whatever the parameters are.
    return [torch.randn(1001, generator=generator, dtype=torch.float64) for _ in range(rounds)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("ours", "torchs"), CASES)
def test_steps_are_torchs_to_the_last_bit(ours, torchs, dtype):
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 1001, dtype=dtype))
    optimizer, reference = ours(), torchs([parameter])
    vector = parameter.detach().clone()
    for update in updates(6):
        before = vector.clone()
        moved = optimizer.step(vector, update)
        assert torch.equal(vector, before)
        vector = moved
        parameter.grad = (-update).to(dtype)
        reference.step()
        assert torch.equal(vector, parameter.detach())


@pytest.mark.parametrize("ours", [case[0] for case in CASES])
def test_a_new_optimizer_goes_on_from_what_another_gave(ours):
    first, second = ours(), ours()
    vector = torch.linspace(-1, 1, 1001)
    todo = updates(6)
    for update in todo[:3]:
        vector = first.step(vector, update)
    second.restore(first.state())
    reached = vector
    for update in todo[3:]:
        vector, reached = first.step(vector, update), second.step(reached, update)
    assert torch.equal(vector, reached)
    second.restore({})
    assert second.state() == {}


def test_an_optimizer_of_ones_own_need_keep_nothing():
    class Adding(ServerOptimizer):
        def step(self, vector: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
            return vector + update

    adding = Adding()
    adding.restore(adding.state())
    assert adding.state() == {}


FLOWERS = [
    (FedAvgM(lr=0.5, momentum=0.8), flower.FedAvgM(server_learning_rate=0.5, server_momentum=0.8)),
    (FedAdam(lr=0.1, tau=1e-2), flower.FedAdam(eta=0.1, tau=1e-2, beta_2=0.99)),
    (FedYogi(lr=0.05), flower.FedYogi(eta=0.05)),
    (FedAdagrad(lr=0.2), flower.FedAdagrad(eta=0.2)),
]


@pytest.mark.parametrize(("ours", "flowers"), FLOWERS, ids=lambda o: type(o).__name__)
def test_flowers_server_optimisers_take_the_same_steps(ours, flowers):
    wrapped = FlowerOptimizer(flowers)
    vector = reached = torch.linspace(-1, 1, 101, dtype=torch.float64)
    for update in updates(6):
        vector = ours.step(vector, update[:101])
        reached = wrapped.step(reached, update[:101])
        torch.testing.assert_close(vector, reached, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", registry.names("server"))
def test_every_server_optimiser_goes_on_from_what_another_gave(name):
    make = registry.find("server", name, "server.optimizer")
    first, second = make(), make()
    vector = torch.linspace(-1, 1, 1001)
    for update in updates(3):
        vector = first.step(vector, update)
    second.restore(first.state())
    update = updates(4)[3]
    assert torch.equal(first.step(vector, update), second.step(vector, update))


@pytest.mark.parametrize("text", ["warm-up(length=3)", "cosine(length=5)", "staircase(decay=0.1)"])
def test_a_schedule_multiplies_the_servers_rate_and_survives_a_resume(text):
    schedule = Schedule.parse(text)
    inner = sgd(0.5)
    scheduled, again = Scheduled(inner, schedule), Scheduled(inner, schedule)
    vector = torch.zeros(3, dtype=torch.float64)
    update = torch.ones(3, dtype=torch.float64)
    for number in range(1, 5):
        moved = scheduled.step(vector, update)
        assert moved[0].item() == pytest.approx(0.5 * schedule(Step(number, 0)))
    again.restore(scheduled.state())
    assert torch.equal(again.step(vector, update), scheduled.step(vector, update))
    assert inner.lr == 0.5


@pytest.mark.parametrize("frozen", [False, True])
def test_a_schedule_goes_with_any_class_that_has_a_rate(frozen):
    @dataclass(frozen=frozen)
    class Plain:
        lr: float

        def step(self, vector, update):
            return vector + self.lr * update

    inner = Plain(2.0)
    scheduled = Scheduled(inner, Schedule.parse("warm-up(length=4)"))
    assert scheduled.step(torch.zeros(1), torch.ones(1)).item() == 0.5
    assert inner.lr == 2.0


def test_a_schedule_that_a_server_cannot_have_is_refused():
    class Derived:
        lr = property(lambda self: 1.0)

    with pytest.raises(FedsimError, match=r"the lr of .*Derived.* cannot be set; it must be an"):
        Scheduled(Derived(), Schedule.parse("cosine(length=3)"))
    with pytest.raises(FedsimError, match=r"over=round"):
        Scheduled(sgd(), Schedule.parse("inverse(decay=0.1, over=step)"))
    with pytest.raises(FedsimError, match="has no lr"):
        Scheduled(object(), Schedule.parse("cosine(length=3)"))
