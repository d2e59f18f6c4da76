"""What a client's ledger takes for one release, and what for another."""

from __future__ import annotations

import importlib
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from clients_helpers import make_data, make_mlp
from torch import nn

from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.privacy import ClientLedgers, Ledger, epsilon
from fedsim.privacy.laws import Poisson
from fedsim.randomness import Randomness
from fedsim.tasks import CrossEntropy
from fedsim.training import ClientData, ExamplePrivacy, Trainer

CONFIG = Randomness(1, "d" * 64)
"""What a config's runs draw from: a seed and a release digest."""


def trainer(
    directory: Path | None,
    *,
    model: nn.Module | None = None,
    randomness: Randomness = CONFIG,
    mean: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    seed: int = 0,
    max_epsilon: float | None = None,
    momentum: float = 0.0,
    run: str = "a run",
    **settings: object,
) -> Trainer:
    data = make_data([20, 7], seed=seed)
    privacy = ExamplePrivacy(
        Clipping(0.5), 1.0, ledger_dir=directory, delta=1e-5, max_epsilon=max_epsilon
    )
    made = Trainer(
        model or make_mlp(),
        SGD(lr=0.3, momentum=momentum),
        ClientData(data.x, data.y, data.indices, mean, mean, mask),
        batch_size=5,
        steps=4,
        randomness=randomness,
        privacy=privacy,
        **settings,
    )
    if randomness.release is not None:
        made.join(run)
    return made


def train(made: Trainer, vector: torch.Tensor | None = None, round: int = 1) -> torch.Tensor:
    start = made.initial() if vector is None else vector
    return made.fit(start, np.array([0]), round).theta


def charged(directory: Path) -> int:
    return len(Ledger.read(directory / "client-0.jsonl").charged)


def refused(made: Trainer, vector: torch.Tensor | None = None) -> None:
    """A client does not go through a round of a run again with the noise of another release."""
    with pytest.raises(FedsimError, match=r"round 1 of client 0 was recorded .* another sum"):
        train(made, vector)


def scaled(scale: float):
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return scale * CrossEntropy()(outputs, targets)

    return loss


def where_counted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return CrossEntropy()(outputs, targets.clamp_min(0)) * (targets >= 0)


def frozen(value: float) -> nn.Module:
    model = make_mlp()
    model[1].weight.requires_grad_(False)
    model[1].weight.data.fill_(value)
    return model


def tanh() -> nn.Module:
    model = make_mlp()
    model[2] = nn.Tanh()
    return model


def test_a_run_that_is_resumed_from_its_config_is_charged_once(tmp_path):
    thetas = [train(trainer(tmp_path)) for _ in range(3)]
    assert torch.equal(thetas[0], thetas[2])
    assert charged(tmp_path) == 1
    # Another run is charged, whatever it repeats.
    assert torch.equal(train(trainer(tmp_path, run="another run")), thetas[0])
    assert charged(tmp_path) == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda d: trainer(d, mean=torch.full((1,), 2.0)),
        lambda d: trainer(d, model=tanh()),
        lambda d: trainer(d, model=frozen(0.1)),
        lambda d: trainer(d, seed=1),
        lambda d: trainer(d, path="plain"),
        lambda d: trainer(d, randomness=Randomness(2, "d" * 64)),
        lambda d: trainer(d, randomness=Randomness(1, "e" * 64)),
        lambda d: trainer(d, randomness=Randomness(None, "d" * 64)),
    ],
    ids=["normalize", "structure", "frozen", "data", "path", "seed", "digest", "entropy"],
)
def test_different_releases_are_never_charged_once(tmp_path, other):
    train(trainer(tmp_path, mean=torch.full((1,), 1.0)))
    again = other(tmp_path)
    if again.randomness.entropy == "system" or again.randomness.release != CONFIG.release:
        train(again)
        assert charged(tmp_path) == 2
    else:
        refused(again)
        assert charged(tmp_path) == 1
    again = other(tmp_path)
    again.join("another run")
    before = charged(tmp_path)
    train(again)
    assert charged(tmp_path) == before + 1


def test_frozen_parameters_of_another_value_are_another_release(tmp_path):
    train(trainer(tmp_path, model=frozen(0.1)))
    refused(trainer(tmp_path, model=frozen(0.7)))
    train(trainer(tmp_path, model=frozen(0.1)))
    assert charged(tmp_path) == 1


def test_a_loss_whose_body_was_edited_makes_another_release(tmp_path, monkeypatch):
    file = tmp_path / "loss_of_mine.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    thetas = []
    for scale in (1.0, 2.0, 1.0):
        file.write_text(
            "from fedsim.tasks import CrossEntropy\n"
            f"def loss(outputs, targets): return CrossEntropy()({scale} * outputs, targets)\n"
        )
        monkeypatch.delitem(sys.modules, "loss_of_mine", raising=False)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        importlib.invalidate_caches()
        loss = importlib.import_module("loss_of_mine").loss
        thetas.append(train(trainer(None, loss=loss)))
        if scale == 2.0:
            refused(trainer(tmp_path, loss=loss))
        else:
            train(trainer(tmp_path, loss=loss))
    assert not torch.equal(thetas[0], thetas[1])
    assert torch.equal(thetas[0], thetas[2])
    assert charged(tmp_path) == 1


def test_which_targets_count_is_part_of_a_release(tmp_path):
    counted = torch.ones(27, dtype=torch.bool)
    thetas = []
    for first in (True, False, True):
        counted[:10] = first
        thetas.append(train(trainer(None, mask=counted.clone(), loss=where_counted)))
        made = trainer(tmp_path, mask=counted.clone(), loss=where_counted)
        train(made) if first else refused(made)
    assert not torch.equal(thetas[0], thetas[1])
    assert charged(tmp_path) == 1


def test_what_came_in_is_part_of_a_release(tmp_path):
    made = trainer(tmp_path)
    train(made)
    refused(made, made.initial() + 1)
    train(made, round=2)
    assert charged(tmp_path) == 2
    refused(trainer(tmp_path), made.initial() + 1)
    assert charged(tmp_path) == 2


@pytest.mark.parametrize(
    "second", [{}, {"loss": scaled(2.0)}, {"model": tanh()}, {"mean": torch.ones(1)}]
)
def test_without_a_config_two_trainers_never_make_the_same_release(tmp_path, second):
    # The bodies of two losses of one name differ, and nothing would show it.
    first = {"loss": scaled(1.0)} if "loss" in second else {}
    for settings in (first, second):
        train(trainer(tmp_path, randomness=Randomness(1), **settings))
    assert charged(tmp_path) == 2


def test_what_others_keep_is_no_part_of_a_release(tmp_path):
    made = [trainer(tmp_path, state="client", momentum=0.9) for _ in "ab"]
    made[0].fit(made[0].initial(), np.array([1]), 1)
    for one in made:  # client 1 has kept something in the first of these alone
        one.fit(one.initial(), np.array([0]), 1)
    assert charged(tmp_path) == 1


def test_without_a_config_a_retry_of_one_trainer_is_charged_once(tmp_path):
    made = trainer(tmp_path, randomness=Randomness(1))
    for _ in range(2):
        train(made)
    assert charged(tmp_path) == 1


def test_with_system_entropy_every_release_is_charged(tmp_path):
    made = trainer(tmp_path, randomness=Randomness(None))
    for _ in range(2):
        train(made)
    assert charged(tmp_path) == 2


def test_nothing_that_is_written_is_an_unkeyed_digest_of_data(tmp_path):
    """Equal data under another key have another fingerprint; the key is the owner's alone."""
    for name in ("one", "two"):
        train(trainer(tmp_path / name))
    entries = [Ledger.read(tmp_path / n / "client-0.jsonl").entries[0] for n in ("one", "two")]
    assert entries[0].fingerprint != entries[1].fingerprint
    assert {entry.release for entry in entries} == {"d" * 64}
    key = tmp_path / "one" / "fingerprint.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert key.read_bytes().hex() not in (tmp_path / "one" / "client-0.jsonl").read_text()


def test_a_client_that_has_spent_its_budget_releases_nothing_more(tmp_path):
    cohort = Poisson(rate=5 / 20)
    budget = epsilon(noise_multiplier=1.0, cohort=cohort, rounds=8, delta=1e-5) * 1.0001
    made = trainer(tmp_path, max_epsilon=budget)
    for t in (1, 2):
        assert made.over_budget(made.initial(), np.array([0]), t) is None
        train(made, round=t)
    why = made.over_budget(made.initial(), np.array([0, 1]), 3)
    assert "round 3 would exceed client.noise.max-epsilon" in why
    with pytest.raises(FedsimError, match="of client 0 at delta"):
        train(made, round=3)
    assert charged(tmp_path) == 2
    train(made, round=2)  # run again: paid for


def test_the_line_says_what_is_public_and_how_rows_are_known(tmp_path):
    made = trainer(tmp_path)
    train(made)
    (entry,) = Ledger.read(tmp_path / "client-0.jsonl").entries
    public = {"examples": 20, "steps": 4, "denominator": 5.0, "rows": "by structure"}
    assert entry.public == public
    assert entry.event.adjacency == "zero-out"
    assert (entry.client, entry.placement) == (0, "client")
    said = str(ClientLedgers(tmp_path, delta=1e-5, read_only=True).statement())
    assert "A row is one example's by structure" in said
    assert "Public: the number of every client's examples" in said
