"""What a deployed node trains is what the simulation trains for the same client."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MessageType, RecordDict

from fedsim.apps import client_app
from fedsim.apps.node import data_to_write, resolve_node, trainer_for, write_client_data
from fedsim.config import RunConfig
from fedsim.engines import tensors
from fedsim.errors import FedsimError
from fedsim.runs.resolve import resolve

CLIENTS = 5


def config_for(engine: str, **tables) -> RunConfig:
    tree = {
        "partition": {"name": "dirichlet", "clients": CLIENTS},
        "client": {"batch-size": 8, "lr": 0.3},
        "noise": {"entropy": "config"},
        "engine": {"name": engine, "device": "cpu"},
    }
    return RunConfig.parse({**tree, **tables})


def context_of(config: RunConfig, **node_config) -> Context:
    return Context(1, 7, node_config, RecordDict(), config.to_run_config())


@pytest.fixture(scope="module")
def whole():
    return resolve(config_for("local")).trainer


def row_of(trainer, client: int) -> bytes:
    vector = torch.zeros(trainer.layout.d)
    (block,) = trainer.train(vector, np.array([client]), 3)
    return block.rows.numpy().tobytes()


@pytest.mark.parametrize("client", range(CLIENTS))
def test_a_node_with_its_part_only_trains_to_the_same_bytes(client, whole):
    node = trainer_for(context_of(config_for("deployment"), **{"partition-id": client}))
    assert len(node.data.x) == whole.data.size(client)
    assert row_of(node, client) == row_of(whole, client)


@pytest.mark.parametrize("client", [0, CLIENTS - 1])
def test_a_node_with_a_file_of_its_own_trains_to_the_same_bytes(client, whole, tmp_path):
    config = config_for("deployment")
    files = write_client_data(config, data_to_write(config), lambda k: tmp_path / f"{k}.npz")
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    settings = {"partition-id": client, "data": str(files[client])}
    # Its data are nowhere but in the file.
    nowhere = config.replace(**{"data.name": "mnist", "data.dir": str(tmp_path / "none")})
    assert row_of(trainer_for(context_of(nowhere, **settings)), client) == row_of(whole, client)


def test_virtual_clients_of_one_process_share_one_trainer():
    config = config_for("simulation")
    first, second = (trainer_for(context_of(config, **{"partition-id": k})) for k in (0, 3))
    assert first is second


def test_a_node_of_a_run_without_noise_draws_by_the_seed_and_trains_to_the_same_bytes(whole):
    config = config_for("deployment", noise={})
    node = trainer_for(context_of(config, **{"partition-id": 0}))
    assert row_of(node, 0) == row_of(whole, 0)


NOISY_EXAMPLES = {"mechanism": {"name": "clipping"}, "noise": {"multiplier": 1.0}}


@pytest.mark.parametrize(
    "noise",
    [
        {"mechanism": {"name": "clipping"}, "noise": {"multiplier": 1.0}},
        {"client": {"batch-size": 8, "lr": 0.3, **NOISY_EXAMPLES}, "noise": {}},
        {"noise": {"entropy": "system"}},
    ],
)
def test_with_system_entropy_a_nodes_draws_do_not_follow_from_the_seed(noise, tmp_path):
    config = config_for("deployment", **noise).replace(**{"client.state-dir": str(tmp_path)})
    trainer = trainer_for(context_of(config, **{"partition-id": 0}))
    assert trainer.randomness.seed is None
    assert row_of(trainer, 0) != row_of(trainer, 0)


@pytest.mark.parametrize("claim", [{}, {"partition-id": "0"}, {"partition-id": True}])
def test_a_node_without_a_client_id_is_told_so(claim):
    with pytest.raises(FedsimError, match="partition-id"):
        trainer_for(context_of(config_for("deployment"), **claim))


def test_a_node_that_is_no_client_of_the_run_is_told_so():
    with pytest.raises(FedsimError, match=r"'partition-id' is 5; it must lie in 0 \.\. 4"):
        trainer_for(context_of(config_for("deployment"), **{"partition-id": 5}))


def test_a_node_holds_no_test_examples():
    assert len(resolve_node(config_for("deployment"), 1).data.dataset.test) == 0


def test_the_client_app_says_who_it_is_without_torch():
    program = (
        "import sys; from fedsim.apps.client_app import app; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_client_app_answers_what_flowers_runtimes_ask(whole):
    from fedsim.engines import LocalGrid

    config = config_for("deployment", evaluate={"clients-every": 1})
    grid = LocalGrid(client_app.app, num_nodes=CLIENTS, run_config=config.to_run_config())
    arrays = resolve(config).initial_arrays
    (who,) = grid.send_and_receive([Message(RecordDict(), 4, MessageType.QUERY)])
    assert who.content["metrics"]["client-id"] == 2
    for kind in (MessageType.TRAIN, MessageType.EVALUATE):
        (reply,) = grid.send_and_receive([Message(RecordDict({"arrays": arrays}), 4, kind)])
        assert reply.content["metrics"]["num-examples"] == whole.data.size(2)
        if kind == MessageType.TRAIN:
            assert tensors(reply.content["arrays"]).keys() == arrays.keys()


PRIVATE_EXAMPLES = {
    "partition": {"clients": CLIENTS, "max-examples": 60},
    "rounds": 3,
    "noise": {"entropy": "config"},
    "mechanism": {"name": "none"},
    "client": {
        "batch-size": 20,
        "steps": 2,
        "lr": 0.3,
        "state-dir": "state",
        "mechanism": {"name": "clipping"},
        "noise": {"target-epsilon": 3.0},
    },
}


@pytest.mark.parametrize("resolved", [False, True])
def test_a_node_has_the_noise_and_the_release_of_the_server(resolved, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # Unequal clients: each on its own would be content with noise of its own.
    config = config_for("deployment", **PRIVATE_EXAMPLES).replace(**{"partition.name": "dirichlet"})
    config = config.replace(**{"partition.alpha": 5.0, "partition.max-examples": 0})
    server = resolve(config)
    node = resolve_node(server.config if resolved else config, client=1)
    node_noise, noise = node.trainer.privacy.noise, server.trainer.privacy.noise
    assert node_noise.multiplier == noise.multiplier > 0
    assert node.plan == server.plan
    assert node.release == server.release
    whole = resolve(config.replace(**{"client.state-dir": "elsewhere"})).trainer
    assert row_of(node.trainer, 1) == row_of(whole, 1)


def test_a_node_with_a_file_does_not_guess_the_noise_that_others_need(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = config_for("deployment", **PRIVATE_EXAMPLES)
    files = write_client_data(config, data_to_write(config), lambda k: tmp_path / f"{k}.npz")
    with pytest.raises(FedsimError, match=r"set client\.noise\.multiplier instead"):
        _ = resolve_node(config, client=1, file=str(files[1])).trainer
    resolved = resolve(config).config
    node = resolve_node(resolved, client=1, file=str(files[1]))
    assert node.release == resolve(config).release


def test_a_node_with_a_file_of_its_own_reads_nothing_of_the_runs_data(tmp_path):
    config = config_for("deployment")
    (file, *_) = write_client_data(
        config, data_to_write(config), lambda client: tmp_path / f"{client}.npz"
    )
    absent = str(tmp_path / "absent")
    for key in ("data.dir", "data.name"):
        node = resolve_node(config.replace(**{key: absent}), client=0, file=str(file))
        assert node.trainer.data.size(0) > 0
