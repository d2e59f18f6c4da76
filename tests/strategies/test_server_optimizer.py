"""Server optimisers: torch's own arithmetic, over state that can be written down."""

from __future__ import annotations

import pytest
import torch

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
