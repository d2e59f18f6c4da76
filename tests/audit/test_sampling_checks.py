from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from whitebox.catalogue import DRAWS

from fedsim.audit.findings import Finding, findings
from fedsim.audit.sampling_checks import Sampled, declared_law
from fedsim.cohorts import Cohort, InclusionSampler
from fedsim.privacy import Event
from fedsim.privacy.laws import FixedSizeLaw, PoissonLaw
from fedsim.randomness import Draws

Ids = npt.NDArray[np.int64]
Run = list[Ids]
N, RATE, ROUNDS = 300, 0.2, 80
POISSON = Event(noise_multiplier=1.0, law=PoissonLaw(rate=RATE))
FIXED = Event(noise_multiplier=1.0, law=FixedSizeLaw(size=60, population=N))
FULL = Event(noise_multiplier=1.0)
RISK = 1e-5


def poisson(rng: np.random.Generator, rate: float = RATE) -> Ids:
    return np.flatnonzero(rng.random(N) < rate)


def draw_checks(
    runs: list[Run],
    event: Event,
    population: int,
    probabilities: npt.NDArray[np.float64] | None = None,
) -> list[Finding]:
    sampled = Sampled.from_cohorts(runs, event, population, probabilities=probabilities)
    return findings([(lambda: sampled, DRAWS)])


def refuted(runs: list[Run], event: Event) -> set[str]:
    return {check.name for check in draw_checks(runs, event, N) if check.p_value <= RISK}


def drawn(draw: Callable[[np.random.Generator], Ids], seed: int = 0) -> list[Run]:
    rng = np.random.default_rng(seed)
    return [[draw(rng) for _ in range(ROUNDS)] for _ in range(2)]


def test_honest_draws_raise_no_alarm() -> None:
    for seed in range(10):
        assert not refuted(drawn(poisson, seed), POISSON)
        assert not refuted(drawn(lambda rng: rng.permutation(N)[:60], seed), FIXED)
    assert not refuted(drawn(lambda rng: np.arange(N)), FULL)


def test_a_cohort_that_is_the_one_before_with_other_ids_is_detected() -> None:
    runs = drawn(poisson)
    for run in runs:
        run[1::2] = [(ids + 7) % N for ids in run[::2]]
    assert "rounds after being sampled" in refuted(runs, POISSON)


def test_a_rate_close_to_one_raises_no_alarm() -> None:
    # That two clients are both left out is then so rare that sums of products are not normal.
    event = Event(noise_multiplier=1.0, law=PoissonLaw(rate=0.99))
    for seed in range(30):
        rng = np.random.default_rng(seed)
        runs = [[np.flatnonzero(rng.random(40) < 0.99) for _ in range(100)] for _ in range(6)]
        assert not [check.name for check in draw_checks(runs, event, 40) if check.p_value <= 2e-5]


@pytest.mark.parametrize(("n", "rate", "rounds"), [(10, 0.05, 5), (500, 0.02, 30), (40, 0.5, 20)])
def test_p_values_of_honest_draws_are_not_too_small_too_often(
    n: int, rate: float, rounds: int
) -> None:
    rng = np.random.default_rng(1)
    event = Event(noise_multiplier=1.0, law=PoissonLaw(rate=rate))
    p_values = np.array(
        [
            [
                check.p_value
                for check in draw_checks(
                    [[np.flatnonzero(rng.random(n) < rate) for _ in range(rounds)]], event, n
                )
            ]
            for _ in range(100)
        ]
    )
    assert ((p_values <= 0.02).sum(0) <= 10).all()


def correlated(rng: np.random.Generator) -> Ids:
    uniforms = rng.random(N)
    uniforms[7] = uniforms[3]
    return np.flatnonzero(uniforms < RATE)


def favouring(rng: np.random.Generator) -> Ids:
    uniforms = rng.random(N)
    uniforms[7] /= 2.5
    return np.flatnonzero(uniforms < RATE)


@pytest.mark.parametrize(
    ("draw", "seen_by"),
    [
        (lambda rng: poisson(rng, 2 * RATE), "sizes"),
        (lambda rng: poisson(rng, 1.1 * RATE), "sizes"),
        (lambda rng: rng.permutation(N)[:60], "spread of sizes"),
        (lambda rng: np.arange(60), "inclusion frequencies"),
        (lambda rng: np.arange(60), "overlap of rounds"),
        (correlated, "pairs sampled together"),
        (favouring, "inclusion frequencies"),
        (lambda rng: np.repeat(poisson(rng, RATE), 2), "sampled ids"),
        (lambda rng: poisson(rng) + 1, "sampled ids"),
    ],
    ids=["twice", "a tenth more", "fixed", "the same", "the same, by rounds", "two as one",
         "one more often", "each twice", "strangers"],
)  # fmt: skip
def test_draws_that_are_not_poisson_are_seen(
    draw: Callable[[np.random.Generator], Ids], seen_by: str
) -> None:
    assert seen_by in refuted(drawn(draw), POISSON)


def test_one_draw_used_again_is_seen_in_a_run_and_across_two() -> None:
    runs = drawn(poisson)
    runs[0][40] = runs[0][39]
    assert "overlap of rounds" in refuted(runs, POISSON)
    runs = drawn(poisson)
    runs[1][5] = runs[0][5]
    assert "overlap of rounds" in refuted(runs, POISSON)


def test_waiting_after_being_asked_is_seen() -> None:
    rng = np.random.default_rng(2)
    run, last = [], np.zeros(N, dtype=bool)
    for _ in range(ROUNDS):
        last = (rng.random(N) < RATE / (1 - RATE)) & ~last
        run.append(np.flatnonzero(last))
    assert "rounds after being sampled" in refuted([run], POISSON)


def test_a_fixed_or_full_cohort_of_another_size_is_seen() -> None:
    assert "sizes" in refuted(drawn(poisson), FIXED)
    assert "sizes" in refuted(drawn(lambda rng: np.arange(N - 1)), FULL)


class NightAndDay(InclusionSampler):
    def probabilities(self, round: int) -> npt.NDArray[np.float64]:
        return np.where(np.arange(self.population) % 2 == round % 2, 0.3, 0.1)


def by_probabilities(runs: list[Run], highest: float = 0.3) -> set[str]:
    sampler = NightAndDay(N, highest)
    chances = np.stack([sampler.probabilities(t) for t in range(1, ROUNDS + 1)])
    checks = draw_checks(runs, Event.of(sampler, 1.0), N, chances)
    return {check.name for check in checks if check.p_value <= RISK}


def test_draws_are_held_against_probabilities_that_differ() -> None:
    rng, sampler = np.random.default_rng(4), NightAndDay(N, 0.3)

    def run(change: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]) -> Run:
        return [
            np.flatnonzero(rng.random(N) < change(sampler.probabilities(t)))
            for t in range(1, ROUNDS + 1)
        ]

    honest = [run(lambda p: p) for _ in range(3)]
    assert not by_probabilities(honest)
    assert "sizes" in by_probabilities([run(lambda p: 0 * p + 0.3)])
    again = [*honest[0][:40], honest[0][38], *honest[0][41:]]
    assert "overlap of rounds" in by_probabilities([again])
    together = [np.union1d(np.setdiff1d(ids, [5]), [5] if 3 in ids else []) for ids in honest[0]]
    together += [np.union1d(np.setdiff1d(ids, [5]), [5] if 3 in ids else []) for ids in honest[1]]
    assert "pairs sampled together" in by_probabilities(
        [
            [ids.astype(np.int64) for ids in together[:ROUNDS]],
            [ids.astype(np.int64) for ids in together[ROUNDS:]],
        ]
    )


@dataclass(frozen=True)
class Biased(Cohort):
    """A sampler of a user's, which favours its first client by ``extra``."""

    rate: float = RATE
    population: int | None = 40
    extra: float = 0.0
    name = "biased"

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        chances = np.full(self.population or 0, self.rate)
        chances[0] += self.extra
        return np.flatnonzero(draws.generator(round, step).random(len(chances)) < chances)

    def law(self) -> PoissonLaw:
        return PoissonLaw(rate=self.rate, population=self.population)


@dataclass(frozen=True, kw_only=True)
class WithoutMarginals(PoissonLaw):
    name = "without-marginals"

    def inclusion(self, population: int) -> None:
        return None


class BiasedWithoutMarginals(Biased):
    def law(self) -> WithoutMarginals:
        return WithoutMarginals(rate=self.rate, population=self.population)


@pytest.mark.parametrize("sampler", [Biased, BiasedWithoutMarginals])
def test_a_sampler_of_a_users_is_drawn_from_and_held_against_its_own_law(
    sampler: type[Biased],
) -> None:
    def p_value(extra: float) -> float:
        biased = sampler(extra=extra)
        return declared_law(biased, Event.of(biased, 1.0), 20, seed=1).p_value

    assert p_value(0.0) > RISK
    assert p_value(0.15) <= RISK
    # Drawn less often than the rate, a client only costs less than is charged.
    assert (p_value(-0.15) <= RISK) == (sampler is Biased)


def test_pairs_that_always_come_together_are_held_against_the_declared_probability_of_two() -> None:
    class Couples(Biased):
        def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
            couples = draws.generator(round, step).random((self.population or 0) // 2) < self.rate
            return np.flatnonzero(np.repeat(couples, 2))

    couples = Couples()
    assert declared_law(couples, Event.of(couples, 1.0), 1, seed=1).p_value <= RISK
