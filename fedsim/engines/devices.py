"""A trainer on another device: the driver's is made on one, and workers have theirs."""

from __future__ import annotations

import copy
from typing import cast

import torch

from fedsim.rows.exchange import BlockTrainer
from fedsim.training.paths.choice import PathName
from fedsim.training.trainer import Trainer

__all__ = ["moved"]


def moved(trainer: BlockTrainer, device: str) -> BlockTrainer:
    """The same clients on ``device``, by the same path; what they keep stays with the caller.

    A trainer that is not fedsim's own, or is there already, is returned as it is.
    """
    if not isinstance(trainer, Trainer) or trainer.device.type == torch.device(device).type:
        return trainer
    there = Trainer(
        copy.deepcopy(trainer.model),
        trainer.algorithm,
        trainer.data,
        batch_size=trainer.work.batch_size,
        epochs=trainer.work.epochs,
        steps=trainer.work.steps,
        loss=trainer.loss,
        metrics=trainer.metrics,
        path=cast(PathName, trainer.path.name),
        block_size=trainer.block_size,
        randomness=trainer.randomness,
        device=device,
        privacy=trainer.privacy,
    )
    there.state = trainer.state
    # Also where the rule for this device is another: clients may be on their way to a third.
    there.block_size = trainer.block_size
    return there
