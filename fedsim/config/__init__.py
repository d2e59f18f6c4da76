"""The one description of a run: a TOML file of tables, read, checked and resolved."""

from __future__ import annotations

from fedsim.config.run_config import RunConfig
from fedsim.config.values import Scalar

__all__ = ["RunConfig", "Scalar"]
