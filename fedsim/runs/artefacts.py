"""What a run leaves behind: its directory, and how each file in it is written."""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save as serialise
from torch import Tensor

from fedsim.errors import FedsimError

__all__ = ["OUT", "RUNS", "RunDirectory"]

RUNS = "FEDSIM_RUNS"
"""Environment variable: the directory in which each run of a SuperLink gets one of its own."""

OUT = "FEDSIM_OUT"
"""Environment variable: the directory of the one run of a SuperLink that serves no other."""

Row = Mapping[str, float | int]

_FILES = ("config.toml", "metrics.csv", "ledger.jsonl", "model.safetensors", "report.html")


class RunDirectory:
    """The directory of one run.

    Parameters
    ----------
    path : path
        Need not exist; nothing is written before `claim`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.csv"
        self.ledger = self.path / "ledger.jsonl"
        self.model = self.path / "model.safetensors"
        self.clients = self.path / "clients"
        self.rows: list[dict[str, float | int]] = []

    def check_free(self, overwrite: bool) -> None:
        """Refuse a directory that holds a run, unless it may be overwritten.

        Raises
        ------
        FedsimError
            If it does, or if the path is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise FedsimError(f"--out {self.path} is a file; it must be a directory.")
        if not overwrite and any((self.path / name).exists() for name in _FILES):
            raise FedsimError(
                f"{self.path} already holds a run; choose another --out, or --overwrite it."
            )

    def claim(self, config_toml: str) -> None:
        """Make the directory, remove an earlier run's files and write the config."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.clients, ignore_errors=True)
        _replace(self.config, config_toml.encode())

    def add_row(self, row: Row) -> None:
        """Append one round to metrics.csv; columns are those of all rows so far."""
        known = self._columns()
        self.rows.append(dict(row))
        columns = self._columns()
        if columns == known:
            with self.metrics.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, columns).writerow(row)
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(self.rows)
        _replace(self.metrics, text.getvalue().encode())

    def save_model(self, arrays: Mapping[str, Tensor]) -> None:
        """Write model.safetensors."""
        content = serialise({name: tensor.contiguous().cpu() for name, tensor in arrays.items()})
        _replace(self.model, content)

    def _columns(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows for key in row))


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
