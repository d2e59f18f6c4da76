"""Tests that start many processes are slow: they run when they are asked for by `-m slow`."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def ray_runtime() -> Iterator[None]:
    """One Ray for a module's runs, which join it: they start workers and no Ray of their own."""
    ray = pytest.importorskip("ray")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as quiet:
        quiet.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a warning
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    signal.signal(signal.SIGTERM, before)
    yield
    ray.shutdown()


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: starts many processes; run with `-m slow`")


def pytest_collection_modifyitems(config, items):
    if "slow" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="starts many processes; run with -m slow"))
