"""Two worlds of one seed: the same draws and the same noise, but for what the canary does.

With noise and cohorts equal, the difference of two releases is exact: it is what the canary
added to the sum. In units of the released noise it may be as long as the ledger says, one over
the noise multiplier, and not longer, whatever the canary sends; and nothing else may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import chdtr

from fedsim.audit.checks import Check
from fedsim.audit.deeds import Deed, deeds
from fedsim.audit.faults import Faults
from fedsim.audit.observe import Observation, Parameters, Plan, observe
from fedsim.audit.standard import MeasuredNoise
from fedsim.audit.worlds import Canaries, World, reach, still
from fedsim.privacy import Event
from fedsim.rows import Layout
from fedsim.strategies import DPFedAvg

__all__ = ["pair_checks"]

Floats = npt.NDArray[np.float64]

SLACK = 1e-6
"""Rounding to the grid, and of differences of parameters."""
SEEDS_TRIED = 300
FEW = 3
SEEDS_OF_NUMBERS = 64


@dataclass(frozen=True)
class _Length:
    """How far one deed moved the release, in standard deviations of its noise."""

    deed: str
    moves: float
    numbers: float
    bare: str | None


def pair_checks(plan: Plan, start: Parameters, noise: MeasuredNoise, seed: int) -> list[Check]:
    """Try every deed, and compare with a federation without the canary.

    Parameters
    ----------
    start : mapping of name to Tensor
        The parameters that ``noise`` speaks of.
    noise : MeasuredNoise
        Of releases of the same plan.
    """
    strategy = plan.strategy(seed)
    scale = reach(strategy.mechanism, Layout.of(start))
    seed, rounds = _seed_with_canary(plan, strategy, start, seed)
    pairs = _Pairs(Plan(plan.strategy, rounds), strategy, start, scale, seed)
    numbers = _numbers(pairs)
    faults, lengths = Faults(), []
    tried = deeds(start, scale)
    for deed in tried:
        without, seen = pairs.of(deed)
        faults.compare(f"a canary that {deed.name}", without, seen, pairs.canary)
        if pairs.traceless(deed):
            faults.traceless(f"a canary that {deed.name}", without, seen)
        if pairs.exact(deed):
            lengths.append(_length(deed, without, seen, noise, numbers))
    faults.lonely(pairs.plan, start, strategy, seed)
    faults.slow(pairs.plan, start, strategy, scale, seed)
    faults.malformed(pairs.plan, start, strategy, seed)
    looked = f"{len(tried)} deeds of a canary in round {rounds}, each against none"
    event = strategy.plan.event()
    return [*_bounded(lengths, event, noise, looked), *faults.checks(looked)]


class _Pairs:
    """Runs with and without the canary, the latter once a world."""

    def __init__(
        self, plan: Plan, strategy: DPFedAvg, start: Parameters, scale: float, seed: int
    ) -> None:
        self.plan, self.start, self.seed = plan, start, seed
        self.strategy, self._scale = strategy, scale
        self._without: dict[str, Observation] = {}
        population = strategy.cohort.population
        assert population is not None
        self.population, self.canary = population, population - 1

    def exact(self, deed: Deed) -> bool:
        """Whether noise is the same with and without: a share takes its noise along."""
        return self.strategy.placement == "server" or deed.harmless

    def traceless(self, deed: Deed) -> bool:
        """Whether a canary that does it is as good as none."""
        strategy = self.strategy
        if strategy.placement == "client" or strategy.cohort.adjacency == "replace-one":
            return False
        # Bounds that learn may center rows, or count them.
        plain = not strategy.mechanism.init(Layout.of(self.start))
        plain = plain and not strategy.mechanism.side_names
        return deed.adds == "nothing" or (deed.adds == "zeros" and plain)

    def of(self, deed: Deed) -> tuple[Observation, Observation]:
        """Without and with the canary."""
        if deed.world.name not in self._without:
            self._without[deed.world.name] = self._observe(self._absent(deed.world))
        return self._without[deed.world.name], self._observe(deed.change(self._there(deed.world)))

    def _there(self, world: World, present: bool = True) -> Canaries:
        return world.trainer(
            self.population,
            sum(tensor.numel() for tensor in self.start.values()),
            self._scale,
            present=present,
            neighbour=self.strategy.cohort.adjacency,
            sides=self.strategy.mechanism.side_names,
        )

    def _absent(self, world: World) -> Canaries:
        if self.strategy.placement == "server":
            return self._there(world, present=False)
        # A client that has nothing to add still sends its share of the noise.
        canaries = self._there(world)
        rows = canaries.rows.clone()
        rows[-1] = 0
        return canaries.but(rows=rows)

    def _observe(self, trainer: Canaries) -> Observation:
        return observe(self.plan, trainer, self.start, self.seed)


def _seed_with_canary(
    plan: Plan, strategy: DPFedAvg, start: Parameters, seed: int
) -> tuple[int, int]:
    """A seed with which the last client is asked early, and the first round in which it is."""
    population = strategy.cohort.population
    assert population is not None
    d = Layout.of(start).d
    nobody = still(population, d, strategy.mechanism.side_names)
    for tried in range(seed, seed + SEEDS_TRIED):
        seen = observe(Plan(plan.strategy, min(FEW, plan.rounds)), nobody, start, tried)
        for number, ids in enumerate(seen.asked, start=1):
            if population - 1 in ids:
                return tried, number
    return seed, min(FEW, plan.rounds)


def _numbers(pairs: _Pairs) -> dict[str, float]:
    """Standard deviations over seeds of the numbers shown after the last round.

    Less what the size of the cohort explains: still clients add to a number, too.
    """
    strategy = pairs.strategy
    small = {name: tensor[:2] for name, tensor in pairs.start.items()}
    nobody = still(pairs.population, Layout.of(small).d, strategy.mechanism.side_names)
    rows: list[list[float]] = []
    sizes: list[float] = []
    names: list[str] = []
    for seed in range(SEEDS_OF_NUMBERS):
        seen = observe(pairs.plan, nobody, small, pairs.seed + seed)
        if not seen.shown or not seen.shown[-1]:
            return {}
        names = list(seen.shown[-1])
        rows.append(list(seen.shown[-1].values()))
        sizes.append(seen.sizes[-1])
        if seed == 3 and not np.ptp(rows, axis=0).any():
            return dict.fromkeys(names, 0.0)
    design = np.stack([np.ones(len(sizes)), np.array(sizes) - np.mean(sizes)], axis=1)
    values = np.array(rows)
    residuals = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
    stds = np.sqrt(np.square(residuals).sum(0) / (len(rows) - 2))
    stds[np.ptp(values, axis=0) == 0] = 0.0
    return dict(zip(names, stds.tolist(), strict=True))


def _length(
    deed: Deed,
    without: Observation,
    seen: Observation,
    noise: MeasuredNoise,
    numbers: dict[str, float],
) -> _Length:
    std = noise.of_round(without, len(without.moves) - 1)
    moved = float(np.linalg.norm((seen.moves[-1] - without.moves[-1]) / std))
    farthest, bare = 0.0, None
    before = without.shown[-1] if without.shown else {}
    after = seen.shown[-1] if seen.shown else {}
    for name, std_of_number in numbers.items():
        difference = abs(after.get(name, 0.0) - before.get(name, 0.0))
        if difference > 1e-12 * (1 + abs(before.get(name, 0.0))):
            if std_of_number == 0:
                bare = name
            else:
                farthest = max(farthest, difference / std_of_number)
    return _Length(deed.name, moved, farthest, bare)


def _bounded(
    lengths: Sequence[_Length], event: Event, noise: MeasuredNoise, looked: str
) -> list[Check]:
    """The longest move against what the event allows; noise is known by estimates only."""
    allowed = (2.0 if event.relation == "replace-one" else 1.0) / event.total_noise_multiplier
    checks = []
    longest = max(lengths, key=lambda length: length.moves)
    checks.append(
        Check(
            "bound",
            "what one client moves",
            looked,
            f"{longest.moves:.4g} std of the noise, by one that {longest.deed}",
            f"{allowed:.4g} at most",
            _length_p(longest.moves**2, 0.0, allowed, noise),
        )
    )
    bare = next((length for length in lengths if length.bare), None)
    together = max(lengths, key=lambda length: length.moves**2 + length.numbers**2)
    seen = (
        f"'{bare.bare}' is shown without noise, and moves with one that {bare.deed}"
        if bare
        else f"{np.hypot(together.moves, together.numbers):.4g} std, by one that {together.deed}"
    )
    p = 0.0 if bare else _length_p(together.moves**2, together.numbers**2, allowed, noise)
    if bare or any(length.numbers for length in lengths):
        checks.append(
            Check("bound", "what one client moves, numbers beside included", looked, seen,
                  f"{allowed:.4g} at most", p)
        )  # fmt: skip
    return checks


def _length_p(moves: float, numbers: float, allowed: float, noise: MeasuredNoise) -> float:
    """P-value of a squared length in estimated standard deviations.

    A variance from N values is a chi-square with N degrees over N; of a sum of two terms, the
    degrees are those of the mixture (Satterthwaite).
    """
    total = moves + numbers
    if not total < np.inf:
        return 0.0
    if total == 0:
        return 1.0
    shares = np.array([moves / total, numbers / total])
    degrees = 1 / float((np.square(shares) / [noise.values, SEEDS_OF_NUMBERS - 2]).sum())
    p = float(chdtr(degrees, degrees * allowed**2 * (1 + SLACK) ** 2 / total))
    # The longest move is along the layer whose noise happens to be estimated as smallest.
    return min(1.0, noise.layers * p)
