"""Training of parameters in turns: one part of them in each round, in rows of one layout.

There is a trainer for each part of an `Alternation`, and in its model all other parts are frozen:
they get no gradient, no step, decay or momentum, no columns in an example's row, and no noise. The
trainer's rows become columns of rows of all parameters, whose other columns are exact zeros. So the
layout, which the plan, the exact sums and a checkpoint rely on, is the same in all rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients.base import LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.privacy import ClientLedgers
from fedsim.randomness import Randomness
from fedsim.rows.block import Block
from fedsim.rows.layout import Alternation
from fedsim.training.batches import Ints
from fedsim.training.data import ClientData
from fedsim.training.example_privacy import ExamplePrivacy
from fedsim.training.local_rounds import LocalResult
from fedsim.training.trainer import Trainer


class AlternatingTrainer(Trainer):
    """A trainer that trains one part of the parameters in each round.

    Parameters
    ----------
    model, algorithm, data, privacy, **settings
        As in `Trainer`. Clients keep nothing between rounds: ``state`` is "reset".
    alternation : Alternation
        Parts of the trained parameters, and their turns.

    Notes
    -----
    As in any trainer, evaluation and the first vector that is sent cover all parameters.

    Raises
    ------
    FedsimError
        As `Trainer`; or if clients keep state or are sent named vectors, which would belong to a
        part that is frozen in the next round.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: LocalAlgorithm,
        data: ClientData,
        *,
        alternation: Alternation,
        privacy: ExamplePrivacy | None = None,
        **settings: Any,
    ) -> None:
        if algorithm.receives:
            raise FedsimError(
                f"client.name names {type(algorithm).__name__}, which is sent "
                f"{', '.join(algorithm.receives)} of all parameters; where they are trained in "
                "turns (adapter.factors) it must be another algorithm."
            )
        if settings.get("state", "reset") != "reset" or settings.get("personal"):
            raise FedsimError(
                "client.state must be 'reset' and model.personal unset where parameters are "
                "trained in turns (adapter.factors): a client's state would be for the part that "
                "is frozen in the next round."
            )
        super().__init__(model, algorithm, data, **settings)
        self.alternation = alternation
        # One path and one block size for all parts, as in a config.
        of_parts = super()._settings() | {"path": self.path.name, "privacy": privacy}
        self._parts: list[Trainer] = []
        self._columns: list[Tensor] = []
        for turn in range(len(alternation.parts)):
            resting = alternation.resting(turn)
            trainer = Trainer(**(of_parts | {"model": _frozen_copy(self.model, resting)}))
            if (releases := trainer.rounds.releases) is not None:
                releases.changing = resting
                if self._parts:  # one client has one ledger
                    releases.ledgers = cast(ClientLedgers, self.ledgers)
            self._parts.append(trainer)
            self._columns.append(alternation.trained(self.layout, turn).to(self.device))
        self.privacy = privacy

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of the training metrics that clients report."""
        return self._parts[0].reported

    @property
    def ledgers(self) -> ClientLedgers | None:
        """Privacy ledgers of the clients; None without example-level privacy."""
        return self._parts[0].ledgers

    def receive(self, config: Mapping[str, object]) -> None:
        """Read the entries of a round's config that are for clients; see `Trainer.receive`."""
        for trainer in self._parts:
            trainer.receive(config)

    def key_by(self, release: str) -> None:
        """Key draws by a release digest; see `Trainer.key_by`."""
        super().key_by(release)
        for trainer in self._parts:
            trainer.key_by(release)

    def join(self, run: str) -> None:
        """Set the run's name; see `Trainer.join`."""
        for trainer in self._parts:
            trainer.join(run)

    def copy_for(self, device: str) -> Self:
        """A trainer of the same clients on another device; see `Trainer.copy_for`."""
        copied = super().copy_for(device)
        for trainer in copied._parts:
            trainer.rounds.releases = None
        return copied

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"alternation": self.alternation}

    def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Train these clients from ``vector [d]``, block by block."""
        trainer, columns = self._trainer_of_round(vector, round)
        for block in trainer.train(self._on_device(vector)[columns], client_ids, round):
            assert block.rows is not None
            rows = block.rows.new_zeros(len(block.rows), self.layout.d)
            rows[:, columns] = block.rows
            yield Block.sent(block.client_ids, rows, block.metrics)

    def fit(
        self,
        vector: Tensor,
        client_ids: Ints,
        round: int,
        *,
        numbers: Mapping[str, Sequence[float]] | None = None,
        randomness: Sequence[Randomness] | None = None,
    ) -> LocalResult:
        """Train these clients; parameters as in `Trainer.fit`."""
        vectors = self._on_device(vector).view(-1, self.layout.d)
        theta = vectors.expand(len(client_ids), -1).clone()
        metrics: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
        # Frozen parts are set in the model, so only clients that were sent the same go together.
        for members in _equal_vector_groups(vectors, len(client_ids)):
            trainer, columns = self._trainer_of_round(theta[int(members[0])], round)
            result = trainer.fit(
                theta[torch.from_numpy(members)][:, columns],
                client_ids[members],
                round,
                numbers={k: [values[i] for i in members] for k, values in (numbers or {}).items()},
                randomness=None if randomness is None else [randomness[i] for i in members],
            )
            for name, values in result.metrics.items():
                metrics.setdefault(name, np.zeros(len(client_ids)))[members] = values
            positions = torch.from_numpy(members).to(self.device)
            theta[positions[:, None], columns] = result.theta
        return LocalResult(theta, metrics)

    def over_budget(self, vector: Tensor, client_ids: Ints, round: int) -> str | None:
        """Why these clients' budgets forbid a round from ``vector [d]``; None if they allow it."""
        trainer, columns = self._trainer_of_round(vector, round)
        return trainer.over_budget(self._on_device(vector)[columns], client_ids, round)

    def charge(self, vector: Tensor, client_ids: Ints, round: int) -> None:
        """Record the releases of these clients, which a copy will train from ``vector``."""
        trainer, columns = self._trainer_of_round(vector, round)
        trainer.charge(self._on_device(vector)[columns], client_ids, round)

    @torch.no_grad()
    def _trainer_of_round(self, vector: Tensor, round: int) -> tuple[Trainer, Tensor]:
        """A round's trainer, with its frozen parts set from ``vector [d]``, and its columns."""
        turn = self.alternation.part_of(round)
        trainer = self._parts[turn]
        resting = self.alternation.resting(turn)
        values = self.layout.unflatten(self._on_device(vector))
        for name, parameter in trainer.model.named_parameters():
            if name in resting:
                parameter.copy_(values[name])
        return trainer, self._columns[turn]


def _frozen_copy(model: nn.Module, names: frozenset[str]) -> nn.Module:
    """A copy of a model with ``names`` frozen; it shares the parameters that were not trained."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    copied = copy.deepcopy(model, cast(Any, shared))
    for name, parameter in copied.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
    return copied


def _equal_vector_groups(vectors: Tensor, n: int) -> Iterator[Ints]:
    """Positions of ``n`` clients, in groups that were sent equal ``vectors [1 or n, d]``."""
    if len(vectors) == 1:
        yield np.arange(n)
        return
    _, groups = torch.unique(vectors.cpu(), dim=0, return_inverse=True)
    for group in range(int(groups.max()) + 1):
        yield np.flatnonzero(groups.numpy() == group)
