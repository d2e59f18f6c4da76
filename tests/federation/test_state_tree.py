"""State: a run that is taken up elsewhere ends with the same bytes as one that was not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fixed_clients import Fixed
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi

from fedsim.clients.schedules import Schedule
from fedsim.cohorts import Cohort, FullCohort, PoissonCohort
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.optimizers import Scheduled
from fedsim.federation.state_tree import join_tree, split_tree
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    Mechanism,
    NoPrivacy,
    PerLayer,
    PrivateScalar,
    QuantileClipping,
)
from fedsim.privacy import Ledger
from fedsim.privacy.laws import FullLaw
from fedsim.randomness import Randomness
from fedsim.server_optimizers import ServerOptimizer
from fedsim.strategies import DPFedAvg, RunFailedError, adam, sgd

D, CLIENTS = 30, 20
UPDATES = torch.randn(CLIENTS, D, generator=torch.Generator().manual_seed(1))


def initial() -> ArrayRecord:
    return array_record({"a": torch.zeros(3, 4), "b": torch.ones(18)})


def grid() -> LocalGrid:
    return LocalGrid(Fixed(UPDATES))


OPTIMIZERS = {
    "sgd": lambda: sgd(1.0),
    "momentum": lambda: sgd(0.7, 0.9),
    "adam": lambda: adam(0.05),
    "FedAdam": lambda: FedAdam(eta=0.1),
    "FedAvgM": lambda: FedAvgM(server_momentum=0.9),
    "FedYogi": lambda: FedYogi(eta=0.1),
    "FedAdagrad": lambda: FedAdagrad(eta=0.1),
}

MECHANISMS: dict[str, Mechanism] = {
    "quantile": QuantileClipping(initial_clip_norm=0.2, bit_noise=0.2),
    "adaclip": AdaClip(clip_norm=0.2),
    "adaptive": AdaptiveNoise(clip_norm=1.0, beta=1.0, threshold=0.0),
    "layers": PerLayer(QuantileClipping(initial_clip_norm=0.2, bit_noise=0.2)),
    "scalar": PrivateScalar(AdaClip(clip_norm=0.2), name="loss", high=2.0),
}

CASES = [(name, "quantile") for name in OPTIMIZERS] + [("momentum", name) for name in MECHANISMS]


def strategy(optimizer: str, mechanism: str, ledger: Path | None = None) -> DPFedAvg:
    return DPFedAvg(
        mechanism=MECHANISMS[mechanism],
        cohort=PoissonCohort(0.4, CLIENTS),
        noise_multiplier=1.0,
        seed=4,
        server_optimizer=OPTIMIZERS[optimizer](),
        ledger=ledger,
    )


def run(made: DPFedAvg, arrays: ArrayRecord, rounds: int, **resumed) -> tuple[ArrayRecord, list]:
    trainer = Fixed(UPDATES)
    result = made.start(LocalGrid(trainer), arrays, rounds, **resumed)
    return result.arrays, trainer.rounds


def through_a_file(state) -> dict:
    """What a checkpoint does to it: tensors and text, and nothing else."""
    kept, text = split_tree(state)
    assert all(isinstance(tensor, torch.Tensor) for tensor in kept.values())
    json.loads(text)
    return join_tree(kept, text)


def as_bytes(arrays: ArrayRecord) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors(arrays).items()}


@pytest.mark.parametrize(("optimizer", "mechanism"), CASES)
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_run_taken_up_by_another_strategy_ends_with_the_same_bytes(
    optimizer, mechanism, on_disk, tmp_path
):
    paths = [tmp_path / name if on_disk else None for name in ("whole", "parts")]
    whole = strategy(optimizer, mechanism, paths[0])
    expected, asked = run(whole, initial(), 6)
    half = strategy(optimizer, mechanism, paths[1])
    reached, first = run(half, initial(), 3)
    state = through_a_file(half.state())
    rest = strategy(optimizer, mechanism, paths[1])
    rest.check(initial())  # as a run does before anything is written
    ended, second = run(rest, reached, 6, state=state)
    assert as_bytes(ended) == as_bytes(expected)
    assert first + second == asked
    assert rest.privacy_spent() == whole.privacy_spent()
    assert rest.privacy_spent().num_releases == 6


def test_to_go_on_without_the_state_is_refused():
    reached, _ = run(strategy("momentum", "quantile"), initial(), 3)
    with pytest.raises(FedsimError, match=r"first_round is 4, but 0 rounds .* state= "):
        run(strategy("momentum", "quantile"), reached, 6, first_round=4)


def test_a_strategy_goes_on_with_its_own_state_and_starts_no_second_run():
    whole, made = strategy("adam", "adaclip"), strategy("adam", "adaclip")
    expected, _ = run(whole, initial(), 6)
    reached, _ = run(made, initial(), 3)
    ended, _ = run(made, reached, 6, first_round=4)
    assert as_bytes(ended) == as_bytes(expected)
    with pytest.raises(FedsimError, match="has done 6 rounds; a new run needs a new one"):
        run(made, initial(), 6)
    # Flower's own loop starts at round 1 always.
    with pytest.raises(ValueError, match="drawn twice"):
        super(DPFedAvg, made).start(grid(), initial(), 3)


def test_a_state_is_refused_with_another_ledger_model_or_past(tmp_path):
    half = strategy("sgd", "quantile", tmp_path / "ledger.jsonl")
    reached, _ = run(half, initial(), 3)
    state = half.state()
    with pytest.raises(FedsimError, match="does not hold the releases that"):
        run(strategy("sgd", "quantile", tmp_path / "another.jsonl"), reached, 6, state=state)
    with pytest.raises(FedsimError, match="has done 3 rounds; state= needs a new strategy"):
        run(half, reached, 6, state=state)
    other = array_record({"a": torch.zeros(30)})
    with pytest.raises(FedsimError, match="state= is of a model with other parameters"):
        run(strategy("sgd", "quantile", tmp_path / "ledger.jsonl"), other, 6, state=state)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("adam", "momentum", r"exp_avg_sq \[30\] of the server optimiser; .* hold velocity \[30\]"),
        (
            "momentum",
            "adam",
            r"velocity \[30\] of the server optimiser; .* hold step \[\], exp_avg",
        ),
        ("momentum", "sgd", r"velocity \[30\] of the server optimiser; .* must hold nothing"),
        ("FedAdam", "sgd", "rounds .* of the server optimiser"),
        ("sgd", "FedAdam", "state= is not what DPFedAvg.state"),
    ],
)
def test_a_state_of_another_server_optimiser_is_refused(before, after, sentence):
    half = strategy(before, "quantile")
    reached, _ = run(half, initial(), 3)
    with pytest.raises(FedsimError, match=sentence):
        run(strategy(after, "quantile"), reached, 6, state=half.state())


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_state_of_other_tensors_than_are_kept_is_refused(scheduled):
    def made() -> DPFedAvg:
        optimizer = adam(0.05)
        if scheduled:
            optimizer = Scheduled(optimizer, Schedule.parse("cosine(length=9)"))
        return DPFedAvg(
            mechanism=AdaClip(0.2),
            cohort=PoissonCohort(0.4, CLIENTS),
            noise_multiplier=1.0,
            seed=4,
            server_optimizer=optimizer,
        )

    half = made()
    reached, _ = run(half, initial(), 3)
    state = half.state()
    made().restore(state)
    cut = {name: value[:5] if value.ndim else value for name, value in state["mechanism"].items()}
    edited = {
        "mechanism": [{}, cut, {**state["mechanism"], "clip_norm": torch.tensor(1.0)}],
        "optimizer": [
            {**state["optimizer"], "exp_avg": torch.zeros(5)},
            {k: v for k, v in state["optimizer"].items() if k != "exp_avg"},
        ],
        "parameters": [None, [["a", [30], "torch.float32"], ["b", [30], "torch.float32"]]],
        "round": [-1],
    }
    for key, wrongs in edited.items():
        for wrong in wrongs:
            with pytest.raises(FedsimError, match="state= h"):
                run(made(), reached, 6, state={**state, key: wrong})


class Unwilling(ServerOptimizer):
    """An optimiser that cannot resume its state."""

    def step(self, vector, update):
        return vector + update

    def state(self):
        return {"steps": 3}

    def restore(self, state) -> None:
        if state["steps"] != 3:
            raise RuntimeError("other steps")


def test_a_restore_that_fails_half_way_leaves_the_strategy_as_it_was():
    def made() -> DPFedAvg:
        return DPFedAvg(
            mechanism=QuantileClipping(initial_clip_norm=0.2, bit_noise=0.2),
            cohort=Spaced(CLIENTS),
            noise_multiplier=1.0,
            seed=4,
            server_optimizer=Unwilling(),
        )

    half = made()
    reached, cohorts = run(half, initial(), 3)
    whole = half.state()
    for wrong in ({"optimizer": {"steps": 4}}, {"failures": {}}, {"ledger": {"head": "0"}}):
        second = made()
        for _ in range(2):
            with pytest.raises(FedsimError, match="state"):
                second.restore({**whole, **wrong})
        other = made()
        other.begin(second.run)  # the same random id
        assert split_tree(second.state())[1] == split_tree(other.state())[1]
        assert not second.ledger.entries
        ended, asked = run(second, initial(), 3)
        assert as_bytes(ended) == as_bytes(reached)
        assert asked == cohorts


def test_a_state_may_be_given_on_before_the_next_round():
    half = strategy("momentum", "layers")
    reached, _ = run(half, initial(), 3)
    between = strategy("momentum", "layers")
    between.restore(through_a_file(half.state()))
    rest = strategy("momentum", "layers")
    ended, _ = run(rest, reached, 6, state=through_a_file(between.state()))
    expected, _ = run(strategy("momentum", "layers"), initial(), 6)
    assert as_bytes(ended) == as_bytes(expected)


def test_a_budget_that_was_reached_stays_reached():
    def made() -> DPFedAvg:
        return DPFedAvg(
            mechanism=Clipping(1.0),
            cohort=PoissonCohort(0.4, CLIENTS),
            noise_multiplier=1.0,
            seed=4,
            max_epsilon=4.0,
        )

    first, second = made(), made()
    reached, _ = run(first, initial(), 30)
    assert first.stopped is not None
    again, asked = run(second, reached, 60, state=through_a_file(first.state()))
    assert not asked
    assert as_bytes(again) == as_bytes(reached)
    assert second.stopped == first.stopped


def test_failed_rounds_in_a_row_are_counted_on():
    failing = LocalGrid(Fixed(UPDATES, failing=tuple(range(CLIENTS))))

    def made() -> DPFedAvg:
        return DPFedAvg(mechanism=NoPrivacy("uniform"), cohort=PoissonCohort(0.9, CLIENTS), seed=4)

    half, rest = made(), made()
    half.start(failing, initial(), 2)
    with pytest.raises(RunFailedError, match="in 3 rounds in a row, the last of them round 3"):
        rest.start(failing, initial(), 6, state=through_a_file(half.state()))


def test_a_tree_comes_back_from_tensors_and_text_as_it_was():
    tree = {
        "tensor": torch.arange(3),
        "deep": {"x": {"tensor": torch.zeros(0)}, "y": {}},
        "numbers": [1, 2.5, None, True, 1e-310],
        "word": "0",
        "array": np.arange(2.0),
    }
    kept, text = split_tree(tree)
    back = join_tree(kept, text)
    assert torch.equal(back["tensor"], tree["tensor"])
    assert back["tensor"].dtype == torch.int64
    assert back["deep"]["x"]["tensor"].shape == (0,)
    assert isinstance(back["array"], np.ndarray)
    assert back["array"].tolist() == [0.0, 1.0]
    assert {k: back[k] for k in ("numbers", "word")} == {k: tree[k] for k in ("numbers", "word")}
    for bad in ({"f": print}, {1: 2}, {"x": {"tensor": "0"}}, {"x": {"array": "0"}}):
        with pytest.raises(TypeError):
            split_tree(bad)


class Spaced(Cohort):
    """Three clients of those who were asked least often, as a trace remembers it."""

    name, expected_size = "apart", 3.0

    def __init__(self, population: int) -> None:
        self.population = population
        self.asked = np.zeros(population, dtype=np.int64)
        self.last = -1

    def draw(self, round, draws, step=0):
        order = draws.generator(round).permutation(self.population)
        ids = np.sort(order[np.argsort(self.asked[order], kind="stable")][:3])
        self.asked[ids] += 1
        self.last = round
        return ids

    def law(self) -> FullLaw:
        return FullLaw(population=self.population)

    def state(self):
        return {"asked": self.asked, "last": self.last}

    def restore(self, state) -> None:
        self.asked, self.last = state["asked"], state["last"]


@pytest.mark.parametrize("remembers", [True, False])
def test_a_sampler_goes_on_from_what_it_remembers(remembers, monkeypatch):
    shared = Spaced(CLIENTS)
    if not remembers:
        monkeypatch.setattr(Spaced, "restore", lambda self, state: None)

    def made() -> DPFedAvg:
        return DPFedAvg(mechanism=Clipping(1.0), cohort=shared, noise_multiplier=1.0, seed=4)

    half, rest = made(), made()
    expected, asked = run(made(), initial(), 6)
    reached, first = run(half, initial(), 3)
    state = through_a_file(half.state())
    ended, second = run(rest, reached, 6, state=state)
    assert (first + second == asked) is remembers
    assert (as_bytes(ended) == as_bytes(expected)) is remembers
    # Every strategy draws with a sampler of its own: the one it was given has seen nothing.
    assert not shared.asked.any()
    assert isinstance(state["cohort"]["asked"], np.ndarray)


def test_a_state_of_another_sampler_and_what_is_no_sampler_are_refused():
    half = strategy("sgd", "quantile")
    reached, _ = run(half, initial(), 3)
    state = {**half.state(), "cohort": {"asked": np.zeros(3)}}
    with pytest.raises(FedsimError, match="holds asked of a sampler, but Poisson has no state"):
        run(strategy("sgd", "quantile"), reached, 6, state=state)

    class Forgetful:
        population = 4

        def law(self):
            return FullLaw(population=4)

    with pytest.raises(FedsimError, match=r"cohort is .*Forg.* must be an object of fedsim"):
        DPFedAvg(mechanism=Clipping(1.0), cohort=Forgetful(), noise_multiplier=1.0)


@pytest.mark.parametrize("release", [None, "of a config"])
def test_a_round_that_is_made_again_is_the_same_or_has_noise_of_its_own(
    release: str | None, tmp_path: Path
) -> None:
    edited = UPDATES.clone()
    edited[7] = 0

    def made(seed: int | None) -> DPFedAvg:
        ledger = tmp_path / f"{seed}.jsonl"
        return DPFedAvg(
            mechanism=Clipping(1.0),
            cohort=FullCohort(CLIENTS),
            noise_multiplier=5.0,
            seed=Randomness(seed, release),
            ledger=ledger,
        )

    for seed in (1, None):
        half = made(seed)
        reached, _ = run(half, initial(), 2)
        state = half.state()
        run(half, reached, 3, first_round=3)
        again = made(seed)
        run(again, reached, 3, state=state)
        other = made(seed)
        if seed is not None:
            assert [line.round for line in again.ledger.entries] == [1, 2, 3]
        # A log is cut back, whatever the data are now; evidence has a line for each time.
        other.start(LocalGrid(Fixed(edited)), reached, 3, state=state)
        lines = Ledger.read(tmp_path / f"{seed}.jsonl").entries
        assert [line.round for line in lines] == [1, 2, 3, *([] if seed is not None else [3, 3])]


def test_the_runs_id_is_random_and_outside_the_hash(tmp_path) -> None:
    heads, runs = set(), set()
    for name in ("one", "two"):
        path = tmp_path / name / "ledger.jsonl"
        path.parent.mkdir()
        run(strategy("sgd", "quantile", path), initial(), 2)
        ledger = Ledger.read(path)
        heads.add(ledger.head)
        runs |= {line.run for line in ledger.entries}
    assert len(heads) == 1
    assert len(runs) == 2
