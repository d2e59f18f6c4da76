"""Directories as runs leave them, written by hand: for what reads them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from fedsim import RunConfig


def left_run(directory: Path, rows: list[dict[str, Any]], **settings: Any) -> Path:
    """A run's config and metrics, without a ledger."""
    directory.mkdir(parents=True, exist_ok=True)
    config = RunConfig().replace(**settings)
    (directory / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    columns = list(dict.fromkeys(name for row in rows for name in row)) or ["round"]
    with (directory / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return directory
