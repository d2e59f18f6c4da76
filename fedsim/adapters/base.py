"""Base class of adapters, which map a model to one with few trained weights, and no adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.arguments import as_text, check_arguments
from fedsim.errors import FedsimError
from fedsim.registry import register
from fedsim.settings import check_settings

if TYPE_CHECKING:
    from torch import nn


class Adapter(ABC):
    """Maps a model to an adapted one. Subclasses are frozen dataclasses of their settings."""

    def __post_init__(self) -> None:
        check_settings(self, "adapter.")

    @abstractmethod
    def __call__(self, model: nn.Module, seed: int) -> nn.Module:
        """Adapt a model, which may be changed in place.

        Parameters
        ----------
        model : nn.Module
            With its initial weights. The adapted model must have the same outputs.
        seed : int
            Seed of the adapter's random draws, which depend on nothing else.

        Returns
        -------
        nn.Module
            ``requires_grad`` is true for the adapter's parameters only. Parameters of the model
            that are not adapted keep their names.
        """

    def merged(self, model: nn.Module) -> nn.Module:
        """Merge the adapters into the weights, in place: a plain model with the same outputs.

        Raises
        ------
        FedsimError
            If this kind of adapter cannot be merged.
        """
        raise FedsimError(f"a {type(self).__name__} (adapter.name) cannot be merged into a model.")

    def files(self, model: nn.Module) -> Mapping[str, bytes]:
        """Files in peft's format with an adapted model's trained weights: contents by file name.

        Raises
        ------
        FedsimError
            If peft has no such adapter.
        """
        raise FedsimError(f"a {type(self).__name__} (adapter.name) has no form in peft's format.")

    def load(self, model: nn.Module, directory: Path) -> None:
        """Load the weights of a folder in peft's format into an adapted model.

        Raises
        ------
        FedsimError
            If the files are of another model or adapter, or damaged.
        """
        raise FedsimError(f"a {type(self).__name__} (adapter.name) does not read {directory}.")


@register("adapter", "none")
@dataclass(frozen=True)
class NoAdapter(Adapter):
    """No adapter: the parameters that `model.trainable` names are trained."""

    def __call__(self, model: nn.Module, seed: int) -> nn.Module:
        """Return the model unchanged."""
        return model


@check_arguments
def adapted(
    adapter: Adapter, model: nn.Module, seed: int, trainable: str = "", weights: str = ""
) -> nn.Module:
    """Adapt a model; only the adapter and the parameters named in ``trainable`` are trained.

    Parameters
    ----------
    adapter : Adapter
    model : nn.Module
        Changed in place.
    seed : int
        Seed of the adapter's random draws.
    trainable : str
        Shell patterns of further parameters to train, by their names before adapting.
    weights : str
        Folder in peft's format with the adapter's initial weights; empty for random ones.

    Raises
    ------
    FedsimError
        If the adapter does not fit the model, or adapts a layer of the parameters in ``trainable``.
    """
    if not isinstance(adapter, Adapter):
        raise FedsimError(f"adapter is {as_text(adapter)}; it must be a fedsim.adapters.Adapter.")
    # Imported here so that reading settings does not load torch.
    from fedsim.models import matching, refuse_unusable_parameters

    names = [name for name, _ in model.named_parameters()]
    besides = matching("model.trainable", trainable, names)
    model = adapter(model, seed)
    parameters = dict(model.named_parameters())
    overlap = [name for name in besides if name not in parameters or parameters[name].requires_grad]
    if overlap:
        raise FedsimError(
            f"model.trainable = '{trainable}' names {overlap[0]}, which adapter.targets adapts, so "
            "that it stays frozen; name only parameters outside the adapted layers, or leave that "
            "layer out of adapter.targets."
        )
    for name in besides:
        parameters[name].requires_grad_(True)
    if weights:
        adapter.load(model, Path(weights))
    refuse_unusable_parameters(model)
    return model
