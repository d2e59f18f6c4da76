"""Configs: a run described by a TOML file of tables, which is read and checked here."""

from __future__ import annotations

from fedsim.config.run_config import RunConfig
from fedsim.config.values import Scalar

__all__ = ["RunConfig", "Scalar"]
