"""An ordinary Flower server, whose cohort is buffered."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedbuff_app.client_app import FEATURES, load
from fedsim.cohorts import BufferedCohort
from fedsim.mechanisms import Clipping, NoPrivacy
from fedsim.strategies import Availability, DPFedAvg, ReleaseSchedule

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    rounds, population = int(config["num-server-rounds"]), int(config["population"])
    noise_multiplier, real_time = float(config["noise-multiplier"]), bool(config["real-time"])
    cohort = BufferedCohort(
        concurrency=int(config["concurrency"]),
        buffer=int(config["buffer"]),
        participations=int(config["participations"]),
        rounds=rounds,
        population=population,
    )
    # Who trains which version when. In real time, without privacy, none is needed.
    schedule = ReleaseSchedule.of(cohort, np.full(population, float(config["duration"])), seed=1)
    strategy = DPFedAvg(
        mechanism=Clipping(clip_norm=1.0) if noise_multiplier else NoPrivacy("uniform"),
        noise_multiplier=noise_multiplier,
        cohort=cohort,
        rounds=rounds,
        delta=1e-3,
        min_available_nodes=population,
        fraction_evaluate=0.0,
        availability=Availability(
            schedule=None if real_time and not noise_multiplier else schedule, real_time=real_time
        ),
    )
    arrays = ArrayRecord({"weight": Array(np.zeros(FEATURES))})
    result = strategy.start(grid, arrays, num_rounds=rounds)
    weight = result.arrays["weight"].numpy()
    features, labels = load(partition=population, examples=1000)  # nobody's
    accuracy = float(np.mean((features @ weight > 0) == labels))
    print(strategy.privacy_statement())
    print(f"accuracy {accuracy:.3f}")
    if config["out"]:
        summary = {"accuracy": accuracy, "epsilon": strategy.privacy_spent().epsilon}
        Path(str(config["out"])).write_text(json.dumps(summary))
