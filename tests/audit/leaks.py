"""Bugs that leak beside the sum, between canaries, or through what keys the noise.

Like those of `bugs`, one context manager each; a default audit once passed all of them.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from bugs import again, bug, honest_draw, noise, noise_address
from flwr.app import MetricRecord

from fedsim.federation.aggregation.server_sum import ServerSum
from fedsim.mechanisms import Normalization, scaling
from fedsim.mechanisms.base import BoundedRows
from fedsim.mechanisms.partial import PartialSum
from fedsim.mechanisms.releaser import Release, Releaser
from fedsim.mechanisms.scaling import ScalingMechanism
from fedsim.privacy import Entry, Ledger
from fedsim.privacy.laws import Poisson
from fedsim.randomness import Draws, Randomness
from fedsim.rows.norms import norms_of
from fedsim.strategies import DPFedAvg

OF_BUDGETS = {"a budget that stops a round late", "a budget that does not stop"}
OF_ATTACKS = {"noise from 65,536 seeds of the config"}

# -- low bits and projections ----------------------------------------------------------------


@bug("noise of twelve bits a standard deviation")
def _coarse() -> AbstractContextManager[object]:
    return noise(lambda z: np.round(z * 4096) / 4096)


@contextmanager
def units(change: Callable[[np.ndarray, np.ndarray, int], np.ndarray]) -> Iterator[None]:
    """Change the released sum ``[..., d]``, given the exact one and a count of calls."""
    add_noise, calls = Releaser.add_noise, 0

    def changed(self: Releaser, total: PartialSum, *rest: Any) -> Any:
        nonlocal calls
        exact = {name: grid.units() for name, grid in total.grids.items()}
        released, kept = add_noise(self, total, *rest)
        calls += 1
        for name, values in released.items():
            values.copy_(torch.from_numpy(change(values.numpy(), exact[name].numpy(), calls)))
        return released, kept

    with patch.object(Releaser, "add_noise", changed):
        yield


@bug("the exact sum in the twelve lowest bits")
def _low_bits() -> AbstractContextManager[object]:
    return units(lambda k, s, _: k - np.mod(k, 4096) + np.mod(s, 4096))


@bug("the exact sum in the twelve lowest bits, masked alike in every run")
def _masked() -> AbstractContextManager[object]:
    def change(k: np.ndarray, s: np.ndarray, _: int) -> np.ndarray:
        mask = np.random.default_rng(5).integers(4096, size=k.shape)
        return k - np.mod(k, 4096) + np.mod(s + mask, 4096)

    return units(change)


@bug("noise that is not rounded to the grid")
def _floating() -> AbstractContextManager[object]:
    return units(lambda k, s, _: k + 0.5 * np.sin(k))


@bug("no noise along the sum of all coordinates")
def _direction() -> AbstractContextManager[object]:
    return noise(lambda z: z - z.mean() if len(z) > 1 else z)


@bug("no noise along alternating signs")
def _alternating_signs() -> AbstractContextManager[object]:
    def change(z: np.ndarray) -> np.ndarray:
        sign = 1.0 - 2.0 * (np.arange(len(z)) % 2)
        return z - (z @ sign) * sign / len(z) if len(z) > 1 else z

    return noise(change)


@bug("no noise along a secret direction")
def _secret_direction() -> AbstractContextManager[object]:
    def change(z: np.ndarray) -> np.ndarray:
        v = np.random.default_rng(len(z)).standard_normal(len(z))
        return z - (z @ v) * v / (v @ v) if len(z) > 1 else z

    return noise(change)


@bug("half of the noise is the other half's, in another order")
def _shuffled() -> AbstractContextManager[object]:
    def change(z: np.ndarray) -> np.ndarray:
        half = len(z) // 2
        order = np.random.default_rng(3).permutation(half)
        z[half : 2 * half] = (z[:half][order] + z[half : 2 * half]) / 2**0.5
        return z

    return noise(change)


@bug("one value of noise in a thousand left out")
def _left_out() -> AbstractContextManager[object]:
    def change(z: np.ndarray) -> np.ndarray:
        z[np.abs(z) < 0.00125] = 0
        return z

    return noise(change)


# -- canaries of some lengths, and several at once --------------------------------------------


@contextmanager
def bound(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Change the factors of rows, given their norms over C and the honest factors."""
    bound_ = Normalization.bound_

    def changed(self: Normalization, y: torch.Tensor, round_state: Any) -> BoundedRows:
        lengths = torch.linalg.vector_norm(y, dim=-1) / self.clip_norm
        shaped = bound_(self, y, round_state)
        return shaped._replace(factor=change(lengths, shaped.factor))

    with patch.object(Normalization, "bound_", changed):
        yield


@bug("rows of 1.5 to 2 C are not bounded")
def _some_lengths() -> AbstractContextManager[object]:
    def change(lengths: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return torch.where((lengths >= 1.5) & (lengths <= 2), 1.0, factor)

    return bound(change)


@bug("rows below .01 C are bounded by 2 C")
def _short() -> AbstractContextManager[object]:
    def change(lengths: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return torch.where((lengths > 0) & (lengths < 0.01), 2 * factor, factor)

    return bound(change)


@bug("of two to five long rows one is not bounded")
def _several_long() -> AbstractContextManager[object]:
    def change(lengths: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        long = lengths > 1.2
        if 2 <= int(long.sum()) <= 5:
            return torch.where(long & (long.cumsum(-1) == 2), 1.5 * factor, factor)
        return factor

    return bound(change)


@bug("negative coordinates left out of the norm")
@contextmanager
def _negative() -> Iterator[None]:
    norms = scaling.norms_

    def of_positive(y: torch.Tensor) -> Any:
        lengths, unit = norms(y)
        return torch.where(lengths.isfinite(), norms_of(y.clamp(min=0)), lengths), unit

    with (
        patch.object(scaling, "norms_", of_positive),
        patch.object(ScalingMechanism, "only_scales", False),
    ):
        yield


@bug("rows in float32 are not bounded")
@contextmanager
def _float32() -> Iterator[None]:
    add = PartialSum.add

    def added(self: PartialSum, rows: Any, **settings: Any) -> torch.Tensor:
        usable = add(self, rows, **settings)
        if rows.dense().dtype == torch.float32:
            add(self, rows, **settings)
        return usable

    with patch.object(PartialSum, "add", added):
        yield


@bug("rows that come as messages count twice")
@contextmanager
def _messages() -> Iterator[None]:
    add = ServerSum.add

    def added(self: ServerSum, reply: Any) -> torch.Tensor:
        usable = add(self, reply)
        if reply.content is not None:
            add(self, reply)
        return usable

    with patch.object(ServerSum, "add", added):
        yield


@bug("a denominator that shrinks when three clients fail")
@contextmanager
def _three_fail() -> Iterator[None]:
    release = ServerSum.release

    def divided(self: ServerSum) -> Any:
        made = release(self)
        failed = self.tally.report(self.instructions.round).failed
        shrinks = 3 <= failed < len(self.instructions.recipients.client_ids) / 2
        return dataclasses.replace(made, mean=made.mean * (1.001 if shrinks else 1))

    with patch.object(ServerSum, "release", divided):
        yield


# -- what leaves a round beside the parameters ------------------------------------------------


@contextmanager
def aggregated(change: Callable[[DPFedAvg, Any, Any], Any]) -> Iterator[None]:
    """Change what a round gives, with the exact sum as ``strategy.exact``."""
    aggregate, release = DPFedAvg.aggregate_train, ServerSum.release
    exact: dict[str, np.ndarray] = {}

    def released(self: ServerSum) -> Release:
        exact["sum"] = np.concatenate(
            [part.grids["sum"].value().numpy() for part in self.total.segments], axis=None
        )
        exact["clipped"] = np.float64(self.total.clipped)
        return release(self)

    def changed(self: DPFedAvg, server_round: int, replies: Any) -> Any:
        arrays, metrics = aggregate(self, server_round, replies)
        return change(self, exact, (arrays, metrics))

    with (
        patch.object(ServerSum, "release", released),
        patch.object(DPFedAvg, "aggregate_train", changed),
    ):
        yield


def _norm(exact: Mapping[str, np.ndarray]) -> float:
    return float(np.linalg.norm(exact["sum"]))


@bug("a metric of training is the exact sum's norm")
def _metric() -> AbstractContextManager[object]:
    return aggregated(lambda _, exact, made: (made[0], MetricRecord({"update-norm": _norm(exact)})))


@bug("the update's norm is the exact sum's")
def _update_norm() -> AbstractContextManager[object]:
    def change(strategy: DPFedAvg, exact: Any, made: Any) -> Any:
        strategy.report = dataclasses.replace(strategy.report, update_norm=_norm(exact))
        return made

    return aggregated(change)


@bug("the count of clipped rows is shown")
def _clipped() -> AbstractContextManager[object]:
    def change(strategy: DPFedAvg, exact: Any, made: Any) -> Any:
        info = {**strategy.report.info, "clipped": float(exact["clipped"])}
        strategy.report = dataclasses.replace(strategy.report, info=info)
        return made

    return aggregated(change)


@bug("the exact sum stays in the mechanism's state")
def _state() -> AbstractContextManager[object]:
    def change(strategy: DPFedAvg, exact: Any, made: Any) -> Any:
        strategy._mechanism_state = {**strategy._mechanism_state, "sum": torch.tensor(exact["sum"])}
        return made

    return aggregated(change)


@bug("the noise stays in the optimiser's state")
def _noise_state() -> AbstractContextManager[object]:
    def change(strategy: DPFedAvg, exact: Any, made: Any) -> Any:
        state = DPFedAvg.state

        def shown(self: DPFedAvg) -> Any:
            tree = state(self)
            return {**tree, "optimizer": {**tree["optimizer"], "noise": self.noise_shown}}

        last = [*made[0].values()][-1].numpy().ravel()
        strategy.noise_shown = torch.tensor(strategy.plan.denominator * last[-1] - exact["sum"][-1])
        strategy.state = lambda: shown(strategy)
        return made

    return aggregated(change)


@bug("clients are sent the exact sum's norm")
@contextmanager
def _sent() -> Iterator[None]:
    configure = DPFedAvg.configure_train

    def configured(self: DPFedAvg, *settings: Any) -> Any:
        asked = configure(self, *settings)
        if hasattr(asked, "config"):
            asked.config["scale"] = getattr(self, "norm_shown", 0.0)
        return asked

    def change(strategy: DPFedAvg, exact: Any, made: Any) -> Any:
        strategy.norm_shown = _norm(exact)
        return made

    with aggregated(change), patch.object(DPFedAvg, "configure_train", configured):
        yield


# -- few seeds --------------------------------------------------------------------------------


@bug("noise from 256 seeds of the system")
def _byte() -> AbstractContextManager[object]:
    def change(randomness: Randomness, address: dict[str, Any]) -> np.random.Generator:
        if randomness.seed is not None:
            return again(randomness, address)
        return again(Randomness(secrets.randbits(8)), {**address, "round": 0})

    return noise_address(change)


@bug("noise from 65,536 seeds of the config")
def _two_bytes() -> AbstractContextManager[object]:
    def change(randomness: Randomness, address: dict[str, Any]) -> np.random.Generator:
        if randomness.seed is None:
            return again(randomness, address)
        return again(Randomness(randomness.seed % 2**16), address)

    return noise_address(change)


@bug("cohorts from 256 seeds of the system")
@contextmanager
def _cohort_byte() -> Iterator[None]:
    def draw(self: Poisson, round: int, draws: Draws, step: int = 0) -> np.ndarray:
        if draws.randomness.seed is not None:
            return honest_draw(self, round, draws)
        few = dataclasses.replace(draws, randomness=Randomness(secrets.randbits(8)))
        return honest_draw(self, 1, few)

    with patch.object(Poisson, "draw", draw):
        yield


# -- budgets ----------------------------------------------------------------------------------


@contextmanager
def budget(change: Callable[[Ledger, bool], bool]) -> Iterator[None]:
    """Change the answer before a round, and check nothing when its line is written."""
    over = Ledger.owners_over_budget

    def changed(self: Ledger, *settings: Any) -> tuple[None, ...]:
        return (None,) if change(self, bool(over(self, *settings))) else ()

    def unchecked(self: Ledger, entries: Sequence[Entry], budget: object) -> Sequence[Entry]:
        return entries

    with (
        patch.object(Ledger, "owners_over_budget", changed),
        patch.object(Ledger, "_within_budget", unchecked),
    ):
        yield


@bug("a budget that stops a round late")
def _late() -> AbstractContextManager[object]:
    before: dict[int, bool] = {}

    def change(ledger: Ledger, exceeds: bool) -> bool:
        answer = before.get(id(ledger), False)
        before[id(ledger)] = exceeds
        return answer

    return budget(change)


@bug("a budget that does not stop")
def _never() -> AbstractContextManager[object]:
    return budget(lambda _, __: False)


# -- a run that is resumed --------------------------------------------------------------------


@contextmanager
def resumed_round() -> Iterator[list[int]]:
    """The round after which a strategy was resumed, as the one entry of a list; 0 before."""
    restore = DPFedAvg.restore
    last = [0]

    def restored(self: DPFedAvg, state: Any) -> None:
        restore(self, state)
        last[0] = state["round"]

    with patch.object(DPFedAvg, "restore", restored):
        yield last


@bug("a resumed run draws the noise of its first rounds again")
@contextmanager
def _resumed() -> Iterator[None]:
    with resumed_round() as last:

        def change(randomness: Randomness, address: dict[str, Any]) -> np.random.Generator:
            number = address["round"]
            return again(randomness, address, round=number - last[0] * (number > last[0]))

        with noise_address(change):
            yield


@contextmanager
def draw_of_round(change: Callable[[int], tuple[int, int]]) -> Iterator[None]:
    """Sample in each round what another round samples, its ids shifted."""

    def draw(self: Poisson, round: int, draws: Draws, step: int = 0) -> np.ndarray:
        other, shift = change(round)
        repeated = dataclasses.replace(draws, randomness=draws.randomness.for_replay())
        return np.sort((honest_draw(self, other, repeated) + shift) % self.population)

    with patch.object(Poisson, "draw", draw):
        yield


@bug("a resumed run samples the cohorts of its first rounds again")
@contextmanager
def _resumed_cohorts() -> Iterator[None]:
    with resumed_round() as last, draw_of_round(lambda t: (t - last[0] * (t > last[0]), 0)):
        yield


# -- cohorts and lines ------------------------------------------------------------------------


@bug("every second cohort is the one before, shifted by one id")
def _shifted() -> AbstractContextManager[object]:
    return draw_of_round(lambda t: (t - 1 + t % 2, 1 - t % 2))


@bug("lines of seeded runs say entropy of the system")
@contextmanager
def _entropy() -> Iterator[None]:
    init = Entry.__post_init__

    def init_as_system(self: Entry) -> None:
        object.__setattr__(self, "entropy", "system")
        init(self)

    with patch.object(Entry, "__post_init__", init_as_system):
        yield
