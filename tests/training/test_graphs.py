"""Captured steps: with a tape in place of a CUDA graph."""

from __future__ import annotations

import logging
from typing import ClassVar

import numpy as np
import pytest
import torch
from clients_helpers import make_data, make_mlp
from cuda_helpers import (
    ALGORITHMS,
    MODELS,
    Reads,
    Tape,
    as_if_on_a_gpu,
    images,
    make_trainer,
    pretend,
    rounds,
)

from fedsim import registry
from fedsim.clients import SGD, AdadpLR, Step
from fedsim.training import graphs
from fedsim.training.graphs import StepGraphs

SIZES = [9, 5, 7, 1, 14, 0, 12, 12, 13, 11, 12]
# Clients that end at different times, in blocks that grow and shrink and come back.
COHORTS = [[0, 1, 4], range(11), range(6), range(11)]


@pytest.mark.spanning
@pytest.mark.parametrize("path", ["layered", "func"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_replayed_steps_are_the_eager_ones_to_the_byte(monkeypatch, path, name):
    found = []
    for tape in (None, Tape()):
        trainer = make_trainer(MODELS[path](), ALGORITHMS[name], images(SIZES), path)
        vector = pretend(trainer.initial())
        trainer = as_if_on_a_gpu(monkeypatch, trainer)
        if tape is not None:
            trainer.stepper.captured_step = StepGraphs(trainer.stepper, tape, 4)
        found.append(rounds(trainer, vector, COHORTS))
        monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert trainer.stepper.captured_step.can_capture
    assert tape.recordings >= len(trainer.stepper.captured_step.graphs) > 0


@pytest.mark.parametrize("name", registry.names("client"))
def test_every_algorithm_of_fedsims_own_can_be_captured(name):
    assert registry.find("client", name, "client.name")(lr=0.1).phase(Step(1, 0)) is not None


@pytest.fixture
def eager(monkeypatch):
    """Makes trainers as on a GPU, and an algorithm's rounds by them."""

    def make(algorithm, sizes=SIZES):
        data = make_data(sizes, features=36)
        trainer = make_trainer(make_mlp(36, 5, 3), algorithm, data, "layered")
        return as_if_on_a_gpu(monkeypatch, trainer)

    return make


@pytest.fixture
def taped(eager):
    """The same, whose steps are captured by a tape."""

    def make(algorithm, sizes=SIZES, tape=None):
        trainer = eager(algorithm, sizes)
        trainer.stepper.captured_step = StepGraphs(trainer.stepper, tape or Tape(), 4)
        return trainer

    return make


def start(trainer):
    return pretend(trainer.initial())


def test_a_later_round_of_the_same_shapes_captures_nothing(taped):
    trainer = taped(SGD(lr=0.1, momentum=0.9))
    recordings = []
    for _ in range(3):  # memory grows in the first, from the narrow batches' clients to the others'
        rounds(trainer, start(trainer), [range(11)])
        recordings.append(trainer.stepper.captured_step.recorder.recordings)
    assert recordings[1] == recordings[2]


class Counts(SGD):
    """Notes for how many clients its steps are computed; promises nothing where asked not to."""

    seen: ClassVar[set[int]] = set()
    promises: ClassVar[bool] = True

    def phase(self, at):
        return "step" if self.promises else None

    def step(self, state, gradient, at):
        self.seen.add(len(state["theta"]))
        super().step(state, gradient, at)


@pytest.mark.parametrize("promises", [True, False])
def test_every_step_is_computed_for_a_whole_block_however_few_clients_are_left(
    promises, taped, monkeypatch
):
    # On a GPU the order of a product's sums follows its shape.
    monkeypatch.setattr(Counts, "promises", promises)
    trainer = taped(Counts(lr=0.1))
    monkeypatch.setattr(Counts, "seen", set())  # it was tried on made-up clients before
    rounds(trainer, start(trainer), [[0], [0, 1, 4], range(4)])
    assert Counts.seen == {4}
    rounds(trainer, start(trainer), [range(11)])
    assert max(Counts.seen) == 12
    assert all(rows % 4 == 0 for rows in Counts.seen)


def test_graphs_are_bounded_in_number_and_the_oldest_goes(eager, taped, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 3)
    plain = eager(SGD(lr=0.1))
    bounded = taped(SGD(lr=0.1))
    expected, got = (rounds(t, start(t), COHORTS) for t in (plain, bounded))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert (
        len(bounded.stepper.captured_step.graphs)
        == 3
        < bounded.stepper.captured_step.recorder.recordings
    )


class Fails(Tape):
    """Cannot capture from a certain time on, and says so when half of the work is done."""

    def __init__(self, good):
        super().__init__()
        self.good = good

    def record(self, work):
        if self.recordings == self.good:
            work()
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(work)


@pytest.mark.spanning
@pytest.mark.parametrize("good", [0, 1, 2, 5])
@pytest.mark.parametrize("algorithm", [SGD(lr=0.2, momentum=0.5), AdadpLR(lr=0.2)])
def test_after_a_capture_that_fails_training_goes_on_without_and_nothing_is_lost(
    algorithm, good, eager, taped, caplog
):
    plain = eager(algorithm)
    tried = taped(algorithm, tape=Fails(good))
    with caplog.at_level(logging.WARNING):
        expected, got = (rounds(t, start(t), COHORTS) for t in (plain, tried))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert not tried.stepper.captured_step.can_capture
    assert not tried.stepper.captured_step.graphs
    assert sum("training without one" in record.message for record in caplog.records) == 1


def test_a_step_that_reads_a_value_back_is_not_captured(taped):
    trainer = taped(Reads(lr=0.1))
    plain = taped(SGD(lr=0.1))
    got, expected = (rounds(t, start(t), COHORTS) for t in (trainer, plain))
    assert not trainer.stepper.captured_step.can_capture
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_an_algorithm_that_promises_nothing_is_not_captured(taped):
    class Warming(SGD):
        def step(self, state, gradient, at):
            gradient.subtract_from(state["theta"], state["lr"] * (at.index + 1))

    trainer = taped(Warming(lr=0.1))
    rounds(trainer, start(trainer), COHORTS)
    assert Warming(lr=0.1).phase(None) is None
    assert trainer.stepper.captured_step.recorder.recordings == 0
    assert trainer.stepper.captured_step.can_capture


class Lambdas(SGD):
    """Makes the functions of its step's numbers in the step, two of them alike."""

    def phase(self, at):
        return "step"

    def step(self, state, gradient, at):
        rate = at.number(lambda s: 1 / (s.round + s.index)) + at.number(lambda s: 0.1 * s.index)
        gradient.subtract_from(state["theta"], state["lr"] * rate)


def test_a_number_whose_function_is_made_in_the_step_follows_the_step(eager, taped):
    plain, captured = eager(Lambdas(lr=0.1)), taped(Lambdas(lr=0.1))
    expected, got = (rounds(t, start(t), COHORTS) for t in (plain, captured))
    # A float multiplies in float32 and a tensor here in float64: the last bit may differ.
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert captured.stepper.captured_step.can_capture
    steps = captured.stepper.captured_step.graphs.values()
    assert {len(step.clock.numbers) for step in steps} == {2}


def test_a_step_that_asks_for_other_numbers_when_it_is_run_again_is_not_captured(eager, taped):
    class Forgets(SGD):
        def phase(self, at):
            return "step"

        def step(self, state, gradient, at):
            runs.append(at)
            if len(runs) % 2 == 0:
                at.number(lambda s: 2.0 * s.index)
            gradient.subtract_from(state["theta"], state["lr"])

    runs = []
    plain, tried = eager(SGD(lr=0.1)), taped(Forgets(lr=0.1))
    expected, got = (rounds(t, start(t), COHORTS) for t in (plain, tried))
    assert not tried.stepper.captured_step.can_capture
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_entries_that_change_places_or_are_one_tensor_stay_what_they_are(eager, taped):
    class Swaps(SGD):
        """Two copies of the parameters that change places, and a name for the first."""

        def init(self, theta, numbers):
            return {**super().init(theta, numbers), "other": theta.clone() + 1, "same": theta}

        def phase(self, at):
            return "step"

        def step(self, state, gradient, at):
            gradient.subtract_from(state["same"], state["lr"])
            assert state["same"] is state["theta"] or torch.equal(state["same"], state["theta"])
            state["theta"], state["other"] = state["other"], state["theta"]
            state["same"] = state["theta"]

    sizes = [12, 12, 12]
    plain = eager(Swaps(lr=0.1), sizes)

    class Again(Tape):
        """Does the work again, checks in Python included."""

        def record(self, work):
            self.recordings += 1
            _, losses = result = work()
            return lambda: losses.copy_(work()[1]), result

    tried = taped(Swaps(lr=0.1), sizes, Again())
    expected, got = (rounds(t, start(t), [range(3)] * 2) for t in (plain, tried))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert tried.stepper.captured_step.recorder.recordings > 0


def test_what_a_round_returned_stays_when_the_next_one_trains(taped):
    trainer = taped(SGD(lr=0.1, momentum=0.9))
    first = next(trainer.train(start(trainer), np.arange(11), 1))
    kept = first.rows.clone()
    next(trainer.train(start(trainer) + 1, np.arange(11), 2))
    assert torch.equal(first.rows, kept)
