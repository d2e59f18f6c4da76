"""Writes down, round by round, who was usable and what the model's bytes were."""

import hashlib
import json
import os
from pathlib import Path

from flwr.serverapp import ServerApp

from fedsim.cohorts import FullCohort
from fedsim.deploy.flower_replacements import replace_dead_actors
from fedsim.deploy.party_files import read_roster
from fedsim.deploy.services import CLIENTS
from fedsim.engines import LocalGrid, RayGrid, StreamingGrid, array_record
from fedsim.mechanisms import Clipping
from fedsim.strategies import DPFedAvg
from treacherous.trainer import SIZES, trainer_for

app = ServerApp()


@app.main()
def main(grid, context):
    schedule = str(context.run_config["schedule"])
    trainer = trainer_for(schedule)
    strategy = DPFedAvg(
        mechanism=Clipping(0.5), cohort=FullCohort(len(SIZES)), noise_multiplier=0.5, seed=1
    )

    def on_round(server_round, result):
        report = strategy.report
        digest = hashlib.sha256()
        for name, array in sorted(result.arrays.items()):
            digest.update(name.encode() + array.numpy().tobytes())
        row = [report.asked, report.usable, report.failed, digest.hexdigest()]
        with Path(str(context.run_config["out"])).open("a") as file:
            file.write(json.dumps(row) + "\n")

    if not isinstance(grid, LocalGrid | RayGrid):
        roster = read_roster(Path(os.environ[CLIENTS])) if CLIENTS in os.environ else None
        if roster is None:
            replace_dead_actors()
        grid = StreamingGrid(
            grid, clients=len(SIZES), roster=roster, times_each_client=roster is not None
        )
    initial = array_record(trainer.layout.unflatten(trainer.initial()))
    strategy.start(grid, initial, len(schedule.split(",")), timeout=120.0, on_round=on_round)
