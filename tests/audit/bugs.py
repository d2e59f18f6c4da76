"""Bugs to plant at the seams of a release: one context manager each, for the time of an audit.

Each changes one thing where every run passes: the generators that noise and cohorts are drawn
from, the draw of a cohort, a bound, the sum, the ledger's record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fedsim.federation.aggregation.server_sum import ServerSum
from fedsim.mechanisms import NoiseSource, Normalization
from fedsim.mechanisms.base import BoundedRows, NoiselessSum
from fedsim.mechanisms.partial import PartialSum
from fedsim.mechanisms.releaser import Releaser
from fedsim.privacy import Accountant, Entry, Event, Ledger
from fedsim.privacy.laws import FixedSize, Poisson
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Draws, Purpose, Randomness
from fedsim.rows import DenseRows
from fedsim.strategies import DPFedAvg

Plant = Callable[[], AbstractContextManager[object]]
BUGS: dict[str, Plant] = {}
NAMED = 10
"""The first so many bugs are those that audits of federated learning are asked for by name."""


def bug(name: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        BUGS[name] = plant
        return plant

    return register


@contextmanager
def noise(change: Callable[[np.ndarray], np.ndarray]) -> Iterator[None]:
    """Change each vector of noise."""
    normal = NoiseSource.normal
    with patch.object(NoiseSource, "normal", lambda self, size: change(normal(self, size))):
        yield


@contextmanager
def noise_address(change: Callable[[Randomness, dict[str, Any]], Any]) -> Iterator[None]:
    """Make the generator of a round's noise otherwise."""
    generator = Randomness.generator

    def changed(self: Randomness, purpose: Purpose, **address: Any) -> np.random.Generator:
        if purpose is not Purpose.NOISE or address["level"] != "client":
            return generator(self, purpose, **address)
        made: np.random.Generator = change(self, address)
        return made

    with patch.object(Randomness, "generator", changed):
        yield


honest_generator = Randomness.generator


def again(randomness: Randomness, address: dict[str, Any], **other: int) -> np.random.Generator:
    return honest_generator(randomness.for_replay(), Purpose.NOISE, **{**address, **other})


@contextmanager
def cohort(draw: Callable[[Poisson, int, Draws], np.ndarray]) -> Iterator[None]:
    def drawn(self: Poisson, round: int, draws: Draws, step: int = 0) -> np.ndarray:
        return draw(self, round, draws)

    with patch.object(Poisson, "draw", drawn):
        yield


honest_draw = Poisson.draw


class Silent(np.random.Generator):
    """Draws nothing but zeros."""

    def standard_normal(self, size=None, *_):
        return np.zeros(size)


class Scaled(np.random.Generator):
    factor = 0.9

    def standard_normal(self, size=None, *_):
        return self.factor * super().standard_normal(size)


class Following(np.random.Generator):
    """A tenth of it, nearly, is what another generator drew."""

    before: np.random.Generator

    def standard_normal(self, size=None, *_):
        fresh = super().standard_normal(size)
        return 0.05 * self.before.standard_normal(size) + (1 - 0.05**2) ** 0.5 * fresh


# -- the ten that are asked for by name ---------------------------------------------------


@bug("noise divided by the root of the cohort")
@contextmanager
def _root() -> Iterator[None]:
    size = 1

    def draw(self: Poisson, round: int, draws: Draws) -> np.ndarray:
        nonlocal size
        ids = honest_draw(self, round, draws)
        size = max(len(ids), 1)
        return ids

    with cohort(draw), noise(lambda z: z / size**0.5):
        yield


@bug("clip after averaging")
@contextmanager
def _after() -> Iterator[None]:
    add_noise = Releaser.add_noise

    def clipped(self: Releaser, total: PartialSum, *rest: Any) -> Any:
        for summed in total.segments:
            grid = summed.grids["sum"]
            norm = float(torch.linalg.vector_norm(grid.coarse * grid.unit))
            grid.coarse.mul_(min(1.0, float(self._denominators * grid.radius) / max(norm, 1e-9)))
            grid.coarse.trunc_()
        return add_noise(self, total, *rest)

    def unbounded(self: Normalization, y: torch.Tensor, round_state: Any) -> BoundedRows:
        norms = torch.linalg.vector_norm(y, dim=-1)
        return BoundedRows(norms / norms, norms > 0, {})

    with (
        patch.object(Normalization, "bound_", unbounded),
        patch.object(Releaser, "add_noise", clipped),
    ):
        yield


@bug("a layer left out of the norm")
@contextmanager
def _layer() -> Iterator[None]:
    from fedsim.mechanisms import scaling

    norms = scaling.norms_

    def partial(y: torch.Tensor) -> Any:
        left_out = y.shape[-1] // 16
        kept = y[..., :left_out].clone()
        y[..., :left_out] = 0
        found = norms(y)
        y[..., :left_out] = kept
        return found

    with (
        patch.object(scaling, "norms_", partial),
        patch.object(Normalization, "only_scales", False),
    ):
        yield


@bug("counted denominator")
@contextmanager
def _counted() -> Iterator[None]:
    with (
        patch.object(Normalization, "noiseless_sums", {"count": NoiselessSum(unit=1.0)}),
        patch.object(
            Normalization,
            "row_scalars",
            lambda self, clipped: {"count": torch.ones_like(clipped, dtype=torch.float64)},
        ),
        patch.object(
            Normalization, "divisor", lambda self, sums, denominator: sums["count"].clamp_min(1)
        ),
    ):
        yield


@bug("generator keyed by the round only")
def _round_only() -> AbstractContextManager[object]:
    return noise_address(lambda _, address: again(Randomness(0), address))


@bug("a coordinate without noise")
def _coordinate() -> AbstractContextManager[object]:
    def change(z: np.ndarray) -> np.ndarray:
        z[len(z) // 2] = 0
        return z

    return noise(change)


@bug("noise used again in every second round")
def _second() -> AbstractContextManager[object]:
    return noise_address(lambda r, a: again(r, a, round=a["round"] - (a["round"] % 2 == 0)))


@bug("no noise from round 21 on")
def _stops() -> AbstractContextManager[object]:
    def change(randomness: Randomness, address: dict[str, Any]) -> np.random.Generator:
        made = again(randomness, address)
        return made if address["round"] < 21 else Silent(made.bit_generator)

    return noise_address(change)


@bug("a cohort's draw used again")
def _cohort() -> AbstractContextManager[object]:
    def draw(self: Poisson, round: int, draws: Draws) -> np.ndarray:
        return honest_draw(self, 19 if round == 20 else round, draws)

    return cohort(draw)


@bug("sampling at twice the rate")
def _rate() -> AbstractContextManager[object]:
    def draw(self: Poisson, round: int, draws: Draws) -> np.ndarray:
        return honest_draw(dataclasses.replace(self, rate=min(2 * self.rate, 1)), round, draws)

    return cohort(draw)


# -- noise ---------------------------------------------------------------------------------


@bug("noise truncated at three std")
def _truncated() -> AbstractContextManager[object]:
    return noise(lambda z: np.where(np.abs(z) > 3, z / 2, z))


@bug("correlation .05 with the round before")
def _autoregressive() -> AbstractContextManager[object]:
    def change(randomness: Randomness, address: dict[str, Any]) -> np.random.Generator:
        made = Following(again(randomness, address).bit_generator)
        made.before = again(randomness, address, round=address["round"] - 1)
        return made

    return noise_address(change)


@bug("one round's std times .9")
def _smaller() -> AbstractContextManager[object]:
    def change(randomness: Randomness, address: dict[str, Any]) -> np.random.Generator:
        made = again(randomness, address)
        return Scaled(made.bit_generator) if address["round"] == 7 else made

    return noise_address(change)


@bug("every std times .97")
def _all_smaller() -> AbstractContextManager[object]:
    return noise(lambda z: 0.97 * z)


@bug("noise of a wrong layer")
def _wrong_layer() -> AbstractContextManager[object]:
    def change(z: np.ndarray) -> np.ndarray:
        part = len(z) // 16
        z[-part:] = z[:part]
        return z

    return noise(change)


@bug("Laplace noise of that std")
def _laplace() -> AbstractContextManager[object]:
    def change(z: np.ndarray) -> np.ndarray:
        uniform = np.argsort(np.argsort(z)) / len(z) + 0.5 / len(z) - 0.5
        return -np.sign(uniform) * np.log1p(-2 * np.abs(uniform)) / 2**0.5

    return noise(change)


@bug("every second round the negative of the one before")
def _antithetic() -> AbstractContextManager[object]:
    class Negative(np.random.Generator):
        def standard_normal(self, size=None, *_):
            return -super().standard_normal(size)

    def change(randomness: Randomness, address: dict[str, Any]) -> np.random.Generator:
        if address["round"] % 2:
            return again(randomness, address)
        return Negative(again(randomness, address, round=address["round"] - 1).bit_generator)

    return noise_address(change)


@bug("overlapping streams")
def _overlapping() -> AbstractContextManager[object]:
    def change(randomness: Randomness, address: dict[str, Any]) -> np.random.Generator:
        made = again(randomness, address, round=0)
        made.standard_normal(10 * address["round"])
        return made

    return noise_address(change)


@bug("noise in 32 directions only")
def _low_rank() -> AbstractContextManager[object]:
    def change(z: np.ndarray) -> np.ndarray:
        rank = min(32, len(z))
        basis = np.random.default_rng(0).standard_normal((rank, len(z)))
        return z[:rank] @ basis / rank**0.5

    return noise(change)


@bug("system entropy that is none")
def _no_entropy() -> AbstractContextManager[object]:
    def change(randomness: Randomness, address: dict[str, Any]) -> np.random.Generator:
        source = Randomness(5) if randomness.seed is None else randomness
        return again(source, address)

    return noise_address(change)


@bug("two configs of one seed share noise")
def _shared() -> AbstractContextManager[object]:
    return noise_address(lambda r, a: again(Randomness(r.seed), a))


@bug("noise that grows with the cohort")
@contextmanager
def _grows() -> Iterator[None]:
    ratio = 1.0

    def draw(self: Poisson, round: int, draws: Draws) -> np.ndarray:
        nonlocal ratio
        ids = honest_draw(self, round, draws)
        ratio = len(ids) / self.expected_size
        return ids

    with cohort(draw), noise(lambda z: z * ratio**0.5):
        yield


# -- sampler -------------------------------------------------------------------------------


@bug("a fixed size announced as Poisson")
def _fixed() -> AbstractContextManager[object]:
    def draw(self: Poisson, round: int, draws: Draws) -> np.ndarray:
        assert self.population is not None
        return FixedSize(round_half(self.expected_size), self.population).draw(round, draws)

    return cohort(draw)


def round_half(number: float) -> int:
    return int(number + 0.5)


@bug("two clients always together")
def _together() -> AbstractContextManager[object]:
    def draw(self: Poisson, round: int, draws: Draws) -> np.ndarray:
        ids = set(honest_draw(self, round, draws).tolist())
        ids = ids | {3} if 7 in ids else ids - {3}
        return np.array(sorted(ids), dtype=np.int64)

    return cohort(draw)


@bug("no client twice in a row")
def _waits() -> AbstractContextManager[object]:
    def draw(self: Poisson, round: int, draws: Draws) -> np.ndarray:
        before = honest_draw(self, round - 1, draws) if round > 1 else np.zeros(0, np.int64)
        return np.setdiff1d(honest_draw(self, round, draws), before)

    return cohort(draw)


@bug("one client half as often again")
def _favoured() -> AbstractContextManager[object]:
    def draw(self: Poisson, round: int, draws: Draws) -> np.ndarray:
        ids = honest_draw(self, round, draws)
        repeated = draws.randomness.for_replay()
        lucky = repeated.generator(Purpose.EVALUATE, level="client", round=round).random()
        return np.union1d(ids, [5]) if lucky < self.rate else ids

    return cohort(draw)


@bug("a tenth more clients than announced")
def _more() -> AbstractContextManager[object]:
    def draw(self: Poisson, round: int, draws: Draws) -> np.ndarray:
        return honest_draw(dataclasses.replace(self, rate=1.1 * self.rate), round, draws)

    return cohort(draw)


@bug("ten clients in every second round only, at twice the rate")
def _alternating() -> AbstractContextManager[object]:
    def draw(self: Poisson, round: int, draws: Draws) -> np.ndarray:
        ids = honest_draw(self, round, draws)
        doubled = honest_draw(dataclasses.replace(self, rate=2 * self.rate), round, _again(draws))
        ten = doubled[doubled < 10] if round % 2 else np.zeros(0, np.int64)
        return np.union1d(ten, ids[ids >= 10]).astype(np.int64)

    return cohort(draw)


def _again(draws: Draws) -> Draws:
    return dataclasses.replace(draws, randomness=draws.randomness.for_replay())


# -- bound ---------------------------------------------------------------------------------


@bug("a client counted twice")
@contextmanager
def _twice() -> Iterator[None]:
    add = PartialSum.add

    def added(self: PartialSum, rows: Any, **settings: Any) -> torch.Tensor:
        usable = add(self, rows, **settings)
        add(self, DenseRows(rows.dense()[-1:]))
        return usable

    with patch.object(PartialSum, "add", added):
        yield


@bug("weights above one")
@contextmanager
def _weights() -> Iterator[None]:
    def weights(self: Normalization, given: Any, count: int, device: Any) -> torch.Tensor:
        return torch.linspace(0.5, 1.1, count, dtype=torch.float64, device=device)

    with patch.object(Normalization, "weights", weights):
        yield


@bug("each layer bounded by C")
@contextmanager
def _layers() -> Iterator[None]:
    bound_ = Normalization.bound_

    def layered(self: Normalization, y: torch.Tensor, round_state: Any) -> Any:
        half = y.shape[-1] // 2
        for part in (y[..., :half], y[..., half:]):
            part.mul_(bound_(self, part.clone(), round_state).factor.nan_to_num()[..., None])
        bad = ~torch.isfinite(y.sum(-1))
        factor = torch.ones_like(y[..., 0]).masked_fill_(bad, torch.nan)
        return bound_(self, y.clone(), round_state)._replace(factor=factor)

    with patch.object(Normalization, "bound_", layered):
        yield


@bug("the largest coordinate for the norm")
@contextmanager
def _largest() -> Iterator[None]:
    from fedsim.mechanisms import scaling

    def largest(y: torch.Tensor) -> Any:
        return y.abs().amax(-1), 1.0

    with (
        patch.object(scaling, "norms_", largest),
        patch.object(Normalization, "only_scales", False),
    ):
        yield


# -- plan ----------------------------------------------------------------------------------


@bug("no release when a client fails")
@contextmanager
def _withheld() -> Iterator[None]:
    aggregate = DPFedAvg.aggregate_train

    def withheld(self: DPFedAvg, server_round: int, replies: Any) -> Any:
        arrays, metrics = aggregate(self, server_round, replies)
        return (None if self.report is not None and self.report.failed else arrays), metrics

    with patch.object(DPFedAvg, "aggregate_train", withheld):
        yield


@bug("a denominator that counts failures")
@contextmanager
def _counts_failures() -> Iterator[None]:
    release = ServerSum.release

    def divided(self: ServerSum) -> Any:
        made = release(self)
        failed = self.tally.report(self.instructions.round).failed
        return dataclasses.replace(made, mean=made.mean / (1 + 1e-3 * failed))

    with patch.object(ServerSum, "release", divided):
        yield


@bug("a run that stops where updates are large")
@contextmanager
def _stopping() -> Iterator[None]:
    release = Releaser.release

    def stopping(self: Releaser, total: PartialSum, *rest: Any, **named: Any) -> Any:
        grid = total.segments[0].grids["sum"]
        if float((grid.coarse * grid.unit).abs().sum()) > 0.9 * float(self._denominators):
            raise RuntimeError("diverged")
        return release(self, total, *rest, **named)

    with patch.object(Releaser, "release", stopping):
        yield


# -- ledger --------------------------------------------------------------------------------


@bug("every tenth line missing")
def _missing() -> AbstractContextManager[object]:
    record_due = Ledger.record_due

    def changed(self: Ledger, entries: Callable[[], Sequence[Entry]], *budget: Any) -> None:
        def most() -> list[Entry]:
            return [entry for entry in entries() if (entry.round or 0) % 10 != 0]

        record_due(self, most, *budget)

    return patch.object(Ledger, "record_due", changed)


def charged(change: Callable[[Event], Event]) -> AbstractContextManager[object]:
    """Plans whose events say something else than what they release."""
    event = ReleasePlan.event
    return patch.object(ReleasePlan, "event", lambda self: change(event(self)))


@bug("charged at a larger noise multiplier than drawn")
def _flattered() -> AbstractContextManager[object]:
    return charged(lambda e: dataclasses.replace(e, noise_multiplier=1.05 * e.noise_multiplier))


@bug("charged at half the rate")
def _half() -> AbstractContextManager[object]:
    return charged(
        lambda e: dataclasses.replace(e, law=dataclasses.replace(e.law, rate=e.law.rate / 2))
    )


@bug("an accountant that halves epsilon")
@contextmanager
def _lenient() -> Iterator[None]:
    profile, epsilon = Accountant.profile, Accountant.epsilon

    def halved(self: Accountant) -> Any:
        epsilons, deltas = profile(self)
        return epsilons / 2, deltas

    with (
        patch.object(Accountant, "profile", halved),
        patch.object(Accountant, "epsilon", lambda self, delta: epsilon(self, delta) / 2),
    ):
        yield
