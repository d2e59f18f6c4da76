from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from toy_clients import ToyTrainer

from fedsim.federation.engines.dispatch import MAX_CHUNKS_PER_WORKER, chunks

costs_of = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(costs=costs_of, workers=st.integers(1, 8), largest=st.integers(1, 20))
def test_chunks_hold_every_client_once_longest_first(costs, workers, largest):
    ids = np.arange(100, 100 + len(costs))
    cost_of = dict(zip(ids.tolist(), costs, strict=True))
    cut = chunks(ids, np.array(costs, dtype=float), workers=workers, largest=largest)
    flat = [cost_of[client] for chunk in cut for client in chunk.tolist()]
    assert flat == sorted(costs, reverse=True)
    assert sorted(np.concatenate(cut).tolist()) == ids.tolist()
    assert max(map(len, cut)) <= largest


@given(costs=costs_of, workers=st.integers(1, 8))
def test_free_workers_finish_within_two_clients_or_a_small_share_of_each_other(costs, workers):
    ids = np.arange(len(costs))
    busy = [0.0] * workers
    for chunk in chunks(ids, np.array(costs, dtype=float), workers=workers, largest=1000):
        busy[int(np.argmin(busy))] += sum(costs[client] for client in chunk.tolist())
    share = sum(costs) / (MAX_CHUNKS_PER_WORKER * workers)
    assert max(busy) - min(busy) <= max(costs) + max(max(costs), share)


@given(clients=st.integers(1, 5000), workers=st.integers(1, 64))
def test_the_number_of_chunks_follows_from_the_workers(clients, workers):
    cut = chunks(np.arange(clients), np.ones(clients), workers=workers, largest=clients)
    assert len(cut) <= 14 * workers


def test_chunks_for_gpus_are_whole_blocks_but_for_the_last():
    costs = np.arange(100.0, 0.0, -1.0)
    cut = chunks(np.arange(100), costs, workers=2, largest=100, smallest=48)
    assert [*map(len, cut)] == [48, 48, 4]


def test_a_trainer_that_does_not_know_its_steps_has_equal_clients():
    assert ToyTrainer().costs(np.array([3, 1])).tolist() == [1.0, 1.0]
