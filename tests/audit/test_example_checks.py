from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from whitebox import local_training
from whitebox.local_training import ExampleEvidence, TrainerTarget

from fedsim.audit.findings import findings
from fedsim.mechanisms import AdaClip, Clipping, Mechanism, NoiseSource, PerLayer
from fedsim.mechanisms.partial import PartialSum
from fedsim.privacy.laws.poisson import draw_poisson
from fedsim.privacy.local_work import LocalWork
from fedsim.randomness import Purpose, Randomness
from fedsim.training import ExamplePrivacy

WORK = LocalWork(6, epochs=1)
RISK = 1e-5


def refuted(mechanism: Mechanism, sampling: str = "poisson", work: LocalWork = WORK) -> set[str]:
    privacy = ExamplePrivacy(mechanism, 1.5, sampling=sampling)
    target = TrainerTarget.smaller(privacy, work, 36, 512)
    checks = findings(ExampleEvidence.of(target, rounds=5, worlds=40, seed=2).checks())
    return {check.name for check in checks if check.p_value <= RISK}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "sampling", "work"),
    [
        (Clipping(1.0), "poisson", WORK),
        (Clipping(1.0), "shuffle", WORK),
        (Clipping(1.0), "poisson", LocalWork(0, steps=2)),
    ],
    ids=["poisson", "shuffle", "full batch"],
)
def test_local_training_that_is_as_it_should_be_is_accepted(
    mechanism: Mechanism, sampling: str, work: LocalWork
) -> None:
    assert not refuted(mechanism, sampling, work)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [PerLayer(Clipping(1.0)), AdaClip()])
def test_layers_of_their_own_and_bounds_that_adapt_are_accepted(mechanism: Mechanism) -> None:
    assert not refuted(mechanism)


def test_an_example_that_is_in_no_batch_is_tested_with_another_seed_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    privacy = ExamplePrivacy(Clipping(1.0), 1.5)
    target = TrainerTarget.smaller(privacy, LocalWork(3, epochs=1), 12, 512)
    names = ("what else leaves a round", "what one example moves")
    with monkeypatch.context() as one_seed:
        one_seed.setattr(local_training, "SEEDS_TRIED", 1)
        each = (ExampleEvidence.of(target, rounds=5, worlds=40, seed=k) for k in range(1000))
        absent = next(runs for runs in each if runs._canary_batch is None)
        omitted = findings(absent.checks(), *names)
    runs = ExampleEvidence.of(target, rounds=5, worlds=40, seed=absent.seed)
    assert findings(runs.checks(), "a line for every round")
    assert "neighbours" not in vars(runs)  # they are made only for their own checks
    assert [check.tested for check in findings(runs.checks(), *names)] == [True, True]
    moved = float(runs.neighbours.moved.measured.split()[0])
    assert moved == pytest.approx(2 / 3, rel=0.02)
    assert [(check.name, check.tested) for check in omitted] == [(name, False) for name in names]
    assert "in no batch" in omitted[0].measured


def test_noise_that_clients_share_is_caught() -> None:
    privacy = ExamplePrivacy(PerLayer(Clipping(1.0)), 1.5)
    target = TrainerTarget.smaller(privacy, WORK, 36, 512)
    generator = Randomness.generator

    def of_first_client(self: Randomness, purpose: Purpose, **address: Any) -> Any:
        return generator(self.for_replay(), purpose, **{**address, "client": 0})

    for plant, seen in (
        (nullcontext(), False),
        (patch.object(Randomness, "generator", of_first_client), True),
    ):
        with plant:
            evidence = ExampleEvidence.of(target, rounds=5, worlds=40, seed=2)
            (check,) = findings(evidence.checks(), "noise of another client")
        assert check.refutes(RISK) == seen


@contextmanager
def less_noise() -> Iterator[None]:
    normal = NoiseSource.normal
    with patch.object(NoiseSource, "normal", lambda self, size: 0.9 * normal(self, size)):
        yield


@contextmanager
def same_noise() -> Iterator[None]:
    with patch.object(
        NoiseSource, "normal", lambda self, size: np.random.default_rng(1).standard_normal(size)
    ):
        yield


@contextmanager
def twice_the_rate() -> Iterator[None]:
    def drawn(samplers, *rest):
        return draw_poisson([replace(s, rate=2 * s.rate) for s in samplers], *rest)

    with patch("fedsim.training.batches.draw_poisson", drawn):
        yield


@contextmanager
def counted_twice() -> Iterator[None]:
    add = PartialSum.add_owners

    def added(self, rows, weights, counts, owners=slice(None), **rest):
        add(self, rows, weights, counts, owners, **rest)
        add(self, rows, weights, counts, owners, **rest)

    with patch.object(PartialSum, "add_owners", added):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "seen_by"),
    [
        (less_noise, "what one example moves"),
        (same_noise, "exact repeats"),
        (twice_the_rate, "sizes"),
        (counted_twice, "what each example adds"),
    ],
)
def test_a_bug_in_local_training_is_caught(bug, seen_by: str) -> None:
    with bug():
        assert seen_by in refuted(Clipping(1.0))
