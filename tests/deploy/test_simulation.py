"""Flower's simulation: a client that ends its process costs nobody else's reply."""

from __future__ import annotations

import pytest
from flwr.simulation.ray_transport import ray_actor

from fedsim.deploy.simulation import replace_dead_actors


class Pool(ray_actor.BasicActorPool):
    """Of actors that are names."""

    def __init__(self, actors: list[str]) -> None:
        self.pool, self._future_to_actor = list(actors), {}
        self.create_actor_fn = lambda: "new"


def test_an_actor_that_died_is_replaced_and_one_that_raised_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = pytest.importorskip("ray")
    fetch = ray_actor.BasicActorPool.fetch_result_and_return_actor_to_pool
    # Put back when the test ends, whatever replaces it.
    monkeypatch.setattr(ray_actor.BasicActorPool, "fetch_result_and_return_actor_to_pool", fetch)
    replace_dead_actors()
    replace_dead_actors()
    results = {
        "fine": ("0", "reply", "context"),
        "raised": ValueError("the client's own"),
        "died": ray.exceptions.ActorDiedError(),
    }

    def get(future: str) -> tuple[str, str, str]:
        result = results[future]
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(ray_actor.ray, "get", get)
    for outcome, left in [("fine", "actor"), ("raised", "actor"), ("died", "new")]:
        pool = Pool(["other", "actor"])
        future = pool.submit(lambda actor, *job, outcome=outcome: outcome, (None, None, "0", None))
        try:
            pool.fetch_result_and_return_actor_to_pool(future)
        except Exception:  # as Flower's backend does it
            pool.add_actor_back_to_pool(future)
        assert pool.pool == ["other", left]
