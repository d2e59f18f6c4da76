from __future__ import annotations

import numpy as np
import pytest
from planted import (
    RAW,
    CountedTwice,
    LessNoise,
    RealisedCount,
    WeightedByExamples,
    strategies,
)
from slow_cases import slow_but
from whitebox.clients import ALONE, OPPOSED, RARE, Canaries, World, clipped_scale
from whitebox.evidence import ClientEvidence
from whitebox.strategy_audit import audit
from whitebox.target import StrategyTarget

from fedsim.audit import Claim
from fedsim.audit.two_world import distinguish, noticeable
from fedsim.cohorts import Cohort, FixedCohort, FullCohort, PoissonCohort
from fedsim.errors import FedsimError
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    CoordinateClipping,
    Mechanism,
    NoPrivacy,
    Normalization,
    NormBound,
    PerLayer,
    PrivateScalar,
    QuantileClipping,
)
from fedsim.privacy.losses import gaussian_mu
from fedsim.strategies import DPFedAvg

POISSON = PoissonCohort(0.5, 20)


@pytest.mark.parametrize(
    ("bug", "world", "rounds", "runs"),
    slow_but(
        2,
        [
            (LessNoise(1.0), ALONE, 1, 100),
            (WeightedByExamples(1.0), ALONE, 1, 100),
            (CountedTwice(1.0), ALONE, 1, 400),
            (RealisedCount(1.0), OPPOSED, 1, 400),
            (RAW, RARE, 2, 100),
        ],
    ),
    ids=["noise / 5", "example counts", "counted twice", "counted denominator", "raw statistics"],
)
def test_a_planted_bug_is_caught(bug: Mechanism, world: World, rounds: int, runs: int) -> None:
    verdict = audit(
        strategies(bug), rounds=rounds, runs=runs, worlds=(world,), canaries=0, checks=False
    )
    assert not verdict.accepted
    assert verdict.refuting == (world.name,)
    assert "Violation of" in str(verdict)


@pytest.mark.slow
def test_a_planted_bug_is_caught_under_sampling() -> None:
    buggy = strategies(LessNoise(1.0), POISSON)
    assert not audit(buggy, rounds=2, runs=200, worlds=(ALONE,), canaries=0, checks=False).accepted


def test_without_an_attack_the_claim_is_at_the_runs_delta(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ClientEvidence, "checks", lambda self: [])
    verdict = audit(lambda seed: DPFedAvg(
        mechanism=Clipping(1.0), noise_multiplier=1.0, delta=1e-3, cohort=POISSON, seed=seed
    ), rounds=2, worlds=(), canaries=0)  # fmt: skip
    assert verdict.claim.delta == 1e-3


@pytest.mark.slow
def test_every_world_is_tried() -> None:
    verdict = audit(strategies(LessNoise(1.0)), runs=80, canaries=0, checks=False)
    assert verdict.refuting == ("alone", "opposed", "rare")
    assert verdict.risk == pytest.approx(0.01 / 3)


@pytest.mark.parametrize(
    "mechanism",
    slow_but(
        2,
        [
            QuantileClipping(target_quantile=0.5, bit_noise=0.2),
            AdaClip(1.0),
            PrivateScalar(Clipping(1.0), name="loss", high=4.0, fraction=0.3),
            Clipping(0.1),
            NormBound(28.0),
            Normalization(1.0),
            Normalization(1.0, smoothing=0.01),
            AdaClip(h2=1.0, literal=True),
            AdaptiveNoise(clip_norm=1.0, threshold=0.0, beta=3.0),
            CoordinateClipping(0.5),
            PerLayer(Clipping(1.0)),
        ],
    ),
    ids=lambda mechanism: str(mechanism)[:30],
)
def test_every_mechanism_is_accepted(mechanism: Mechanism) -> None:
    verdict = audit(strategies(mechanism), rounds=2, runs=30, canaries=0, checks=False)
    assert verdict.accepted
    assert verdict.epsilon_bound <= verdict.claim.epsilon


@pytest.mark.spanning
@pytest.mark.parametrize(
    "cohort",
    [
        POISSON,
        FixedCohort(5, 20),
        FullCohort(10),
        FullCohort(10, adjacency="replace-one"),
    ],
    ids=lambda cohort: f"{cohort.name} {cohort.adjacency}",
)
@pytest.mark.parametrize("placement", ["server", "client"])
def test_every_cohort_and_placement_is_accepted(cohort: Cohort, placement: str) -> None:
    verdict = audit(
        strategies(Clipping(1.0), cohort, placement=placement),
        runs=30,
        worlds=(ALONE, OPPOSED),
        canaries=20,
        checks=False,
    )
    assert verdict.accepted
    assert verdict.claim.adjacency == cohort.adjacency
    assert "No violation of" in str(verdict)


@pytest.mark.parametrize(
    ("mechanism", "sensitivity"),
    [
        (Clipping(0.1), 0.1),
        (Normalization(2.0), 2.0),
        (QuantileClipping(initial_clip_norm=3.0), 3.0),
        (AdaClip(1.5), 1.5),
        (AdaptiveNoise(clip_norm=1.0, threshold=0.0, beta=3.0), 1.0),
        (CoordinateClipping(0.5), 0.5 * 8**0.5),
        (PerLayer(Clipping(1.0)), 2**0.5),
    ],
)
@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_the_canary_moves_the_sum_as_far_as_any_client_can(
    mechanism: Mechanism, sensitivity: float, adjacency: str
) -> None:
    # Were it weaker, a bug would have room to hide.
    plan = StrategyTarget(strategies(mechanism, FullCohort(10, adjacency=adjacency), z=1e-9))
    scale = clipped_scale(mechanism, plan.layout)
    means = [
        plan.observe(
            ALONE.trainer(10, 8, scale, present=present, neighbour=adjacency, sides=()),
            seed=1,
        ).moves[0]
        for present in (False, True)
    ]
    moved = 10 * np.linalg.norm(means[1] - means[0])
    expected = sensitivity * (2 if adjacency == "replace-one" else 1)
    assert moved == pytest.approx(expected, rel=1e-3)


def test_one_run_of_many_rounds_stays_under_the_claim() -> None:
    honest = strategies(Clipping(1.0), FullCohort(400), z=8 / 5**0.5)
    verdict = audit(honest, rounds=20, worlds=(), canaries=400, checks=False)
    assert verdict.accepted
    assert verdict.claim.epsilon == pytest.approx(5.680, abs=0.005)
    assert 0.5 < verdict.attacks[-1].epsilon_bound < verdict.claim.epsilon


def test_one_run_proves_more_than_the_claim_where_noise_is_too_small() -> None:
    buggy = strategies(LessNoise(1.0), FullCohort(400), z=2.5)
    verdict = audit(buggy, worlds=(), canaries=400, checks=False)
    assert verdict.refuting == ("one run",)
    assert verdict.claim.epsilon == pytest.approx(1.555, abs=0.005)
    assert verdict.attacks[-1].epsilon_bound > verdict.claim.epsilon


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [PoissonCohort(0.8, 300), FixedCohort(250, 300)])
def test_one_run_follows_each_cohorts_neighbours(cohort: Cohort) -> None:
    def run(mechanism: Mechanism) -> bool:
        return audit(
            strategies(mechanism, cohort, z=3.0), worlds=(), canaries=300, checks=False
        ).accepted

    assert run(Clipping(1.0))
    assert not run(LessNoise(1.0)) or cohort.name == "fixed"


def test_the_one_run_may_be_another_plan() -> None:
    cohort = FullCohort(64)
    whole = StrategyTarget(strategies(Clipping(1.0), cohort, z=10.0), rounds=10)
    verdict = audit(
        strategies(Clipping(1.0), cohort),
        runs=20,
        worlds=(ALONE,),
        canaries=512,
        one_run=whole,
        checks=False,
    )
    assert verdict.attacks[-1].finding.examined == "64 canaries, each in or out by a coin"
    assert (verdict.claim.releases, verdict.attacks[-1].claim.releases) == (1, 10)


def test_ideal_attacks_at_the_claim_raise_no_false_alarm_and_beyond_it_are_caught() -> None:
    claim, rng = Claim.gaussian(1.25), np.random.default_rng(3)

    def p_value(mu: float) -> float:
        present = mu + rng.standard_normal((1000, 1, 1))
        without = rng.standard_normal((1000, 1, 1))
        return distinguish("", without, present, np.ones(1), claim, 0.01).finding.p_value

    assert sum(p_value(1.25) <= 0.01 for _ in range(20)) == 0
    assert sum(p_value(2.5) <= 0.01 for _ in range(20)) == 20


def test_runs_in_which_every_round_failed_are_seen_too() -> None:
    # A cohort of the canary alone, which is not there: the model stays as it is.
    strategy = strategies(Clipping(1.0), PoissonCohort(0.5, 2))
    verdict = audit(strategy, rounds=2, runs=30, worlds=(ALONE,), canaries=0, checks=False)
    box = verdict.attacks[0].box
    assert box is not None
    assert box.trials == 15


def test_the_same_seed_gives_the_same_verdict() -> None:
    def run(seed: int) -> object:
        return audit(
            strategies(Clipping(1.0)), runs=30, worlds=(ALONE,), canaries=8, seed=seed, checks=False
        )

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_more_runs_notice_smaller_bugs() -> None:
    claim = Claim.gaussian(1.0)
    few, many = (noticeable(claim, runs, 0.01, seed=1) for runs in (60, 2000))
    assert many is not None
    assert many <= 1.5
    assert few is None or few > many


def test_a_claim_of_epsilon_alone_is_held_against_its_own_gaussian() -> None:
    # One pair allows more than the whole curve of a Gaussian that satisfies it.
    pair, whole = Claim((), 1e-5, 0.5), Claim.gaussian(gaussian_mu(0.5, 1e-5))
    factors = [noticeable(claim, 200, 0.01, seed=1) for claim in (pair, whole)]
    assert None not in factors
    assert factors[0] >= factors[1] > 3


def test_canaries_send_the_same_rows_in_any_block() -> None:
    trainer = ALONE.trainer(600, 8, 5.0, present=True, neighbour="zero-out", sides=("loss",))
    ids = np.arange(600)
    blocks = list(trainer.train(trainer.rows[0], ids, 1))
    assert np.concatenate([block.client_ids for block in blocks]).tolist() == ids.tolist()
    assert blocks[-1].rows is not None
    assert blocks[-1].rows[-1].tolist() == [5.0] * 8
    assert blocks[-1].metrics["num-examples"][-1] == 1000
    assert sum(float(block.rows.abs().sum()) for block in blocks if block.rows is not None) == 40


def test_absence_is_what_the_adjacency_says() -> None:
    def trainer(neighbour: str) -> Canaries:
        return ALONE.trainer(4, 2, 1.0, present=False, neighbour=neighbour, sides=())

    assert trainer("add-remove").population == 3
    assert trainer("zero-out").ok.tolist() == [True, True, True, False]
    assert trainer("replace-one").rows[-1].tolist() == [-1.0, -1.0]


def test_impossible_audits_are_refused() -> None:
    with pytest.raises(FedsimError, match="no claim to audit"):
        audit(
            strategies(NoPrivacy("uniform"), z=0.0),
            runs=20,
            worlds=(ALONE,),
            canaries=0,
            checks=False,
        )
    with pytest.raises(FedsimError, match="confidence is 1"):
        audit(strategies(Clipping(1.0)), confidence=1.0)
    with pytest.raises(FedsimError, match="canaries is -5; it must be at least 0"):
        audit(strategies(Clipping(1.0)), worlds=(), canaries=-5)
    with pytest.raises(FedsimError, match="runs is 5"):
        audit(strategies(Clipping(1.0)), runs=5)
    with pytest.raises(FedsimError, match="population is 1"):
        audit(strategies(Clipping(1.0), FullCohort(1)), runs=20)
    with pytest.raises(FedsimError, match="neither a world nor a canary"):
        audit(strategies(Clipping(1.0)), worlds=(), canaries=0, checks=False)
