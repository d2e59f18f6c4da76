"""What every test shares."""

from __future__ import annotations

import os
import signal

# Before torch is imported by anybody.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import pytest
import torch
from hypothesis import settings

from fedsim import allowed_code

# A shell's background job ignores Ctrl-C, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("fedsim", deadline=None, max_examples=60)
settings.load_profile("fedsim")


@pytest.fixture(autouse=True)
def _nothing_stays_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test allows configs to name is not allowed in the next."""
    monkeypatch.setattr(allowed_code, "_now", allowed_code.now())


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
