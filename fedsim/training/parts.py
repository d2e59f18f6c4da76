"""Local rounds of a part of a model's parameters: of all, or of those that train in turn."""

from __future__ import annotations

from torch import nn

from fedsim.tasks.losses import Loss
from fedsim.training import checks
from fedsim.training.batches import Workload
from fedsim.training.client_state import PersistentState
from fedsim.training.example_privacy import ExamplePrivacy
from fedsim.training.graphs import captured_steps
from fedsim.training.local_rounds import LocalRounds
from fedsim.training.paths.choice import KernelName, PathName, TrainedModel, choose
from fedsim.training.payload import Compression, Payload
from fedsim.training.steps import Stepper


def local_rounds(
    model: nn.Module,
    client_state: PersistentState,
    payload: Payload,
    path: PathName,
    privacy: ExamplePrivacy | None,
    *,
    workload: Workload,
    loss: Loss,
    kernel: KernelName,
    block_size: int,
    max_grad_norm: float,
    compression: Compression | None,
) -> LocalRounds:
    """Local rounds for those parameters of a model that are not frozen in it.

    Its settings are those of `Trainer`.

    Raises
    ------
    FedsimError
        If the model cannot be trained with these settings.
    """
    algorithm, data = client_state.algorithm, workload.data
    personal, private = client_state.personal, privacy is not None
    packing = personal.packing
    statistics = checks.check_statistics(model, algorithm, personal.names, private=private)
    trained = TrainedModel.of(
        model, packing, loss, data, kernel, statistics=bool(statistics), private=private
    )
    stepper = Stepper(
        choose(path, trained, data.x.device),
        data,
        algorithm,
        packing,
        client_state.entries,
        max_grad_norm,
        personal.places(statistics) if statistics else None,
    )
    stepper.captured = captured_steps(stepper, block_size)
    return LocalRounds(trained, stepper, client_state, payload, workload, compression, privacy)
