"""`fedsim app`: any Flower app, as it is, in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fedsim.apps.user_app import FlowerApp, run_app
from fedsim.errors import FedsimError

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"

PLAIN = """
import json, pathlib
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
import numpy as np

client, server = ClientApp(), ServerApp()

@client.train()
def train(message, context):
    own = context.node_config["partition-id"] + context.run_config["offset.by"]
    arrays = ArrayRecord({"w": Array(np.full(2, float(own)))})
    metrics = MetricRecord({"num-examples": 1, "nodes": context.node_config["num-partitions"]})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=context.run_config["nodes"])
    result = strategy.start(grid, ArrayRecord({"w": Array(np.zeros(2))}), num_rounds=2)
    mean = result.arrays["w"].numpy().tolist()
    told = result.train_metrics_clientapp[2]["nodes"]
    pathlib.Path(context.run_config["out"]).write_text(json.dumps([mean, told]))
"""


@pytest.fixture(autouse=True)
def _modules_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("numpy_app", "plain_app"):
            del sys.modules[name]


@pytest.fixture
def plain(tmp_path):
    (tmp_path / "plain_app.py").write_text(PLAIN)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.flwr.app.components]\nserverapp = "plain_app:server"\n'
        'clientapp = "plain_app:client"\n'
        '[tool.flwr.app.config]\nout = ""\nnodes = 1\noffset.by = 10\n'
    )
    return tmp_path


def test_flowers_own_strategy_runs_over_every_client_with_the_apps_config(plain):
    out = plain / "out.json"
    run_app(FlowerApp.load(plain, [f"out={out}", "nodes=5"]), 5)
    mean, nodes = json.loads(out.read_text())
    assert mean == pytest.approx([12.0, 12.0])  # of 10 .. 14
    assert nodes == 5


def test_our_plugin_example_runs_as_it_is(tmp_path):
    out = tmp_path / "summary.json"
    run_app(FlowerApp.load(PLUGIN, [f"out={out}", "num-server-rounds=2"]), 10)
    assert sorted(json.loads(out.read_text())["accuracy"]) == ["1", "2"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: (d / "pyproject.toml").unlink(), "cannot read"),
        (lambda d: (d / "pyproject.toml").write_text("a = "), "is not valid TOML"),
        (lambda d: (d / "pyproject.toml").write_text("a = 1"), "no table [tool.flwr.app.comp"),
        (lambda d: (d / "plain_app.py").unlink(), "there is no module 'plain_app'"),
        (
            lambda d: (d / "plain_app.py").write_text("import nowhere_to_be_found"),
            "needs the module 'nowhere_to_be_found', which is not installed here",
        ),
        (lambda d: (d / "plain_app.py").write_text("client = server = 3"), "must name a ServerApp"),
    ],
)
def test_a_directory_that_is_no_app_is_refused_in_a_sentence(plain, change, says):
    change(plain)
    with pytest.raises(FedsimError) as error:
        FlowerApp.load(plain)
    assert says in str(error.value)


def test_a_component_may_be_an_attribute_of_an_object_as_in_flower(plain):
    module, project = plain / "plain_app.py", plain / "pyproject.toml"
    module.write_text(f"{PLAIN}\nclass Apps:\n    mine = client\n")
    project.write_text(project.read_text().replace("plain_app:client", "plain_app:Apps.mine"))
    assert FlowerApp.load(plain).client is sys.modules["plain_app"].client
    project.write_text(project.read_text().replace("Apps.mine", "Apps.mine.no"))
    with pytest.raises(FedsimError, match="must name a ClientApp"):
        FlowerApp.load(plain)


def test_an_override_must_name_a_key_of_the_app(plain):
    with pytest.raises(FedsimError, match=r"has the keys nodes, offset\.by, out"):
        FlowerApp.load(plain, ["rounds=3"])
