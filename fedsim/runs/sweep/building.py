"""What members of a sweep are made of: each its own, but for the data, which is read once."""

from __future__ import annotations

from pathlib import Path

from fedsim import datasets
from fedsim.config import RunConfig, Scalar
from fedsim.runs.build import Build
from fedsim.runs.sweep.members import Member

__all__ = ["Builder", "ReadData", "SharingBuild"]

ReadData = dict[tuple[tuple[str, Scalar], ...], datasets.Dataset]
"""Data sets by the table that says them."""


class Builder:
    """Builds members over data that is read once.

    Parameters
    ----------
    out : path
        Of the sweep.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._read: ReadData = {}

    def build(self, member: Member) -> Build:
        """A fresh one, with a trainer that remembers no run."""
        return SharingBuild(member.config, self.out / member.label, self._read)


class SharingBuild(Build):
    """`Build`, of a data set that others may have read."""

    def __init__(self, config: RunConfig, out: Path | None, read: ReadData) -> None:
        super().__init__(config, out)
        self._read = read

    def _loaded(self) -> datasets.Dataset:
        flat = self.config.to_run_config().items()
        table = tuple((key, value) for key, value in flat if key.startswith("data."))
        if table not in self._read:
            self._read[table] = super()._loaded()
        return self._read[table]
