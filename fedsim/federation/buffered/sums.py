"""Sums of buffered asynchronous rounds: rows that are trained now, for this release and later ones.

All clients that start from a version are trained when it is made. What they hand in later is
bounded, weighted and added at once to the sum of the release that it will be in, which the schedule
says. A round thus trains one version, and releases one sum; no earlier version is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsim.array_types import Floats, Ints
from fedsim.clients.base import LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.federation.aggregation.robust import RobustMean
from fedsim.federation.aggregation.server_sum import ServerSum
from fedsim.federation.buffered.schedule import ReleaseSchedule
from fedsim.federation.extras import Extra
from fedsim.federation.row_sums import Summing
from fedsim.mechanisms import Mechanism, NoPrivacy, PartialSum, Release, Releaser
from fedsim.privacy.laws.buffered import Buffered
from fedsim.privacy.plan import ReleasePlan
from fedsim.rows import DenseRows, Layout
from fedsim.rows.block import Block


class ReleaseSums(PartialSum):
    """The sum of a round's release, with the sums of later releases, by their number.

    Attributes
    ----------
    later : dict of int to PartialSum
    """

    def __init__(self, first: PartialSum, start: Callable[[], PartialSum]) -> None:
        super().__init__(
            first.definition, first.state_before, [part.round_state for part in first.segments]
        )
        self.start, self.later = start, dict[int, PartialSum]()

    def of(self, release: int) -> PartialSum:
        """The sum of a later release, empty at first."""
        if release not in self.later:
            self.later[release] = self.start()
        return self.later[release]

    def state(self) -> dict[str, Tensor]:
        """Input of `merge`: this release's, and those of later ones with their numbers."""
        state = super().state()
        for release, total in self.later.items():
            state |= {f"{release}/{name}": tensor for name, tensor in total.state().items()}
        return state

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add the `state` of other sums of the same round."""
        own = {name: tensor for name, tensor in state.items() if "/" not in name}
        super().merge(own)
        for release, of_release in by_release(state).items():
            self.of(release).merge(of_release)


def by_release(state: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """The states of later releases, by their number, in the `ReleaseSums.state` of a round."""
    states: dict[int, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        release, separator, name = key.partition("/")
        if separator:
            states.setdefault(int(release), {})[name] = tensor
    return states


def weighted(plan: ReleasePlan[Mechanism], rows: Tensor, weights: Floats) -> tuple[Tensor, Floats]:
    """Rows ``[n, d]`` and the weights with which a sum takes them, for weights of staleness."""
    if isinstance(plan.mechanism, NoPrivacy) and (weights < 1).any():
        # Without a bound the divisor is the sum of the weights, which staleness must not lower.
        return rows * torch.from_numpy(weights).to(rows)[:, None], np.ones_like(weights)
    return rows, weights


@dataclass(frozen=True)
class BufferedSumming(Summing):
    """How the rows of those who train a version are added to the sums of several releases.

    Attributes
    ----------
    round : int
        The release that follows the version.
    client_ids, releases : int64 ``[a]``
        Sorted client ids, and the release that each one's row is in.
    """

    round: int = 0
    client_ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    releases: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def start(self, releaser: Releaser) -> ReleaseSums:
        """Empty sums of the round's release and of later ones."""
        return ReleaseSums(releaser.start(self.state), lambda: releaser.start(self.state))

    def add_rows(self, block: Block, rows: Tensor, total: PartialSum) -> Tensor:
        """Add each row to the sum of its release, times the weight of its staleness."""
        assert isinstance(total, ReleaseSums)
        releases = self.releases[np.searchsorted(self.client_ids, block.client_ids)]
        weights = self.staleness_weights(releases)
        rows, weights = weighted(self.plan, rows, weights)
        if (releases == self.round).all():
            return total.add(
                DenseRows(rows), weights=weights, side_scalars=self.side_scalars(block)
            )
        targets = [total if r == self.round else total.of(r) for r in releases.tolist()]
        return total.add_to_each(
            targets, rows, weights=weights, side_scalars=self.side_scalars(block)
        )

    def staleness_weights(self, releases: Ints) -> Floats:
        """Weights ``[n]`` of rows that are in these releases."""
        sampler = self.plan.sampler
        assert isinstance(sampler, Buffered)
        return np.array([sampler.weight(r - self.round) for r in releases.tolist()])


class InFlight(Extra):
    """Sums of releases to come, of rows that are trained already; all of it is in a checkpoint.

    Parameters
    ----------
    schedule : ReleaseSchedule

    Attributes
    ----------
    sums : dict of int to PartialSum
        By the number of the release.
    """

    def __init__(self, schedule: ReleaseSchedule) -> None:
        self.schedule = schedule
        self.sums: dict[int, PartialSum] = {}
        self._restored: dict[int, Mapping[str, Tensor]] = {}

    def begin(self, sums: ReleaseSums, round: int) -> None:
        """Give the round's empty sums what earlier rounds have added to them, and to later ones."""
        for release, state in self._restored.items():
            self.sums[release] = sums.start()
            self.sums[release].merge(state)
        self._restored = {}
        sums.later = self.sums
        if (own := self.sums.pop(round, None)) is not None:
            sums.merge(own.state())

    def state(self) -> dict[str, Any]:
        """The sums by the number of their release, and the schedule's digest."""
        states = self._restored | {release: total.state() for release, total in self.sums.items()}
        sums = {
            str(release): {name: tensor.clone() for name, tensor in state.items()}
            for release, state in sorted(states.items())
        }
        return {"schedule": self.schedule.code, "sums": sums}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`.

        Raises
        ------
        FedsimError
            If it is of another schedule.
        """
        self.schedule.check_code(state["schedule"])
        self.sums = {}
        self._restored = {int(release): dict(sums) for release, sums in state["sums"].items()}


@dataclass(eq=False)
class BufferSum(ServerSum):
    """Releases the sum of the updates in a buffer, divided by its size."""

    def release(self) -> Release:
        """The round's one release: the sum divided by the size of the buffer, failed or not."""
        release = super().release()
        if isinstance(self.plan.mechanism, NoPrivacy):
            # Without a bound the sum is divided by the number of usable rows.
            share = self.total.count / self.plan.denominator
            return release if share == 1 else replace(release, mean=release.mean * share)
        return release


@dataclass(eq=False)
class BufferedSum(BufferSum):
    """Trains a version, and releases the sum that is complete with it.

    The ledger's line is written before anything is trained: what is added to sums of later releases
    could not be taken back, if the budget did not allow this one.

    Parameters
    ----------
    in_flight : InFlight
    """

    charged_before_request: ClassVar[bool] = True
    in_flight: InFlight = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        number = self.instructions.round
        ids, releases = self.in_flight.schedule.starting(number)
        summing = vars(self.summing) | {"round": number, "client_ids": ids, "releases": releases}
        self.summing = BufferedSumming(**summing)
        self.instructions = replace(self.instructions, summing=self.summing)

    def sum_on_device(self, device: torch.device) -> PartialSum:
        """The sum of this release, with those of later ones."""
        is_first = self._sum is None
        total = super().sum_on_device(device)
        if is_first:
            assert isinstance(total, ReleaseSums)
            self.in_flight.begin(total, self.instructions.round)
        return total


def check_buffered(
    plan: ReleasePlan[Mechanism],
    schedule: ReleaseSchedule | None,
    algorithm: LocalAlgorithm | None,
    *,
    real_time: bool,
    protects: bool,
) -> None:
    """Refuse what assumes that all clients of a release train the same version.

    Parameters
    ----------
    plan : ReleasePlan
    schedule : ReleaseSchedule or None
        As given with the strategy.
    algorithm : LocalAlgorithm or None
        The clients', if it is known.
    real_time, protects : bool
        Whether clients take real time; and whether the run claims privacy.

    Raises
    ------
    FedsimError
    """
    sampler = plan.sampler
    if not isinstance(sampler, Buffered):
        for name, given in (("schedule", schedule is not None), ("real_time", real_time)):
            if given:
                raise FedsimError(
                    f"availability.{name} is given, and the cohort (cohort.name) is "
                    f"'{sampler.name}'; it must be left out, unless the cohort is buffered."
                )
        return
    if schedule is None and real_time and protects:
        raise FedsimError(
            "availability.schedule (devices.duration) must be given in a private run, also with "
            "real_time: in which order clients answer may depend on their data."
        )
    wrong = schedule is not None and schedule.cohort != sampler
    if wrong or plan.rounds != sampler.rounds or (schedule is None and not real_time):
        raise FedsimError(
            "availability.schedule must be given with a buffered cohort (cohort.name): "
            "ReleaseSchedule.of this cohort, whose number of rounds is that of the plan (rounds=)."
        )
    if schedule is not None:
        schedule.check()
    _check_mechanism(plan.mechanism)
    if algorithm is not None and (algorithm.sends or algorithm.receives):
        raise FedsimError(
            f"client.name names {algorithm.label}, which sends or receives vectors that belong to "
            "one round of the whole cohort; it must be one that sends its update alone with "
            "cohort.name = 'buffered'."
        )


def _check_mechanism(mechanism: Mechanism) -> None:
    """Refuse a mechanism that does not sum, changes between rounds, or weighs by examples."""
    name = type(mechanism).__name__
    if isinstance(mechanism, RobustMean):
        raise FedsimError(
            f"mechanism.name names {name}, a mean of updates of one version; it must be a sum, "
            "such as 'none' or 'clipping', with cohort.name = 'buffered'."
        )
    if mechanism.init(Layout.of({"w": torch.zeros(1)})):
        raise FedsimError(
            f"mechanism.name names {name}, whose bound changes between rounds; it must be constant "
            "('clipping', 'normalization') with cohort.name = 'buffered': a late update was "
            "bounded for an earlier version."
        )
    if mechanism.weighting == "num-examples":
        raise FedsimError(
            "mechanism.weighting is 'num-examples'; it must be 'uniform' with cohort.name = "
            "'buffered', whose releases are divided by cohort.buffer."
        )
