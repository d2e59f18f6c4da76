"""A job of `benchmarks.peers` as Flower apps on its Ray simulation."""

from __future__ import annotations

import contextlib
from importlib.metadata import version

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Strategy
from flwr.simulation import run_simulation

from benchmarks.peers.tasks import Job, Rounds, train

CLIENTS_ON_GPU = 8
"""Ray actors that share the GPU."""

job = Job.asked()
client_app, server_app = ClientApp(), ServerApp()


class TimeIsUpError(Exception):
    """The job's seconds have passed."""


@client_app.train()
def train_client(message: Message, context: Context) -> Message:
    """Train a client on the model that the server sent."""
    model = job.described.network().to(job.device)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(model, job, int(context.node_config["partition-id"]))
    metrics = MetricRecord({"num-examples": job.described.examples})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the rounds, and evaluate the last model."""
    task = job.described
    model, rounds = task.network(), Rounds(job)
    last: ArrayRecord = ArrayRecord(model.state_dict())

    def round_ended(number: int, arrays: ArrayRecord) -> None:
        nonlocal last
        last = arrays
        if number and rounds.end():
            raise TimeIsUpError

    strategy: Strategy = FedAvg(
        fraction_train=task.cohort / task.clients,
        fraction_evaluate=0.0,
        min_train_nodes=task.cohort,
        min_available_nodes=task.clients,
    )
    if task.clip_norm:
        strategy = DifferentialPrivacyServerSideFixedClipping(
            strategy, task.multiplier, task.clip_norm, task.cohort
        )
    with contextlib.suppress(TimeIsUpError):
        strategy.start(grid, last, num_rounds=job.rounds, evaluate_fn=round_ended)
    model.load_state_dict(last.to_torch_state_dict())
    rounds.report(model, f"flwr {version('flwr')}, ray {version('ray')}")


def main() -> None:
    cuda = job.device == "cuda"
    resources = {"num_cpus": 1, "num_gpus": 1 / CLIENTS_ON_GPU if cuda else 0.0}
    workers = CLIENTS_ON_GPU if cuda else job.workers
    run_simulation(
        server_app,
        client_app,
        job.described.clients,
        backend_config={
            "client_resources": resources,
            "init_args": {"num_cpus": workers, "num_gpus": torch.cuda.device_count()},
        },
    )


if __name__ == "__main__":
    main()
