"""An ordinary Flower server, whose strategy happens to be DPFedAvg."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedsim.cohorts import FullCohort
from fedsim.mechanisms import Clipping
from fedsim.strategies import ClientMetrics, DPFedAvg
from numpy_app import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    population = int(config["population"])
    strategy = DPFedAvg(
        mechanism=Clipping(clip_norm=1.0),
        cohort=FullCohort(population=population),
        noise_multiplier=float(config["noise-multiplier"]),
        delta=1e-5,
        min_available_nodes=population,
        # The clients' accuracies are shown without noise, which has to be asked for.
        fraction_evaluate=1.0,
        metrics=ClientMetrics(unprotected=True),
    )
    arrays = ArrayRecord({name: Array(np.asarray(v)) for name, v in task.initial().items()})
    result = strategy.start(grid, arrays, num_rounds=int(config["num-server-rounds"]))
    print(strategy.privacy_statement())
    if config["out"]:
        summary = {
            "accuracy": {
                k: float(v["accuracy"]) for k, v in result.evaluate_metrics_clientapp.items()
            },
            "epsilon": strategy.privacy_spent().epsilon,
            "dtypes": {name: array.dtype for name, array in result.arrays.items()},
        }
        Path(str(config["out"])).write_text(json.dumps(summary))
