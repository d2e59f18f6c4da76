"""Training of parameters in turns: one part of them in each round, in rows of one layout.

In the model of each part of an `Alternation` all other parts are frozen: they get no gradient, no
step, decay or momentum, no columns in an example's row, and no noise. The part's rows become
columns of rows of all parameters, whose other columns are exact zeros. So the layout, which the
plan, the exact sums and a checkpoint rely on, is the same in all rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients.base import LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.randomness import Randomness
from fedsim.rows.layout import Alternation
from fedsim.training.batches import Floats, Ints
from fedsim.training.client_state import PersistentState
from fedsim.training.local_rounds import LocalResult, LocalRounds
from fedsim.training.payload import Personal


def check(algorithm: LocalAlgorithm, state: str, personal: object) -> None:
    """Refuse clients that keep state or are sent named vectors.

    These would belong to a part that is frozen in the next round.

    Raises
    ------
    FedsimError
    """
    if algorithm.receives:
        raise FedsimError(
            f"client.name names {algorithm.label}, which is sent "
            f"{', '.join(algorithm.receives)} of all parameters; where they are trained in "
            "turns (adapter.factors) it must be another algorithm."
        )
    if state != "reset" or personal:
        raise FedsimError(
            "client.state must be 'reset' and model.personal unset where parameters are "
            "trained in turns (adapter.factors): a client's state would be for the part that "
            "is frozen in the next round."
        )


def parts(
    alternation: Alternation, whole: LocalRounds, make: Callable[..., LocalRounds]
) -> list[LocalRounds]:
    """Local rounds for each part of the parameters that ``whole`` trains.

    ``make`` creates those of a part, given its model, the state of its clients and their payload.
    """
    rounds_of_parts: list[LocalRounds] = []
    for turn in range(len(alternation.parts)):
        resting = alternation.resting(turn)
        model = _frozen_copy(whole.trained.model, resting)
        personal = Personal.of(model, ())
        columns = alternation.trained(whole.payload.layout, turn).to(personal.initial.device)
        payload = replace(whole.payload, shared=personal.shared, columns=columns)
        client_state = PersistentState("reset", whole.stepper.algorithm, personal, 0)
        rounds = make(model, client_state, payload)
        if rounds_of_parts and rounds.releases is not None:
            rounds.releases = rounds_of_parts[0].releases  # one client has one history
        rounds_of_parts.append(rounds)
    return rounds_of_parts


def _frozen_copy(model: nn.Module, names: frozenset[str]) -> nn.Module:
    """A copy of a model with ``names`` frozen; it shares the parameters that were not trained."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    copied = copy.deepcopy(model, cast(Any, shared))
    for name, parameter in copied.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
    return copied


@torch.no_grad()
def part_of_round(
    alternation: Alternation, parts: Sequence[LocalRounds], vector: Tensor, round: int
) -> LocalRounds:
    """The part that a round trains, with the resting parameters set from ``vector [d]``."""
    turn = alternation.part_of(round)
    values = parts[turn].payload.layout.unflatten(vector)
    named = dict(parts[turn].trained.model.named_parameters())
    for name in alternation.resting(turn):
        named[name].copy_(values[name])
    return parts[turn]


def fit_in_groups(
    fit: Callable[..., LocalResult],
    vectors: Tensor,
    client_ids: Ints,
    round: int,
    numbers: Mapping[str, Sequence[float]],
    randomness: Sequence[Randomness],
) -> LocalResult:
    """Call ``fit`` (`Trainer.fit`) for clients that were sent equal rows of ``vectors [n, d]``.

    A part's model holds one value of the parameters that are frozen in it.
    """
    theta = torch.empty_like(vectors)
    metrics: dict[str, Floats] = {}
    _, groups = torch.unique(vectors.cpu(), dim=0, return_inverse=True)
    for group in range(int(groups.max()) + 1):
        members: Ints = np.flatnonzero(groups.numpy() == group)
        result = fit(
            vectors[members[0]],
            client_ids[members],
            round,
            numbers={name: [values[i] for i in members] for name, values in numbers.items()},
            randomness=[randomness[i] for i in members],
        )
        theta[torch.from_numpy(members).to(theta.device)] = result.theta
        for name, values in result.metrics.items():
            metrics.setdefault(name, np.zeros(len(client_ids)))[members] = values
    return LocalResult(theta, metrics)
