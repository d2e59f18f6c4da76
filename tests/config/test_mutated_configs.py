"""Thousands of configs with one mistake each: accepted, or one sentence that names the key."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from slow_cases import slow_but

from fedsim.config import RunConfig
from fedsim.config.describe import keys
from fedsim.errors import FedsimError

WRONG_TYPES: tuple[Any, ...] = (
    True, False, 0, 1, -1, 2**63, -(2**70), 10**40, 0.5, -0.5, 1e-300, 1e300, float("nan"),
    float("inf"), "", " ", "x", "none", "1", "1.0", "nan", "true", "a,b", "a=1", "(", "top-k(k=",
    "mlp", "module:Name", ":", "os:system", "../x", "x" * 20_000, "\0", "\n", "é", [], [1], ["x"],
    [[1, 2], [3]], {}, {"name": "x"}, {"a": {"b": 1}}, None, b"x", object(), 3 + 4j,
)  # fmt: skip


def flat_defaults(rng: random.Random) -> dict[str, Any]:
    """A config as Flower has it, of some choices."""
    changes: dict[str, Any] = {}
    if rng.random() < 0.5:
        changes |= {"model.name": "mlp", "model.widths": "8"}
    if rng.random() < 0.5:
        changes |= {"cohort.name": "poisson", "cohort.rate": 0.5}
    if rng.random() < 0.5:
        changes |= {"mechanism.name": rng.choice(["clipping", "adaclip"]), "noise.multiplier": 1.0}
    if rng.random() < 0.3:
        changes |= {"client.name": rng.choice(["adam", "adadp-lr", "scaffold"])}
    if rng.random() < 0.3:
        changes |= {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}
    return changes


def misspelt(key: str, rng: random.Random) -> str:
    """A name that is nearly a key's."""
    *tables, last = key.split(".")
    at = rng.randrange(len(last))
    last = rng.choice(
        [last[:at] + last[at + 1 :], last[:at] + "z" + last[at:], last.upper(), f"{last}s",
         last.replace("-", "_"), f"{last}.more", ""]
    )  # fmt: skip
    return ".".join([*tables, last])


def mutations(rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    names = sorted({key.name for key in keys()})
    for name in names:
        for value in WRONG_TYPES:
            yield name, flat_defaults(rng) | {name: value}
        for _ in range(4):
            number = rng.choice([-1, 1]) * 10 ** rng.uniform(-12, 40)
            yield name, flat_defaults(rng) | {name: rng.choice([number, int(number)])}
        wrong = misspelt(name, rng)
        yield wrong, flat_defaults(rng) | {wrong: rng.choice(WRONG_TYPES)}
    for table in {name.rpartition(".")[0] for name in names} - {""}:
        for value in WRONG_TYPES:
            yield table, {table: value}


def sentence_of(key: str, changes: dict[str, Any]) -> str:
    """What refuses a config; empty where it is accepted."""
    try:
        config = RunConfig.from_run_config(changes)
    except FedsimError as error:
        return str(error)
    assert RunConfig.from_run_config(config.to_run_config()) == config, key
    return ""


@pytest.mark.parametrize("every", slow_but(1, [10, 1]))
def test_a_config_with_a_mistake_is_refused_in_one_sentence_that_names_a_key(every: int) -> None:
    rng = random.Random(1)
    known = {key.name for key in keys()} | {key.name.rpartition(".")[0] for key in keys()}
    count = refused = 0
    for key, changes in islice(mutations(rng), 0, None, every):
        sentence = sentence_of(key, changes)
        count += 1
        if not sentence:
            continue
        refused += 1
        assert "\n" not in sentence, (key, sentence)
        assert sentence.endswith("."), (key, sentence)
        assert len(sentence) < 2500, (key, sentence)
        named = key in sentence or key.rpartition(".")[0] in sentence or "unknown key" in sentence
        assert named or any(other in sentence for other in known - {""}), (key, sentence)
    assert count > 5000 / every
    assert refused > count / 2
