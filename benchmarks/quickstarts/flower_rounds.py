"""Flower's quickstart-pytorch, its apps unchanged, on Flower's Ray simulation or on a `LocalGrid`.

It runs in an environment with flwr-datasets, and in a folder that has the data set's files under
the name by which the example requests it from the hub: `datasets` prefers a folder of that name.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import Strategy

from benchmarks.quickstarts.stamps import Stamps

DATASET, CLIENTS = Path("uoft-cs/cifar10"), 10


def write_data(arrays: Path, share: float) -> None:
    """Write the data set's files with the first images, and the example's split for fedsim."""
    import datasets

    names = datasets.ClassLabel(num_classes=10)
    features = datasets.Features({"img": datasets.Image(), "label": names})
    DATASET.mkdir(parents=True)
    with np.load(arrays) as file:
        for split in ("train", "test"):
            first = round(share * len(file[f"y_{split}"]))
            columns = {
                "img": list(file[f"x_{split}"][:first]),
                "label": file[f"y_{split}"][:first].tolist(),
            }
            data = datasets.Dataset.from_dict(columns, features=features)
            data.to_parquet(DATASET / f"{split}-00000-of-00001.parquet")
    task = importlib.import_module("pytorchexample.task")
    parts = [
        [as_arrays(loader.dataset) for loader in task.load_data(client, CLIENTS, 32)]
        for client in range(CLIENTS)
    ]
    x, y, owner = (
        {
            split: np.concatenate([column(k, part[place]) for k, part in enumerate(parts)])
            for place, split in enumerate(("train", "test"))
        }
        for column in (lambda k, of: of[0], lambda k, of: of[1], lambda k, of: [k] * len(of[1]))
    )
    central_x, central_y = as_arrays(task.load_centralized_dataset().dataset)
    # Clients evaluate on their own test examples and the server on all; the central test examples
    # get an owner that is no client.
    np.savez(
        "clients.npz",
        x_train=x["train"],
        y_train=y["train"],
        owner_train=owner["train"],
        x_test=np.concatenate([x["test"], central_x]),
        y_test=np.concatenate([y["test"], central_y]),
        owner_test=np.concatenate([owner["test"], [CLIENTS] * len(central_y)]),
        mean=np.full(3, 0.5),
        std=np.full(3, 0.5),
    )
    normal = (central_x.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5
    np.savez("judged.npz", x=normal.astype(np.float32), y=central_y)


def as_arrays(examples: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images ``[N, 32, 32, 3]`` and classes of a data set of normalised tensors."""
    batch = examples[:]
    images = np.stack([np.asarray(image) for image in batch["img"]])
    whole = np.rint((images * 0.5 + 0.5) * 255).astype(np.uint8)
    return whole.transpose(0, 2, 3, 1), np.asarray(batch["label"])


def take_turns(stamps: Stamps) -> None:
    """Patch FedAvg to wait for its turn in `configure_train`, where a round begins."""
    strategy = importlib.import_module("flwr.serverapp.strategy").FedAvg
    configure, start = strategy.configure_train, Strategy.start

    def configure_train(self: Any, *args: Any, **kwargs: Any) -> Any:
        stamps.boundary()
        return configure(self, *args, **kwargs)

    def started(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["evaluate_fn"] = stamps.evaluation(kwargs["evaluate_fn"])
        result = start(self, *args, **kwargs)
        stamps.stop()
        central = result.evaluate_metrics_serverapp
        stamps.report(accuracy=[central[t]["accuracy"] for t in sorted(central)])
        return result

    strategy.configure_train = configure_train
    Strategy.start = started  # type: ignore[method-assign]


def on_local_grid(server_app: Any, client_app: Any, context: Context) -> None:
    """Run the unchanged apps on a `LocalGrid` in this process."""
    from fedsim.engines import LocalGrid

    with LocalGrid(
        client_app, num_nodes=CLIENTS, run_config=context.run_config, run_id=context.run_id
    ) as grid:
        server_app(grid, context)


def on_ray(app: Path, context: Context, cpus: int) -> None:
    """Run the apps as flwr-simulation does, the process that `flwr run` starts."""
    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.constant import NOOP_FEDERATION_ID
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supercore.telemetry import EventType

    run = Run.create_empty(run_id=context.run_id)
    run.primary_task_id, run.federation_id = run.run_id, NOOP_FEDERATION_ID
    run.override_config = dict(context.run_config)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, context.run_id, 1
    _run_simulation(
        server_app_attr="pytorchexample.server_app:app",
        client_app_attr="pytorchexample.client_app:app",
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": cpus, "num_gpus": 0.0}},
        app_dir=str(app),
        run=run,
        server_app_context=context,
        is_app=True,
        exit_event=EventType.FLWR_SIMULATION_RUN_LEAVE,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--example", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--grid", choices=("ray", "local"), default="ray")
    parser.add_argument("--cpus", type=int, default=1, help="of a client, on Ray")
    parser.add_argument("--arrays", type=Path, help="make the data of this .npz")
    parser.add_argument("--share", type=float, default=1.0, help="of its examples")
    given = parser.parse_args()
    sys.path.insert(0, str(given.example))
    if given.arrays:
        write_data(given.arrays, given.share)
        return
    settings = tomllib.loads((given.example / "pyproject.toml").read_text())
    run_config = settings["tool"]["flwr"]["app"]["config"] | {"num-server-rounds": given.rounds}
    context = Context(7, 1, {}, RecordDict(), run_config)
    take_turns(Stamps())
    if given.grid == "ray":
        on_ray(given.example, context, given.cpus)
        return
    server, client = (
        importlib.import_module(f"pytorchexample.{side}_app").app for side in ("server", "client")
    )
    on_local_grid(server, client, context)


if __name__ == "__main__":
    main()
