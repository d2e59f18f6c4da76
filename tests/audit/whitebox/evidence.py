"""Evidence for an audit's checks: whole runs with synthetic clients, made when needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from whitebox import catalogue
from whitebox.bound_checks import MeasuredNoise, Scale, changes_shape, in_units, length_finding
from whitebox.clients import (
    NUMBERS,
    clipped_scale,
    failing_clients,
    one_coordinate_each,
    several_canaries,
)
from whitebox.neighbouring_runs import ClientNeighbours
from whitebox.plan_checks import NoiseOnly, equal_sum_runs
from whitebox.target import Observation, StrategyTarget, Target, parameters

from fedsim.array_types import Floats
from fedsim.audit.claim import Claim
from fedsim.audit.findings import Finding, SampleChecks, invariant
from fedsim.audit.noise_checks import NoiseSample, presence
from fedsim.audit.sampling_checks import Sampled
from fedsim.cohorts import Cohort, InclusionSampler
from fedsim.errors import FedsimError
from fedsim.privacy import Event
from fedsim.privacy.laws import Participation
from fedsim.privacy.plan import is_user_code

MAX_ROUNDS = 1000
SILENT_RUNS = 2
SMALL_MODEL_RUNS, FEW_PARAMETERS = 4, 8
MIN_RELEASES = 4 * FEW_PARAMETERS
"""With fewer releases the likelihood ratio of a small model is not yet a chi-square."""
MEDIUM_PARAMETERS = 512
FEW_ROUNDS = 3
SCRIPTED_ROUNDS = 20
RESUMED_ROUNDS = 6
SYSTEM_ROUNDS, DEEP_SYSTEM_ROUNDS = 1000, 10_000
"""Numbers of releases with system entropy: enough to find repeats among about 2^16 seeds."""
SEEDS_TRIED = 20_000
"""Number of seeds tried for a cohort with the canary: a rate of 1e-4 needs several thousand."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Runs of one target.

    Two runs with different seeds and silent clients show noise and cohorts, and runs of a smaller
    model show more cohorts. Others repeat the first seed with clients that each move a coordinate
    of their own: the difference from the silent run is what each client added.

    Parameters
    ----------
    target : Target
    seed : int
    deep : bool
        Whether to make many more releases with system entropy.
    """

    target: Target
    seed: int
    deep: bool = False

    def checks(self) -> Iterator[SampleChecks]:
        """Samples and checks for any target; only `presence` if a round has no noise."""
        row = self.target.row
        yield lambda: self.units, catalogue.PRESENCE
        if not self.present:
            return
        if self.silent_release_is_noise:
            yield lambda: self.noise, catalogue.NOISE
            yield lambda: self.small_noise, catalogue.FEW_COORDINATES
        if self.silent_release_is_noise and self.in_layers:
            yield lambda: self.grid, catalogue.LOW_BITS
        yield lambda: self.system_noise, catalogue.SYSTEM_NOISE
        yield lambda: self.added, catalogue.bound(f"what each {row} adds")
        yield lambda: self.several, catalogue.bound(f"what several {row}s add")
        yield lambda: self.failing, catalogue.FAILURES

    @cached_property
    def runs(self) -> list[Observation]:
        """Runs in which all clients send zeros."""
        nobody = self.target.silent_clients()
        runs = [self.target.observe(nobody, self.seed + k) for k in range(SILENT_RUNS)]
        if isinstance(runs[0].error, FedsimError):
            raise runs[0].error
        return runs

    @cached_property
    def _noise(self) -> tuple[Floats, Floats]:
        both = zip(*(in_units(run, self.target) for run in self.runs), strict=True)
        units, steps = (np.stack(parts) for parts in both)
        return units, steps

    @property
    def units(self) -> Floats:
        """Noise of these runs in the units of `in_units`, ``[runs, rounds, d]``."""
        return self._noise[0]

    @cached_property
    def measured(self) -> MeasuredNoise:
        """Measured size of their noise."""
        return MeasuredNoise.of(self.units, self.target.columns)

    @cached_property
    def present(self) -> bool:
        """Whether every round has noise."""
        return presence(self.units).p_value > 0

    @cached_property
    def in_layers(self) -> bool:
        """Whether every layer has noise, in which lengths can be measured."""
        return self.present and bool(self.measured.stds.all())

    @property
    def silent_release_is_noise(self) -> bool:
        """Whether releases are noise alone, once what zero rows add is subtracted."""
        return True

    @property
    def noise(self) -> NoiseSample:
        """These runs' noise, scaled to standard normals."""
        stds = self.measured.stds
        # A layer without noise is scaled like the others, so that its zeros are found.
        z = self.units / np.where(stds > 0, stds, np.median(stds))
        sizes = np.stack([run.sizes for run in self.runs])
        return NoiseSample.from_noise(z, self.target.columns, sizes)

    @cached_property
    def grid(self) -> NoiseSample | None:
        """These releases in grid steps, without rows of NaN."""
        steps = self._noise[1]
        rows = steps.reshape(-1, steps.shape[-1])
        rows = rows[np.isfinite(rows).all(-1)]
        examined = f"{len(rows)} releases of {rows.shape[-1]:,} coordinates"
        return NoiseSample(rows[None], self.target.columns, examined) if len(rows) else None

    @cached_property
    def _small(self) -> tuple[Target, list[Observation]]:
        few = self.target.with_model(parameters(FEW_PARAMETERS))
        number = max(SMALL_MODEL_RUNS, -(-MIN_RELEASES // len(self.runs[0].moves)))
        seeds = range(self.seed + SILENT_RUNS, self.seed + SILENT_RUNS + number)
        return few, [few.observe(few.silent_clients(), seed) for seed in seeds]

    @property
    def small_noise(self) -> NoiseSample:
        """Noise of a model with few parameters."""
        few, runs = self._small
        return NoiseSample.from_noise(
            np.stack([in_units(run, few)[0] for run in runs]), few.columns
        )

    @cached_property
    def moving(self) -> list[Observation]:
        """Runs in which each client moves one coordinate of its own, if there are enough.

        They have the seeds of `runs`; one run is enough if cohorts are visible.
        """
        target, scale = self.target, clipped_scale(self.target.mechanism, self.target.layout)
        clients = one_coordinate_each(target.population, target.layout.d, scale, target.sides)
        number = 1 if target.row == "client" else SILENT_RUNS
        return [target.observe(clients, self.seed + k) for k in range(number)]

    @property
    def added(self) -> Finding:
        """Each client's coordinate shows what it added: at most one row."""
        moving = self.moving[0]
        rounds = 1 if changes_shape(moving.states) else len(moving.moves)
        silent = max(0, self.target.population - self.target.layout.d)
        compared = ((moving, index, index + 1) for index in range(rounds))
        return self._added(
            compared, f"{rounds} rounds, each {self.target.row} on its own coordinate", silent
        )

    @property
    def several(self) -> Finding:
        """What several canaries at once add, with rows of many lengths."""
        target, layout, mechanism = self.target, self.target.layout, self.target.mechanism
        radius = Scale.from_mechanism(mechanism, mechanism.init(layout), layout).radius
        rounds, turns = target.rounds, 1
        if changes_shape(self.runs[0].states) or target.adapts or self.target.row == "example":
            # Later rounds depend on earlier releases, so that several first rounds are made.
            rounds, turns = 1, SCRIPTED_ROUNDS
        runs = []
        for turn in range(turns):
            clients = several_canaries(target.population, radius, target.sides, turn)
            runs.append(target.with_rounds(rounds).observe(clients, self.seed))
        compared = [
            (run, t, t + 1 + n) for n, run in enumerate(runs) for t in range(len(run.moves))
        ]
        examined = f"{len(compared)} rounds of 1 to all {self.target.row}s at once, of .5 to 5 C"
        return self._added(compared, examined)

    def _distance(self, quiet: Observation, loud: Observation, index: int) -> Floats:
        """Difference of two runs of one seed in a round, in std of the noise, ``[d]``."""
        # An adaptive bound scales the same noise differently in the two runs: each has its unit.
        without, moved = (
            run.moves[index] / self.measured.of_round(run, index, self.target)
            for run in (quiet, loud)
        )
        return np.asarray(np.abs(moved - without))

    def _added(
        self, compared: Iterable[tuple[Observation, int, int]], examined: str, silent: int = 0
    ) -> Finding:
        """Finding on the most that a client added to its own coordinate, in std of the noise.

        Parameters
        ----------
        compared : iterable of (run, index, number of a round)
            Rounds that are compared with the first run of silent clients.
        silent : int
            Number of clients, those with the lowest ids, that have no coordinate.
        """
        allowed = 1 / self.target.event.total_noise_multiplier
        most, whose = 0.0, f"no {self.target.row}"
        for moving, index, number in compared:
            added = self._distance(self.runs[0], moving, index)
            others = np.ones(len(added), dtype=np.bool_)
            ids = moving.sampled[index] - silent
            others[ids[(ids >= 0) & (ids < len(added))]] = False
            if len(ids) and added[others].max(initial=0.0) > 1e-3 * allowed:
                fault = f"a client that was not sampled in round {number} moved the model"
                return invariant(examined, fault, "only sampled clients do")
            if not added.max() <= most:  # not `>`: NaN must count
                most = float(added.max())
                whose = f"{self.target.row} {int(added.argmax()) + silent} in round {number}"
        return length_finding(examined, most, whose, allowed, self.measured)

    @property
    def failing(self) -> Mapping[str, Floats] | None:
        """Releases with several failing clients, by way of failing."""
        target = self.target.with_model(parameters(FEW_PARAMETERS))
        if target.shares:
            return None
        failures: dict[str, float | None] = {"raises": None} if self.target.row == "client" else {}
        failures |= {"sends NaN": np.nan, "sends an infinity": np.inf}
        if not target.adapts and not target.sides:
            # Then sending zeros must have the same effect as failing.
            failures["sends zeros"] = 0.0
        rounds, turns = (1, len(NUMBERS)) if self.target.row == "example" else (SCRIPTED_ROUNDS, 1)
        target = target.at_most(rounds)
        moves: dict[str, list[Floats]] = {failure: [] for failure in failures}
        for failure, row in failures.items():
            for turn in range(turns):
                clients = failing_clients(
                    target.population, FEW_PARAMETERS, target.sides, row, turn
                )
                moves[failure].append(target.observe(clients, self.seed).moves)
        return {failure: np.concatenate(parts) for failure, parts in moves.items()}

    @cached_property
    def _system(self) -> list[Observation]:
        total = DEEP_SYSTEM_ROUNDS if self.deep else SYSTEM_ROUNDS
        target = self.target.at_most(MAX_ROUNDS).with_model(parameters(FEW_PARAMETERS))
        first = target.observe(target.silent_clients(), None)
        more = max(2, -(-total // len(first.moves))) - 1
        return [first, *(target.observe(target.silent_clients(), None) for _ in range(more))]

    @property
    def system_noise(self) -> tuple[Floats, str, set[str]]:
        """Releases with system entropy, a description, and the entropy that ledgers record."""
        moves = np.concatenate([run.moves for run in self._system])
        examined = f"{len(moves):,} rounds of {len(self._system)} runs"
        return moves, examined, {entry.entropy for run in self._system for entry in run.entries}


@dataclass(frozen=True, eq=False)
class ClientEvidence(Evidence):
    """Runs of a strategy, whose cohorts are visible."""

    target: StrategyTarget

    def checks(self) -> Iterator[SampleChecks]:
        """Samples and checks for any target, and for a strategy's ledger, cohorts and canaries."""
        yield from super().checks()
        yield lambda: ([*self.runs, *self.moving], self.target.plan), catalogue.LINES
        yield lambda: (self.claim, self.seed), catalogue.CLAIM
        if self.present:
            yield lambda: self.sampled, catalogue.DRAWS
            yield lambda: self.participation, catalogue.PARTICIPATIONS
            yield lambda: self.resumed, catalogue.RESUME
            yield lambda: self.declared_law, catalogue.DECLARED_LAW
            # Two runs of one seed, whose clients send different rows.
            yield lambda: (self.runs[0], self.moving[0]), catalogue.SAME_COHORTS
            yield lambda: self.system_cohorts, catalogue.SYSTEM_COHORTS
        if self.in_layers:
            yield lambda: self.equal_sums, catalogue.NOTHING_BUT_SUMS
            yield from self._checks_of_canaries()

    def _checks_of_canaries(self) -> Iterator[SampleChecks]:
        moved = catalogue.moved_by("client")
        if self._canary_round is None:
            yield catalogue.omitted_checks(
                (*catalogue.CANARIES, *moved, *catalogue.TOGETHER, *catalogue.LEAVES),
                f"{min(FEW_ROUNDS, self.target.rounds)} rounds with each of {SEEDS_TRIED:,} seeds",
                "the canary, which is the last client, is never sampled",
            )
            return
        yield lambda: self.canaries, catalogue.CANARIES
        yield lambda: self.canaries.moved, moved
        yield lambda: self.canaries.moved_together, catalogue.TOGETHER
        yield lambda: self.noise_only, catalogue.LEAVES

    @property
    def claim(self) -> Claim:
        """Claim of all rounds together."""
        return Claim((self.target.event.over_rounds(self.target.rounds),), self.target.delta)

    @cached_property
    def sampled(self) -> Sampled:
        """Cohorts of all these runs."""
        target, cohort, chances = self.target, self.target.plan.sampler, None
        if isinstance(cohort, InclusionSampler):
            chances = np.stack([cohort.probabilities(t) for t in range(1, target.rounds + 1)])
        cohorts = [run.sampled for run in (*self.runs, *self._small[1])]
        return Sampled.from_cohorts(cohorts, target.event, target.population, probabilities=chances)

    @property
    def participation(self) -> tuple[Sampled, Participation] | None:
        """These cohorts, and the rounds that a client can be in; None if the plan limits none."""
        plan = self.target.plan.sampler.participation(self.target.rounds)
        limited = plan.participations < plan.rounds and not self.sampled.fault
        return (self.sampled, plan) if limited else None

    @property
    def declared_law(self) -> tuple[Cohort, Event, int, int] | None:
        """A sampler that fedsim does not ship, to draw from; None for fedsim's own."""
        cohort = self.target.plan.sampler
        if isinstance(cohort, InclusionSampler) or not is_user_code(cohort):
            return None
        return cohort, self.target.event, self.target.rounds, self.seed

    @property
    def resumed(self) -> tuple[Observation, Observation]:
        """A run that is stopped half way and resumed, and the same run without a stop."""
        few, whole = self.target.at_most(RESUMED_ROUNDS), self.runs[0]
        if few.rounds < 2:
            return whole, whole
        nobody, half = few.silent_clients(), few.rounds // 2
        return few.observe(nobody, self.seed, resume_after=half), whole

    @property
    def system_cohorts(self) -> tuple[Sequence[bytes], int, float]:
        """Cohorts of the runs with system entropy, the population, and the sampling rate.

        If a sampler's rounds depend on each other (groups that take turns, for one), a cohort may
        return in the same run, and is counted once in it.
        """
        population = self.target.population
        runs = [[np.sort(ids).tobytes() for ids in run.sampled] for run in self._system]
        if self.target.plan.sampler.law().inclusion(population) is None:
            runs = [list(dict.fromkeys(run)) for run in runs]
        cohorts = [cohort for run in runs for cohort in run]
        return cohorts, population, self.target.plan.denominator / population

    @cached_property
    def _canary_round(self) -> tuple[StrategyTarget, int] | None:
        """Target up to the first round that samples the last client, and the seed for that.

        None if it is in no round of any seed tried.
        """
        few = self.target.at_most(FEW_ROUNDS)
        for seed in range(self.seed, self.seed + SEEDS_TRIED):
            # The cohorts alone, since a rare client takes many seeds and a run is expensive.
            participants = few.strategy(seed).participants
            for number in range(1, few.rounds + 1):
                if few.population - 1 in participants.cohort(number):
                    target = few.with_rounds(number)
                    if few.population - 1 in target.observe(few.silent_clients(), seed).sampled[-1]:
                        return target, seed
        return None

    @cached_property
    def noise_only(self) -> NoiseOnly:
        """Outputs of runs in which all clients send zeros, with one round more."""
        assert self._canary_round is not None
        target, seed = self._canary_round
        return NoiseOnly.of(target.with_rounds(target.rounds + 1), seed)

    @cached_property
    def canaries(self) -> ClientNeighbours:
        """Runs with each behaviour of a canary, compared with runs without one."""
        assert self._canary_round is not None
        target, seed = self._canary_round
        neighbours = ClientNeighbours(target, seed)
        neighbours.try_behaviours(self.measured, self.noise_only.stds(target.rounds - 1))
        neighbours.fail_with_others()
        neighbours.be_slow()
        neighbours.send_messages()
        return neighbours

    @property
    def equal_sums(self) -> tuple[Observation, Observation]:
        """Runs of two federations with different rows and the same sums."""
        target, seed = self._canary_round or (self.target.at_most(FEW_ROUNDS), self.seed)
        return equal_sum_runs(target.with_rounds(target.rounds + 1), seed)
