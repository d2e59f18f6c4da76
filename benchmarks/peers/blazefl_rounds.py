"""A job of `benchmarks.peers` in BlazeFL: its FedAvg in threads, which it recommends."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from blazefl.contrib import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.tasks import Job, Rounds, examples

job = Job.asked()


class Networks:
    """BlazeFL's ``ModelSelector``."""

    def select_model(self, model_name: str) -> nn.Module:
        """The job's network."""
        return job.described.network()


class Partitioned:
    """BlazeFL's ``PartitionedDataset``."""

    def get_dataloader(
        self, type_: str, cid: int | None, batch_size: int | None, generator: Any = None
    ) -> DataLoader[Any]:
        """A client's training examples, shuffled."""
        assert cid is not None
        data = TensorDataset(*examples(job).clients[cid])
        return DataLoader(data, batch_size, shuffle=True, generator=generator)


def main() -> None:
    task = job.described
    if task.clip_norm:
        raise SystemExit("BlazeFL has no differential privacy.")
    threads = job.workers if job.device == "cpu" else os.cpu_count() or 1
    handler = FedAvgBaseServerHandler(
        model_selector=Networks(),
        model_name=task.name,
        dataset=Partitioned(),
        global_round=job.rounds,
        num_clients=task.clients,
        sample_ratio=(task.cohort + 0.5) / task.clients if task.cohort < task.clients else 1.0,
        device=job.device,
        batch_size=task.batch,
        seed=1,
    )
    trainer = FedAvgThreadPoolClientTrainer(
        model_selector=Networks(),
        model_name=task.name,
        dataset=Partitioned(),
        device=job.device,
        num_clients=task.clients,
        epochs=1,
        batch_size=task.batch,
        lr=task.lr,
        seed=1,
        num_parallels=threads,
    )
    examples(job)
    rounds = Rounds(job)
    while not handler.is_stopped():
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        for package in trainer.uplink_package():
            handler.load(package)
        if rounds.end():
            break
    rounds.report(handler.model, f"blazefl {version('blazefl')}")


if __name__ == "__main__":
    main()
