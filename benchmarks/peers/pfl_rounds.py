"""A job of `benchmarks.peers` in pfl-research, as its own benchmarks are written."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import CentrallyAppliedPrivacyMechanism
from pfl.privacy.gaussian_mechanism import GaussianMechanism

from benchmarks.peers.tasks import Job, Rounds, examples


class Clock(TrainingProcessCallback[Any]):
    """Ends each round on the clock, and the run when its time is up."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Whether the time is up."""
        return self._rounds.end(), Metrics()


def main() -> None:
    job = Job.asked()
    task, users = job.described, examples(job).clients
    np.random.seed(1)  # noqa: NPY002 - pfl draws from it
    network = task.network()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        network.train()
        return F.cross_entropy(network(x), y)

    network.loss, network.metrics = loss, lambda x, y: {}  # type: ignore[assignment]
    trained = [p for p in network.parameters() if p.requires_grad]
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(trained, 1.0))
    # Its benchmarks draw users by this sampler too, so that an epoch passes before one is reused.
    sampler = get_user_sampler("minimize_reuse", list(range(len(users))))
    data = FederatedDataset(lambda user: PyTorchTensorDataset(users[user], user_id=user), sampler)
    postprocessors: list[Any] = [WeightByUser()]
    if task.clip_norm:
        mechanism = GaussianMechanism(task.clip_norm, task.multiplier)
        postprocessors.append(CentrallyAppliedPrivacyMechanism(mechanism))
    rounds = Rounds(job)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds + 1,
            train_cohort_size=task.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=postprocessors),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=task.lr, local_batch_size=task.batch
        ),
        NNEvalHyperParams(local_batch_size=task.batch),
        callbacks=[Clock(rounds)],
    )
    rounds.report(network, f"pfl {version('pfl')}")


if __name__ == "__main__":
    main()
