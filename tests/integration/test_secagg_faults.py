"""Secure aggregation on a real network, whose clients fail at each of its stages."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from fedsim.config import RunConfig
from fedsim.deploy.bundle import SERVER_APP, write_app
from fedsim.deploy.rehearsal import Rehearsal
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import tensors
from fedsim.privacy import Ledger
from fedsim.runs.directory import RUNS, RunDirectory
from fedsim.runs.resolve import make_strategy, resolve

pytestmark = pytest.mark.slow

APP, CLIENT_APP = Path(__file__).with_name("stalling_app.py"), "stalling_app:app"
CLIENTS, THRESHOLD = 5, 3
STAGES = ("keys", "shares", "masked", "unmask")
TIMEOUT = 60.0
SCHEDULE = [
    *([(client, stage, "raises")] for client, stage in enumerate(STAGES)),
    *([(client, stage, "dies")] for client, stage in enumerate(STAGES, 1)),
    *([(client, stage, "hangs")] for client, stage in enumerate(STAGES)),
    [(0, "shares", "raises"), (3, "unmask", "dies"), (4, "unmask", "raises")],
    *([(client, stage, "raises") for client in (0, 2, 4)] for stage in STAGES),
    # Last, since the node of a process that is stopped takes no other message for long.
    [(1, "unmask", "stops")],
]
"""The faults of each round: (client, stage, fault)."""
CONFIG = RunConfig.parse(
    {
        "name": "stalled",
        "rounds": len(SCHEDULE),
        "partition": {"clients": CLIENTS, "max-examples": 30},
        "model": {"name": "softmax"},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 1.0, "placement": "client", "entropy": "config"},
        "secagg": {"threshold": THRESHOLD, "colluders": 1},
        "evaluate": {"every": 0},
        "engine": {"name": "deployment", "device": "cpu", "timeout": TIMEOUT},
    }
)


def summed_clients(faults: list[tuple[int, str, str]]) -> list[int]:
    """Clients whose shares are in a round's sum; none if too few remain at some stage."""
    helpers = {*range(CLIENTS)} - {client for client, _, _ in faults}
    survivors = helpers | {client for client, stage, _ in faults if stage == "unmask"}
    return sorted(survivors) if len(helpers) >= THRESHOLD else []


def model_of_shares_in_clear() -> bytes:
    resolved = resolve(CONFIG)
    strategy = make_strategy(resolved)
    strategy.participants.replying = lambda number, ids: np.isin(
        ids, summed_clients(SCHEDULE[number - 1])
    )
    grid = LocalGrid(resolved.trainer)
    result = strategy.start(grid, resolved.initial_arrays, CONFIG.rounds)
    return b"".join(tensor.numpy().tobytes() for tensor in tensors(result.arrays).values())


def test_a_sum_has_the_survivors_of_its_round_whoever_fails_at_which_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(APP, tmp_path)
    (tmp_path / "faults").write_text(
        "".join(
            f"{number} {client} {stage} {fault}\n"
            for number, faults in enumerate(SCHEDULE, 1)
            for client, stage, fault in faults
        )
    )
    runs = tmp_path / "runs"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    apps, variables = (SERVER_APP, CLIENT_APP), {RUNS: str(runs)}
    with Rehearsal.temporary(CLIENTS, apps=apps, variables=variables) as rehearsal:
        rehearsal.start_all()
        app = write_app(tmp_path / "app", CONFIG.to_tree(), client_app=CLIENT_APP)
        run_id = rehearsal.operator.submit(app)
        status = rehearsal.operator.follow(run_id, rehearsal.check)
        log = rehearsal.operator.log(run_id)
        assert status == "finished:completed", log
    (path,) = runs.iterdir()
    directory = RunDirectory(path)
    summed = [row["summed"] for row in directory.metrics_file.rows()]
    assert summed == [len(summed_clients(faults)) for faults in SCHEDULE], log
    saved = load_file(directory.model)
    names = [*resolve(CONFIG).initial_arrays]
    model = b"".join(saved[name].numpy().tobytes() for name in names)
    assert model == model_of_shares_in_clear()
    # A line for each round, which was on disk before any client began with the round.
    assert len(Ledger.read(directory.ledger).entries) == len(SCHEDULE)
    begun = [line.split() for line in (tmp_path / "begun").read_text().splitlines()]
    assert {stage for _, stage, _ in begun} == {*STAGES}
    assert all(int(lines) == 1 + int(number) for number, _, lines in begun)
