"""Configs that runs have left behind, perhaps by another version of fedsim."""

from __future__ import annotations

from pathlib import Path

from fedsim.config.run_config import RunConfig, Scalar
from fedsim.errors import FedsimError

__all__ = ["past_config"]


def past_config(path: Path, flat: dict[str, Scalar] | None = None) -> RunConfig:
    """The config of a run that has begun, from its file or, flat, from its checkpoint.

    Keys that there were not yet when it began have their defaults.

    Parameters
    ----------
    path : path
        The run's config.toml.
    flat : mapping of str to Scalar, optional
        What to read instead.

    Raises
    ------
    FedsimError
        If this version of fedsim cannot read it; it says what to do.
    """
    try:
        return RunConfig.load(path) if flat is None else RunConfig.from_run_config(flat)
    except FedsimError as error:
        raise FedsimError(
            f"{path} is of a run that another version of fedsim has made, or has been edited: "
            f"{error} Choose another --out, and leave that directory to the version that made it."
        ) from None
