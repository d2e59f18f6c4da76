"""State of clients across rounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_data, make_mlp
from cuda_helpers import needs_a_fake_gpu
from torch._subclasses.fake_tensor import FakeTensorMode

from fedsim.clients import SGD, AdadpLR, Adam
from fedsim.errors import FedsimError
from fedsim.mechanisms import AdaClip
from fedsim.randomness import Randomness
from fedsim.rows.block import CLIENT_IDS, RUN
from fedsim.training import ExamplePrivacy, Trainer
from fedsim.training.client_state import FileStore, MemoryStore

IDS = np.arange(4)


def trainer_of(state, algorithm=None, *, block_size=0, data=None, **kw):
    return Trainer(
        make_mlp(), algorithm or AdadpLR(lr=0.2, tol=0.1), data or make_data([9, 14, 5, 30]),
        batch_size=4, steps=6, randomness=Randomness(2), state=state, block_size=block_size, **kw,
    )  # fmt: skip


def etas(trainer, rounds=3, ids=IDS):
    found = []
    for t in range(1, rounds + 1):
        blocks = list(trainer.train(trainer.initial(), ids, t))
        found.append(np.concatenate([b.metrics["eta"] for b in blocks]))
    return found


def test_reset_starts_every_round_from_eta_0():
    for eta in etas(trainer_of("reset")):
        assert (eta <= 0.2 * 1.1**3 * (1 + 1e-6)).all()


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_client_keeps_its_own_rate(block_size):
    trainer = trainer_of("client", block_size=block_size)
    first, _, last = etas(trainer)
    assert (last != first).any()
    assert len(set(last)) > 1
    rows = [b.rows for b in trainer.train(trainer.initial(), IDS, 4)]
    whole = trainer_of("client")
    etas(whole)
    assert torch.equal(torch.cat(rows), next(whole.train(whole.initial(), IDS, 4)).rows)


def test_clients_without_state_start_from_eta_0_and_are_counted():
    trainer = trainer_of("client")
    list(trainer.train(trainer.initial(), IDS[:2], 1))
    (block,) = trainer.train(trainer.initial(), IDS, 2)
    assert block.metrics["fresh-state"].tolist() == [0, 0, 1, 1]
    fresh = trainer_of("client")
    (alone,) = fresh.train(fresh.initial(), IDS[2:], 2)
    assert torch.equal(block.rows[2:], alone.rows)


@pytest.mark.parametrize("algorithm", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.01)])
def test_two_rounds_with_kept_state_are_one_of_twice_the_steps(algorithm):
    data = make_data([16, 16], dtype=torch.float64)
    make = {"batch_size": 0, "randomness": Randomness(0)}
    model = make_mlp(dtype=torch.float64)
    kept = Trainer(model, algorithm, data, steps=3, state="client", **make)
    middle = kept.fit(kept.initial(), IDS[:2], 1).theta
    ended = kept.fit(middle, IDS[:2], 2).theta
    once = Trainer(model, algorithm, data, steps=6, **make)
    torch.testing.assert_close(ended, once.fit(once.initial(), IDS[:2], 1).theta)


def test_files_keep_what_columns_keep(tmp_path):
    columns, last = trainer_of("client"), None
    etas(columns)
    for t in (1, 2, 3):
        # A new process for every round, as Flower's runtimes have it.
        last = trainer_of("client", state_dir=tmp_path / "run")
        list(last.train(last.initial(), IDS, t))
    rows = next(columns.train(columns.initial(), IDS, 4)).rows
    assert torch.equal(rows, next(last.train(last.initial(), IDS, 4)).rows)
    assert len(list((tmp_path / "run" / "client-1").iterdir())) == 2


def test_a_round_run_again_starts_from_where_it_did(tmp_path):
    trainer = trainer_of("client", state_dir=tmp_path)
    for t in (1, 2):
        list(trainer.train(trainer.initial(), IDS, t))
    again = next(trainer.train(trainer.initial(), IDS, 2))
    other = trainer_of("client")
    list(other.train(other.initial(), IDS, 1))
    assert torch.equal(again.rows, next(other.train(other.initial(), IDS, 2)).rows)


def test_rounds_made_again_from_the_first_on_keep_state_as_they_did(tmp_path):
    """The files of an attempt that was killed later were kept in place of the new ones."""
    first, second = (etas(trainer_of("client", state_dir=tmp_path), rounds=n) for n in (5, 4))
    assert all(np.array_equal(*pair) for pair in zip(first, second, strict=False))
    latest = FileStore(tmp_path).load(IDS, None)
    assert latest.rows["eta"].tolist() == second[-1].tolist()


def test_runs_that_share_a_directory_do_not_start_from_each_others_state(tmp_path):
    """At once, or one after the other: a node's directory is shared by all runs of one name."""
    alone, found = trainer_of("client"), {"a": [], "b": []}
    for t in (1, 2, 3):
        expected = next(alone.train(alone.initial(), IDS, t)).rows
        for run, rows in found.items():
            shared = trainer_of("client", state_dir=tmp_path)  # a process for each message
            shared.receive({RUN: run})
            rows.append(torch.equal(next(shared.train(shared.initial(), IDS, t)).rows, expected))
    assert found == {"a": [True] * 3, "b": [True] * 3}
    # A server does not choose a path by the id that it sends.
    hostile = trainer_of("client", state_dir=tmp_path / "of" / "nodes")
    hostile.receive({RUN: "../../outside"})
    next(hostile.train(hostile.initial(), IDS, 1))
    assert not (tmp_path / "outside").exists()
    assert len(list((tmp_path / "of" / "nodes").iterdir())) == 1
    # A client's first round may be a later one of its run.
    new = trainer_of("client", state_dir=tmp_path)
    new.receive({RUN: "c"})
    fresh = trainer_of("client")
    assert torch.equal(*(next(t.train(t.initial(), IDS, 4)).rows for t in (new, fresh)))


def test_a_checkpoint_of_the_state_goes_on_where_it_was():
    whole = trainer_of("client")
    etas(whole, rounds=2)
    saved = {name: tensor.clone() for name, tensor in whole.state().items()}
    resumed = trainer_of("client")
    resumed.restore(saved)
    rows = [next(t.train(t.initial(), IDS, 3)).rows for t in (whole, resumed)]
    assert torch.equal(*rows)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_whoever_diverges_first_leaves_the_others_as_they_are(block_size):
    data = make_data([9, 14, 5, 30])
    honest = trainer_of("client", Adam(lr=0.1), data=data, block_size=block_size)
    poisoned = replace(data, x=data.x.clone())
    poisoned.x[data.indices[0]] = torch.nan
    hostile = trainer_of("client", Adam(lr=0.1), data=poisoned, block_size=block_size)
    for t in (1, 2):
        rows, theirs = (
            joined(trainer.train(trainer.initial(), IDS, t))[0] for trainer in (honest, hostile)
        )
        assert not torch.isfinite(theirs[0]).all()
        assert torch.equal(theirs[1:], rows[1:])


def test_columns_of_another_population_are_refused():
    larger = MemoryStore(4)
    larger.save({CLIENT_IDS: torch.tensor([3]), "eta": torch.ones(1)}, 1)
    with pytest.raises(FedsimError, match="client 3; this run has clients 0"):
        MemoryStore(3).restore(larger.state())


@needs_a_fake_gpu
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_state_from_a_checkpoint_is_replaced_by_that_of_a_gpus_training(devices, monkeypatch):
    # The ids are given as an array: no tensor can be turned into one in this mode.
    monkeypatch.setattr("fedsim.training.client_state.split_client_states", lambda states: states)
    columns = MemoryStore(4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for number, device in enumerate(devices):
            columns.save((np.array([1, 2 + number]), {"eta": torch.ones(2, device=device)}), number)
        loaded = columns.load(np.arange(4), None)
    assert loaded.present.tolist() == [False, True, True, True]
    assert loaded.rows["eta"].device.type == devices[0]


def test_a_mechanisms_state_is_kept_with_its_client():
    privacy = ExamplePrivacy(AdaClip(clip_norm=0.5), 1.0)
    trainer = trainer_of("client", SGD(lr=0.1), privacy=privacy)
    for t in (1, 2):
        list(trainer.train(trainer.initial(), IDS, t))
    saved = trainer.state()
    names = [name for name in saved if name.startswith("mechanism.")]
    assert names
    assert not any(torch.equal(saved[n][0], saved[n][3]) for n in names if saved[n].dim() > 1)
