"""A data set by its name, or from files of the user's own."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from fedsim import registry
from fedsim.datasets.dataset import Dataset
from fedsim.errors import FedsimError
from fedsim.settings import settings_of


def kind_of(name: str) -> str:
    """The registered name of what a name stands for: a name that is none is a path to files."""
    return name if ":" in name or name in registry.names("data") else "files"


def load(
    name: str,
    *,
    directory: str | Path = "",
    download: bool = False,
    normalize: bool = False,
    train: str = "",
    test: str = "",
    protected: bool = False,
    **settings: Any,
) -> Dataset:
    """Load a data set: into memory, or mapped where it is a folder of ``.npy`` files.

    Parameters
    ----------
    name : str
        One of ``fedsim config list data``, a path to files of one's own (`Files`), or
        ``module:name``: anything that is called with ``settings`` and those of ``directory``,
        ``download`` and ``normalize`` that it takes, and gives a `Dataset` (or something that does
        when it is called with these).
    directory : path
        Where data sets are kept; ``data`` when empty. A named one is read from
        ``<name>.npz`` there (``fashion_mnist.npz`` counts too), or else from torchvision's own
        files. A path that does not exist as it stands is looked for there too.
    download : bool
        Whether torchvision may fetch what is missing.
    normalize : bool
        Whether batches are normalised per channel or feature. The numbers are the usual published
        ones for a named data set, and the file's own for files of one's own: none are computed
        here, since statistics of the training data would be a release of their own.
    train, test : str
        Which examples there are, as ``start:stop`` of the file's order; either may be
        left out. ``"10000:"`` is all but the first 10,000, say because those are public.
    protected : bool
        Whether a run protects the training examples: a number of theirs that is not finite is then
        no reason to refuse all of them. The update that it spoils is not finite, and its client
        alone fails; so does that of a label or token which is none, and nothing is found in them
        that test examples say. At example level such an example's gradient counts as zero.
    settings
        The data set's own; see `Files`.

    Raises
    ------
    FedsimError
        If there is no such data set, its files are missing or not usable, or it has no such
        examples. Errors of the user's own code come through as they are.

    Examples
    --------
    >>> load("digits").train.x.shape
    torch.Size([1437, 64])
    """
    offered = {
        "directory": Path(directory or "data"), "download": download, "normalize": normalize,
        "protected": protected,
    }  # fmt: skip
    with registry.current_directory_importable():
        thing: Any = registry.find("data", kind_of(name), "data.name")
        takes = {setting.name for setting in settings_of(thing)}
        for key in settings.keys() - takes if dataclasses.is_dataclass(thing) else ():
            raise FedsimError(f"data.{key} has no effect with data.name = '{name}'.")
        dataset = thing(**settings, **_taken(thing, {**offered, "path": name}))
        if not isinstance(dataset, Dataset) and callable(dataset):
            dataset = dataset(**_taken(dataset, offered))
    if not isinstance(dataset, Dataset):
        raise FedsimError(
            f"data.name is '{name}', which gives {type(dataset).__name__}; it must give a "
            "fedsim.datasets.Dataset."
        )
    if ":" in name:
        dataset.check_sizes()
    return dataset.ranged(train, test) if train or test else dataset


def _taken(thing: Any, offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the offered keywords that a callable takes."""
    parameters = inspect.signature(thing).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {name: value for name, value in offered.items() if name != "path"}
    return {name: value for name, value in offered.items() if name in parameters}
