"""What an adapter is: settings that map a model to one of which only a few weights are trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.arguments import shown
from fedsim.errors import FedsimError
from fedsim.rows.alternation import Alternation
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
            With its weights. What it gives must not change by being adapted.
        seed : int
            Of what the adapter draws, which depends on nothing else.

        Returns
        -------
        nn.Module
            ``requires_grad`` holds of the adapter's parameters and of no other. Those of the model
            that stay what they were have their names.
        """

    def alternation(self, model: nn.Module) -> Alternation | None:
        """Which parameters of an adapted model rest in which rounds; None where none ever does."""
        return None

    def merged(self, model: nn.Module) -> nn.Module:
        """The model without adapters that gives what the adapted one does; it is changed in place.

        Raises
        ------
        FedsimError
            If there is no such model.
        """
        raise FedsimError(f"a {type(self).__name__} (adapter.name) cannot be merged into a model.")

    def files(self, model: nn.Module) -> Mapping[str, bytes]:
        """An adapted model's trained weights in peft's format, by the names of its files.

        Raises
        ------
        FedsimError
            If peft has no such adapter.
        """
        raise FedsimError(f"a {type(self).__name__} (adapter.name) has no form in peft's format.")

    def load(self, model: nn.Module, directory: Path) -> None:
        """Give an adapted model the weights of such files.

        Raises
        ------
        FedsimError
            If they are of another model or adapter, or damaged.
        """
        raise FedsimError(f"a {type(self).__name__} (adapter.name) does not read {directory}.")


def adapted(
    adapter: Adapter, model: nn.Module, seed: int, trainable: str = "", weights: str = ""
) -> nn.Module:
    """A model with an adapter, of which nothing else is trained but what is named.

    Parameters
    ----------
    adapter : Adapter
    model : nn.Module
        Changed in place.
    seed : int
        Of what the adapter draws.
    trainable : str
        Shell patterns of parameters that are trained besides, by their names in ``model`` as it
        is given.
    weights : str
        A folder in peft's format whose weights the adapter starts from; empty for fresh ones.

    Raises
    ------
    FedsimError
        If the adapter does not fit the model, or takes what is to be trained besides.
    """
    if not isinstance(adapter, Adapter):
        raise FedsimError(f"adapter is {shown(adapter)}; it must be a fedsim.adapters.Adapter.")
    # Only now: settings are read without torch.
    from fedsim.models import matching, refuse_unusable_parameters

    names = [name for name, _ in model.named_parameters()]
    besides = matching("model.trainable", trainable, names)
    model = adapter(model, seed)
    parameters = dict(model.named_parameters())
    overlap = [name for name in besides if name not in parameters or parameters[name].requires_grad]
    if overlap:
        raise FedsimError(
            f"model.trainable = '{trainable}' names {overlap[0]}, which adapter.targets adapts and "
            "the adapter leaves as it is; name only what is trained besides the adapter, or leave "
            "that layer out of adapter.targets."
        )
    for name in besides:
        parameters[name].requires_grad_(True)
    if weights:
        adapter.load(model, Path(weights))
    refuse_unusable_parameters(model)
    return model
