"""What every test shares."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator

# Before torch is imported by anybody.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import pytest
import torch
from hypothesis import settings
from slow_cases import SLOW_EXAMPLES, spanning

from fedsim import allowed_code

# In its first backward pass torch begins a thread for each device that it knows, and then refuses
# others in forked processes, which lack them. Tests that pretend to have a GPU come after this.
torch.zeros(1, requires_grad=True).sum().backward()

# A shell's background job ignores Ctrl-C, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("fast", deadline=None, max_examples=30)
settings.register_profile("slow", deadline=None, max_examples=30 * SLOW_EXAMPLES)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the run: pyproject.toml's is fast, and that of ``-m slow`` slow."""
    settings.load_profile("slow" if config.option.markexpr == "slow" else "fast")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Leave most cases of tests marked `spanning` to the slow run, which has every property too."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("spanning") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
        if config.option.markexpr == "slow" and getattr(item.obj, "is_hypothesis_test", False):
            item.add_marker("slow")
    for own in cases.values():
        for item in {*own} - {*spanning(own)}:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _nothing_stays_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test allows configs to name is not allowed in the next."""
    monkeypatch.setattr(allowed_code, "_current", allowed_code.current())


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """Tests kill processes, whose files outlive them, and never cut the power."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield
