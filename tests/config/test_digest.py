from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fedsim import RunConfig
from fedsim.config.release_keys import keys_outside_release, release_digest
from fedsim.errors import FedsimError
from fedsim.privacy.digest import digest_of
from fedsim.runs.resolve import resolve

# What DESIGN's third guarantee names, and what is like it.
OUTSIDE = {
    "name",
    "title",
    "rounds",
    "data.dir",
    "data.download",
    "data.test",
    "client.block-size",
    "client.state-dir",
    "client.noise.chunk",
    "noise.max-epsilon",
    "noise.ledger-key",
    "client.noise.max-epsilon",
    "secagg.simulate",
    "server.max-failed-rounds",
}
RESOLVED = RunConfig().replace(**{"noise.entropy": "config"})


def test_every_key_that_a_resume_may_change_is_marked_in_its_declaration() -> None:
    for key in RESOLVED.to_run_config():
        marked = key in OUTSIDE or key.split(".")[0] in (
            "evaluate",
            "checkpoint",
            "stop",
            "log",
            "privacy",
            "engine",
        )
        assert (key in keys_outside_release()) == marked, key


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"data.normalize": True},
        {"partition.clients": 50},
        {"model.dtype": "float64"},
        {"client.lr": 0.2},
        {"client.momentum": 0.5},
        {"cohort.name": "poisson"},
        {"mechanism.name": "clipping", "noise.multiplier": 1.0},
        {"mechanism.name": "clipping", "noise.multiplier": 2.0},
        {"mechanism.name": "clipping", "noise.multiplier": 1.0, "mechanism.clip-norm": 2.0},
        {"noise.hardened": False},
        {"client.path": "plain"},
        {"server.lr": 0.5},
        {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0},
        {},
    ],
    ids=str,
)
def test_what_determines_a_release_changes_the_digest_and_nothing_else_does(
    change: dict[str, Any],
) -> None:
    config = RESOLVED.replace(**change)
    digest = release_digest(config)
    assert (digest == release_digest(RESOLVED)) == (not change)
    operational: dict[str, Any] = {
        "name": "other",
        "rounds": 99,
        "data.dir": "elsewhere",
        "client.block-size": 7,
        "client.state-dir": "kept",
        "client.noise.chunk": 8,
        "evaluate.every": 0,
        "engine.name": "ray",
        "engine.workers": 3,
        "server.max-failed-rounds": 9,
    }
    assert release_digest(config.replace(**operational)) == digest


@dataclass(frozen=True, init=False, kw_only=True)
class LaterConfig(RunConfig):
    """A config of a version with one more key."""

    later: int = 7


def test_a_key_that_comes_or_goes_at_its_default_changes_no_digest() -> None:
    later = LaterConfig.parse(RESOLVED.to_tree())
    assert later.to_run_config()["later"] == 7
    assert release_digest(later) == release_digest(RESOLVED)
    assert release_digest(later.replace(later=8)) != release_digest(RESOLVED)


@pytest.mark.parametrize(
    ("config", "content"),
    [
        (RESOLVED, set()),
        (
            RESOLVED.replace(**{"client.lr": 0.2, "adapter.name": "lora"}),
            {"client.lr", "adapter.name"},
        ),
        (
            RESOLVED.replace(
                **{"mechanism.name": "clipping", "mechanism.clip-norm": 1.0, "noise.multiplier": 2}
            ),
            {"mechanism.name", "noise.multiplier"},
        ),
        (
            RESOLVED.replace(**{"model.name": "mlp", "model.widths": "8"}),
            {"model.name", "model.widths"},
        ),
        (
            RESOLVED.replace(**{"model.name": "m:Mine", "model.options.width": 8}),
            {"model.name", "model.options"},
        ),
    ],
)
def test_a_digest_is_of_the_keys_that_are_not_at_their_defaults(
    config: RunConfig, content: set[str]
) -> None:
    flat = config.to_run_config()
    assert release_digest(config) == digest_of({key: flat[key] for key in content})


@pytest.mark.parametrize(
    ("key", "value"),
    [("noise.delta", 1e-6), ("client.noise.delta", 1e-6), ("noise.entropy", "system")],
)
def test_what_changes_no_released_value_is_outside_the_digest_also_if_a_resume_must_keep_it(
    key: str, value: float | str
) -> None:
    assert release_digest(RESOLVED.replace(**{key: value})) == release_digest(RESOLVED)
    assert key not in keys_outside_release()


@pytest.mark.parametrize("level", ["", "client."])
def test_resolving_twice_changes_nothing_and_a_calibration_stands_for_its_result(level) -> None:
    config = RunConfig().replace(
        **{
            "partition.clients": 7,
            "rounds": 20,
            f"{level}mechanism.name": "clipping",
            f"{level}noise.target-epsilon": 5.0,
            "client.batch-size": 50,
        }
    )
    resolved = resolve(config)
    once = resolved.config
    again = resolve(once)
    assert again.config == once
    assert again.release == resolved.release
    assert (once.noise.target_epsilon, once.client.noise.target_epsilon) == (None, None)
    multipliers = once.noise.multiplier or 0.0, once.client.noise.multiplier or 0.0
    assert max(multipliers) > 0
    assert again.plan.noise.multiplier == resolved.plan.noise.multiplier == multipliers[0]
    # More rounds of the resolved config are the same release, of the calibrated one they are not.
    assert resolve(once.replace(rounds=30)).release == resolved.release
    assert resolve(config.replace(rounds=30)).release != resolved.release


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mechanism.name": "clipping", "noise.target-epsilon": 1.0}, "noise.target-epsilon is 1"),
    ],
)
def test_a_config_that_is_not_resolved_has_no_digest(change: dict[str, Any], named: str) -> None:
    with pytest.raises(FedsimError, match=named):
        release_digest(RESOLVED.replace(**change))


@dataclass
class Settings:
    lr: float = 1.0
    hidden: float = field(default=0.0, init=False)


class Plain:
    def __init__(self, lr: float) -> None:
        self.lr, self.child = lr, object()


def test_a_digest_is_of_settings_and_neither_of_state_nor_of_addresses() -> None:
    used = Settings()
    used.hidden = 3.0
    assert digest_of({"a": used}) == digest_of({"a": Settings(1)})
    assert digest_of({"a": Settings(2.0)}) != digest_of({"a": Settings(1.0)})
    assert digest_of({"a": Plain(1.0)}) == digest_of({"a": Plain(1.0)})
    assert digest_of({"a": Plain(1.0)}) != digest_of({"a": Plain(2.0)})
    assert digest_of({"a": np.ones(2)}) != digest_of({"a": np.zeros(2)})
    assert digest_of({"a": digest_of}) == digest_of({"a": digest_of})
    assert digest_of({"a": 1, "b": None}) == digest_of({"b": None, "a": 1.0})


def test_a_digest_is_the_same_in_another_process() -> None:
    script = (
        "from fedsim import RunConfig; from fedsim.config.release_keys import release_digest;"
        "print(release_digest(RunConfig().replace(**{'noise.entropy': 'config'})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == release_digest(RESOLVED)
