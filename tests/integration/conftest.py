"""What tests of whole systems share."""

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
