"""RunState: everything of a run that outlives a round, as tensors and JSON."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedsim.config import Scalar
from fedsim.strategies.state import Tree, joined, parted

__all__ = ["RunState", "versions"]

FORMAT = 1


@cache
def versions() -> dict[str, str]:
    """Of the packages whose arithmetic a run's bytes depend on."""
    return {"torch": torch.__version__} | {
        name: importlib.metadata.version(name) for name in ("numpy", "flwr")
    }


@dataclass(frozen=True)
class RunState:
    """What a run has reached after a round; whoever has it needs nothing else to go on.

    Its parts are given by `state` and taken by `restore` of those whose they are; how independent
    noise and fedsim's own cohorts are drawn is a function of seed, release digest and round, and
    has no state.

    Attributes
    ----------
    round : int
        The last one whose release was made.
    parameters : mapping of name to Tensor
        Reached after it: the run's arrays.
    strategy : Tree
        Of `DPFedAvg`: sampler, mechanism and noise, server optimiser, means of the clients' state,
        failures, budget.
    clients : mapping of name to Tensor
        What clients keep: `BlockTrainer.state`.
    ledger_head : str
        Hash of the ledger's last line; a ledger that goes on from it has it among its heads.
    ledger_length : int
        Lines.
    metrics_length : int
        Rows of metrics.csv up to and with this round's.
    metrics_code : str
        HMAC of the rows before it, under the run's key; empty in checkpoints of older versions.
    row : mapping of str to number
        This round's, which may not have been written yet.
    config : mapping of str to scalar
        The resolved config, flat: what a resumed run is held against.
    client_ledgers : mapping of client id to mapping
        `Ledger.state` of those that protect their examples, where their ledgers are at hand.
    callbacks : Tree
        Of those that keep anything, by their places; and why one of them has stopped the run.
    versions : mapping of str to str
        Of the packages that arithmetic depends on.
    """

    round: int
    parameters: Mapping[str, Tensor]
    strategy: Tree
    clients: Mapping[str, Tensor]
    ledger_head: str
    ledger_length: int
    metrics_length: int
    row: Mapping[str, float | int]
    config: Mapping[str, Scalar]
    metrics_code: str = ""
    client_ledgers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    callbacks: Tree = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)

    def parted(self) -> tuple[dict[str, Tensor], str]:
        """Its tensors, by names of their own, and JSON for the rest."""
        values = {state_field.name: getattr(self, state_field.name) for state_field in fields(self)}
        return parted({"format": FORMAT, **values})

    @classmethod
    def joined(cls, tensors: Mapping[str, Tensor], text: str) -> RunState:
        """What `parted` took apart.

        Raises
        ------
        ValueError
            If it was written by a version whose format is another.
        """
        tree = joined(tensors, text)
        if (written := tree.pop("format", None)) != FORMAT:
            raise ValueError(f"the run's state has format {written}; this version reads {FORMAT}.")
        # Checkpoints of older versions know nothing of these.
        tree.setdefault("client_ledgers", {})
        tree.setdefault("metrics_code", "")
        if tree.keys() != {part.name for part in fields(cls)}:
            raise ValueError("the run's state lacks something, or has what this version does not.")
        return cls(**tree)
