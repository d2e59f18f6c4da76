"""Tests that start many processes are slow: they run when they are asked for by `-m slow`."""

from __future__ import annotations

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: starts many processes; run with `-m slow`")


def pytest_collection_modifyitems(config, items):
    if "slow" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="starts many processes; run with -m slow"))
