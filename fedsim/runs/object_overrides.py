"""Objects from Python in the place of what a config names, and what tells them apart."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass

import torch
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from fedsim import datasets, models, partitions
from fedsim.arguments import shown
from fedsim.config import RunConfig
from fedsim.config.values import objects_in
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

    def mark(self, dataset: datasets.Dataset) -> str:
        """What a config says of them; empty where there are none. ``dataset`` as in `digest`.

        Two of one mark may differ in a model's values, so that runs of several seeds have one, and
        in the examples of data, of which no digest may be written.
        """
        parts = self._parts(dataset, lambda value: [str(value.dtype), list(value.shape)])
        kinds = {name: type(getattr(self, name)).__name__ for name in parts}
        return ", ".join(
            f"{name}={kinds[name]} {digest_of({name: part})[:8]}" for name, part in parts.items()
        )

    def refuse_missing(self, config: RunConfig) -> None:
        """Refuse a config of a run that was given objects which are not here.

        Raises
        ------
        FedsimError
        """
        missing = [f"{n}=" for n in objects_in(config.objects) if n not in self.names]
        if missing:
            raise FedsimError(
                f"objects = {shown(config.objects)}: this config is of a run that was given "
                f"{' and '.join(missing)} from Python, which its tables do not name; give the same "
                "to fedsim.run, or set objects to the empty string (--set objects=) for another "
                "run, of what the tables name."
            )

    def digest(self, dataset: datasets.Dataset) -> str:
        """Digest of what is public of them and determines a release; empty where there are none.

        ``dataset`` is ``data`` as the run takes it: classes that protected examples alone show are
        none of it. How many examples there are, and arrays of a partition, may be clients' data.
        """
        # Where a run starts is no secret: its values may be digested, as data may not.
        parts = self._parts(dataset, lambda value: hashlib.sha256(_bytes_of(value)).hexdigest())
        return digest_of(parts) if parts else ""

    def _parts(
        self, dataset: datasets.Dataset, of_value: Callable[[Tensor], object]
    ) -> dict[str, object]:
        """What is public of each, with something of every value of a model."""
        parts: dict[str, object] = {}
        if self.model is not None:
            values = models.values_of(self.model).items()
            parts["model"] = [
                re.sub(r" at 0x[0-9a-f]+", "", repr(self.model)),
                [
                    name
                    for name, parameter in self.model.named_parameters()
                    if parameter.requires_grad
                ],
                {name: of_value(value) for name, value in values},
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
        return parts


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
