"""A client algorithm that mixes the clients of a block is refused: no bound of a row limits it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from clients_helpers import make_data, make_mlp

import fedsim
from fedsim import RunConfig, clients
from fedsim.clients import SGD, AdadpLR, LocalAlgorithm, Proximal, Scaffold
from fedsim.clients.base import RunFacts
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.training import Trainer
from fedsim.training.trainer_checks import check_algorithm


@dataclass(frozen=True)
class MeanOfBlock(SGD):
    def step(self, state, gradient, at):
        mean = gradient.dense().mean(0, keepdim=True)
        state["theta"].sub_(state["lr"][:, None] * mean)


class Shared(SGD):
    """As many clients as there are share a step."""

    def step(self, state, gradient, at):
        gradient.subtract_from(state["theta"], state["lr"] / len(state["theta"]))


class Centred(SGD):
    def finish(self, state):
        return state["theta"] - state["theta"].mean(0)


class ServerRate(SGD):
    def report(self, state):
        return {"largest": state["theta"].amax().expand(len(state["theta"]))}


class Remembered(SGD):
    """Mixes only what clients keep, which moves them in the next round."""

    carried: ClassVar[tuple[str, ...]] = ("offset",)

    def init(self, theta, numbers):
        return {**super().init(theta, numbers), "offset": torch.zeros_like(theta)}

    def step(self, state, gradient, at):
        super().step(state, gradient, at)
        state["theta"].sub_(state["offset"])

    def finish(self, state):
        state["offset"] = state["theta"].mean(0).expand_as(state["theta"])
        return state["theta"]


class SendsVectors(Scaffold):
    def send(self, state):
        return {"control": state["change"].flip(0)}


class OfTheFirst(SGD):
    """Takes the first client's start for everybody's: so it is, but for what is personal."""

    def init(self, theta, numbers):
        return {**super().init(theta, numbers), "anchor": theta[:1].clone()}

    def finish(self, state):
        return state["theta"] + state["anchor"]


class Drawn(SGD):
    """Adds noise of the user's own."""

    def finish(self, state):
        return state["theta"] + torch.randn_like(state["theta"])


@dataclass(frozen=True)
class Remembering(SGD):
    """Keeps what it was given."""

    given: list[Any] = field(default_factory=list)

    def step(self, state, gradient, at):
        self.given.append(gradient)
        super().step(state, gradient, at)


def check(algorithm: LocalAlgorithm, personal: bool = False) -> None:
    check_algorithm(algorithm, personal=personal or algorithm.separates_personal)


MIXED: list[LocalAlgorithm] = [
    MeanOfBlock(1e-9), MeanOfBlock(50.0), Shared(0.1), Centred(0.1), ServerRate(0.1),
    Remembered(0.1), SendsVectors(0.1), Proximal(MeanOfBlock(0.1), 0.5),
]  # fmt: skip


@pytest.mark.parametrize("algorithm", MIXED, ids=lambda a: f"{type(a).__name__}")
def test_an_algorithm_that_mixes_clients_is_refused(algorithm: LocalAlgorithm) -> None:
    with pytest.raises(FedsimError, match=rf"client\.name names {algorithm.label}, which"):
        check(algorithm)


def test_an_algorithm_in_a_proximal_one_is_named_in_refusals() -> None:
    assert Proximal(Proximal(Scaffold(0.1), 0.5), 0.5).label == "Scaffold"


def test_what_is_everybodys_may_be_shared_unless_it_is_personal() -> None:
    check(OfTheFirst(0.1))
    with pytest.raises(FedsimError, match="OfTheFirst, which mixes clients"):
        check(OfTheFirst(0.1), personal=True)


def shipped() -> list[LocalAlgorithm]:
    kinds = [getattr(clients, name) for name in clients.__all__]
    found = [
        kind(0.1)
        for kind in kinds
        if isinstance(kind, type)
        and issubclass(kind, LocalAlgorithm)
        and kind not in (LocalAlgorithm, Proximal)
    ]
    private = Scaffold(0.1).for_run(RunFacts(mechanism=Clipping(1.0), steps=3))
    others = [
        private,
        SGD(0.1, momentum=0.9, weight_decay=0.1),
        SGD(1e30),
        Scaffold(0.1, control="gradient"),
        AdadpLR(10.0, keep="full", discard=True),
        AdadpLR(0.1, adapt_rounds=1),
    ]
    return [*found, *others, *(Proximal(one, 0.5) for one in (*found, *others))]


@pytest.mark.parametrize("algorithm", shipped(), ids=str)
def test_no_algorithm_of_ours_does(algorithm: LocalAlgorithm) -> None:
    check(algorithm)
    if not algorithm.receives:
        check(algorithm, personal=True)


def test_one_that_draws_or_remembers_is_let_in_and_draws_what_it_would_have_drawn() -> None:
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    check(Drawn(0.1))
    assert torch.equal(torch.randn(2), expected)
    remembering = Remembering(0.1)
    check(remembering)
    assert not remembering.given


def test_it_is_refused_before_anything_is_trained_or_written(tmp_path: Path) -> None:
    refused = pytest.raises(FedsimError, match=r"client\.name names MeanOfBlock, which mixes")
    with refused:
        Trainer(make_mlp(), MeanOfBlock(0.1), make_data([5] * 4), randomness=Randomness(1))
    config = RunConfig.from_overrides(["rounds=1", "partition.clients=4"])
    config = config.replace(**{"client.name": f"{__name__}:MeanOfBlock"})
    with refused:
        fedsim.run(config, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())
