"""Block trainers that need no model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedsim.array_types import Ints
from fedsim.rows.block import Block, BlockTrainer


class Fixed(BlockTrainer):
    """A block trainer whose clients send the same updates in every round."""

    def __init__(
        self,
        updates: Tensor,
        *,
        block_size: int = 100,
        failing: tuple[int, ...] = (),
        examples: list[int] | None = None,
    ) -> None:
        self.updates = updates
        self.population = len(updates)
        self.block_size = block_size
        self.failing = failing
        self.examples = np.array(examples or [1] * len(updates), dtype=np.float64)
        self.rounds: list[list[int]] = []

    def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        self.rounds.append(client_ids.tolist())
        for start in range(0, len(client_ids), self.block_size):
            ids = client_ids[start : start + self.block_size]
            ok = np.array([i not in self.failing for i in ids.tolist()])
            yield Block(
                client_ids=ids,
                rows=self.updates[ids].masked_fill(torch.from_numpy(~ok)[:, None], 0.0),
                metrics={"num-examples": self.examples[ids], "loss": self.examples[ids]},
                ok=ok,
                reasons=dict.fromkeys(ids[~ok].tolist(), "raised"),
            )

    def evaluate(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        ones = np.ones(len(client_ids))
        yield Block.sent(client_ids, None, {"num-examples": ones, "loss": 2 * ones})
