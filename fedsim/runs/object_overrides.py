"""Objects from Python in the place of what a config names, and what tells them apart."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields, is_dataclass

import torch
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from fedsim import datasets, models, partitions
from fedsim.errors import FedsimError
from fedsim.privacy.digest import digest_of
from fedsim.settings import check_settings
from fedsim.strategies import DPFedAvg


@dataclass(frozen=True, eq=False)
class ObjectOverrides:
    """Objects in the place of what tables of a config name; None for what the table says.

    Attributes
    ----------
    model : nn.Module, optional
        Initialised; it is copied.
    data : Dataset, optional
    partition : Partition, optional
        Of as many clients as the config declares.
    strategy : Strategy, optional
        Of Flower's, one that refines the mean; it is copied, and takes the place of [server].
    """

    model: nn.Module | None = None
    data: datasets.Dataset | None = None
    partition: partitions.Partition | None = None
    strategy: Strategy | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        if self.model is not None:
            models.refuse_other_than_numbers(self.model)
        if isinstance(self.strategy, DPFedAvg):
            raise FedsimError(
                "strategy is a DPFedAvg, which a config's tables say ([cohort], [mechanism], "
                "[noise], [server]); it must be a strategy of Flower's that refines the mean, such "
                "as FedAdam, or the object's own start(grid, initial_arrays) makes its rounds."
            )

    @property
    def names(self) -> list[str]:
        """The names of those that were given."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]

    def digest(self, dataset: datasets.Dataset) -> str:
        """Digest of what is public of them and determines a release; empty where there are none.

        ``dataset`` is ``data`` as the run takes it: classes that protected examples alone show are
        none of it. How many examples there are, and arrays of a partition, may be clients' data.
        """
        parts: dict[str, object] = {}
        if self.model is not None:
            # Where a run starts is no secret: its values may be digested, as data may not.
            values = models.values_of(self.model).items()
            parts["model"] = [
                re.sub(r" at 0x[0-9a-f]+", "", repr(self.model)),
                [
                    name
                    for name, parameter in self.model.named_parameters()
                    if parameter.requires_grad
                ],
                {name: hashlib.sha256(_bytes_of(value)).hexdigest() for name, value in values},
            ]
        if self.data is not None:
            x, y = dataset.train.x, dataset.train.y
            example = [list(x.shape[1:]), str(x.dtype), list(y.shape[1:]), str(y.dtype)]
            constants = [dataset.num_classes, dataset.vocabulary, dataset.mean, dataset.std]
            parts["data"] = [dataset.name, dataset.source, example, constants]
        if self.partition is not None:
            parts["partition"] = _described(self.partition)
        if self.strategy is not None:
            parts["strategy"] = _described(self.strategy)
        return digest_of(parts) if parts else ""


def _described(thing: object) -> list[object]:
    """Its class and what settings it has: what else it holds may be clients' data."""
    held = getattr(thing, "__dict__", {})
    if is_dataclass(thing):
        held = {field.name: getattr(thing, field.name) for field in fields(thing) if field.init}
    settings = {
        name: value
        for name, value in sorted(held.items())
        if isinstance(value, bool | int | float | str)
    }
    return [type(thing).__qualname__, settings]


def _bytes_of(value: Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().view(-1)
    return f"{value.dtype} {list(value.shape)} ".encode() + flat.view(torch.uint8).numpy().tobytes()
