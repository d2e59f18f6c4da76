"""What a deployed server receives under secure aggregation: keys, sealed shares, masked words."""

from __future__ import annotations

import os
import pickle
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.config import RunConfig
from fedsim.deploy.bundle import CLIENT_APP, write_app
from fedsim.deploy.rehearsal import Rehearsal

pytestmark = pytest.mark.slow

APP = Path(__file__).with_name("listening_app")
SERVER_APP = "listening.server_app:app"
CLIENTS, ROUNDS = 4, 2
RUN = {
    "name": "masked",
    "rounds": ROUNDS,
    "partition": {"clients": CLIENTS, "max-examples": 30},
    "mechanism": {"name": "clipping"},
    "noise": {"multiplier": 1.0, "placement": "client"},
    "secagg": {"threshold": 3, "colluders": 1},
    "evaluate": {"clients-every": 0},
    "engine": {"name": "deployment", "device": "cpu", "timeout": 60.0},
}
OF_STAGES = ({"mask-key", "channel-key"}, {"sealed"}, {"masked"}, {"shares"})


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any]]]:
    place = tmp_path_factory.mktemp("listening")
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(APP), prepend=os.pathsep)
    variables = {"FEDSIM_RUNS": str(place)}
    with Rehearsal.temporary(CLIENTS, apps=(SERVER_APP, CLIENT_APP), variables=variables) as up:
        up.start_all()
        config = RunConfig.parse(RUN).to_tree()
        run_id = up.operator.submit(write_app(place / "app", config, server_app=SERVER_APP))
        deadline = time.monotonic() + 400

        def alive() -> None:
            up.check()
            assert time.monotonic() < deadline, up.operator.log(run_id)

        assert up.operator.follow(run_id, alive).startswith("finished")
    patch.undo()
    messages = []
    with (place / "received").open("rb") as file:
        while file.peek(1):
            messages.append(pickle.load(file))
    return messages


def test_nothing_but_four_stages_of_masking_is_received(received) -> None:
    stages = Counter()
    for kind, content in received:
        assert kind.startswith("train")
        assert set(content) == {"secagg"}
        stages[OF_STAGES.index(set(content["secagg"]))] += 1
    assert stages == dict.fromkeys(range(4), CLIENTS * ROUNDS)


def test_masked_words_are_uniform_and_no_two_are_alike(received) -> None:
    vectors = [c["secagg"]["masked"] for _, c in received if "masked" in c.get("secagg", {})]
    assert len(set(vectors)) == len(vectors) == CLIENTS * ROUNDS
    counts = np.bincount(np.frombuffer(b"".join(vectors), dtype=np.uint8), minlength=256)
    expected = counts.sum() / 256
    chi_square = float(np.square(counts - expected).sum() / expected)
    assert abs(chi_square - 255) < 6 * np.sqrt(2 * 255)
    # Two clients' words have nothing in common either: differences are as uniform.
    words = [np.frombuffer(vector, dtype=np.uint8).astype(int) for vector in vectors]
    differences = np.bincount(np.concatenate(words[1:]) - np.concatenate(words[:-1]) & 255)
    chi_square = float(np.square(differences - differences.mean()).sum() / differences.mean())
    assert abs(chi_square - 255) < 6 * np.sqrt(2 * 255)
