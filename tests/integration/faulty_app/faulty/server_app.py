"""Writes down, round by round, what the strategy saw."""

import json
import os
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from fedsim.cohorts import FullCohort
from fedsim.deploy.party_files import read_roster
from fedsim.deploy.services import CLIENTS
from fedsim.engines import StreamingGrid
from fedsim.mechanisms import Clipping
from fedsim.strategies import DPFedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    population, out = int(config["population"]), Path(str(config["out"]))
    strategy = DPFedAvg(
        mechanism=Clipping(clip_norm=100.0),
        cohort=FullCohort(population=population),
        noise_multiplier=float(config["noise"]),
        seed=1,
        ledger=out.with_suffix(".ledger"),
    )

    def on_round(server_round, result):
        report = strategy.report
        row = {
            "round": server_round,
            "asked": report.asked,
            "usable": report.usable,
            "failed": report.failed,
            "reasons": {reason: count for reason, count in report.reasons.items() if count},
            "w": result.arrays["w"].numpy().tolist(),
        }
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")

    path = os.environ.get(CLIENTS)
    roster = read_roster(Path(path)) if path else None
    grid_of_nodes = StreamingGrid(
        grid, clients=population, patience=60, roster=roster, times_each_client=True
    )
    strategy.start(
        grid_of_nodes,
        ArrayRecord({"w": Array(np.zeros(3))}),
        num_rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
        on_round=on_round,
    )
