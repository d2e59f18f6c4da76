"""Python objects used instead of what a config names, and the digests that identify them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass

import torch
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from fedsim import datasets, models, partitions
from fedsim.arguments import as_text
from fedsim.config import RunConfig
from fedsim.config.values import objects_in
from fedsim.errors import FedsimError
from fedsim.named_tensors import by_name
from fedsim.privacy.digest import digest_of
from fedsim.settings import check_settings
from fedsim.strategies import DPFedAvg


@dataclass(frozen=True, eq=False)
class ObjectOverrides:
    """Python objects that replace what a config's tables name; None to use the table.

    Attributes
    ----------
    model : nn.Module, optional
        An initialised model; it is copied.
    data : Dataset, optional
    partition : Partition, optional
        Its number of clients must be the config's.
    strategy : Strategy, optional
        A Flower strategy that post-processes the mean; it is copied, and replaces [server].
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
                "strategy is a DPFedAvg, which a config's tables describe ([cohort], [mechanism], "
                "[noise], [server]); it must be a strategy of Flower's that refines the mean, such "
                "as FedAdam, or be run by its own start(grid, initial_arrays)."
            )

    @property
    def names(self) -> list[str]:
        """Names of the objects that are given."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]

    def mark(self, dataset: datasets.Dataset) -> str:
        """Value of the config's ``objects``; empty without objects. ``dataset`` as in `digest`.

        Objects with the same mark may differ in a model's values, so that runs with several seeds
        share one, and in the examples of data, since no digest of them may be written.
        """
        parts = self._parts(dataset, lambda value: [str(value.dtype), list(value.shape)])
        kinds = {name: type(getattr(self, name)).__name__ for name in parts}
        return ", ".join(
            f"{name}={kinds[name]} {digest_of({name: part})[:8]}" for name, part in parts.items()
        )

    def refuse_missing(self, config: RunConfig) -> None:
        """Refuse the config of a run that was given objects if they are not given now.

        Raises
        ------
        FedsimError
        """
        missing = [f"{n}=" for n in objects_in(config.objects) if n not in self.names]
        if missing:
            raise FedsimError(
                f"objects = {as_text(config.objects)}: this config is of a run that was given "
                f"{' and '.join(missing)} from Python, which its tables do not name; give the same "
                "to fedsim.run, or set objects to the empty string (--set objects=) for another "
                "run, from the tables alone."
            )

    def digest(self, dataset: datasets.Dataset) -> str:
        """Digest of the objects' public properties that determine a release; empty without objects.

        ``dataset`` is ``data`` as the run uses it, that is, without properties found in protected
        examples. The number of examples and a partition's arrays may be clients' data, and are not
        digested.
        """
        # Initial weights are public, so that their values may be digested, unlike data.
        parts = self._parts(dataset, lambda value: hashlib.sha256(_value_bytes(value)).hexdigest())
        return digest_of(parts) if parts else ""

    def _parts(
        self, dataset: datasets.Dataset, of_value: Callable[[Tensor], object]
    ) -> dict[str, object]:
        """Public properties of each object; ``of_value`` is applied to each value of a model."""
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
            example = [dataset.input_shape, by_name(lambda one: str(one.dtype), x)]
            example += [list(y.shape[1:]), str(y.dtype)]
            constants = [dataset.num_classes, dataset.vocabulary, dataset.mean, dataset.std]
            parts["data"] = [dataset.name, dataset.source, example, constants]
        if self.partition is not None:
            parts["partition"] = _class_and_settings(self.partition)
        if self.strategy is not None:
            parts["strategy"] = _class_and_settings(self.strategy)
        return parts


def _class_and_settings(subject: object) -> list[object]:
    """Class and scalar settings of an object; its other attributes may be clients' data."""
    values = getattr(subject, "__dict__", {})
    if is_dataclass(subject):
        values = {
            field.name: getattr(subject, field.name) for field in fields(subject) if field.init
        }
    settings = {
        name: value
        for name, value in sorted(values.items())
        if isinstance(value, bool | int | float | str)
    }
    return [type(subject).__qualname__, settings]


def _value_bytes(value: Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().view(-1)
    return f"{value.dtype} {list(value.shape)} ".encode() + flat.view(torch.uint8).numpy().tobytes()
