from __future__ import annotations

import sys
import time

import pytest

from fedsim.deploy import supervisor as module
from fedsim.deploy.processes import Processes
from fedsim.deploy.supervisor import Service, Supervisor
from fedsim.errors import FedsimError

SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")
BROKEN = (sys.executable, "-S", "-c", "print('no such key')")


@pytest.fixture
def supervisor(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE", 0.0)
    with Processes(grace=0.2) as processes:
        yield Supervisor(processes)


def test_what_is_killed_is_started_again(supervisor):
    first = supervisor.start(Service("sleeper", SLEEPER))
    first.process.kill()
    first.process.wait()
    supervisor.tend()
    second = supervisor.running["sleeper"]
    assert second.alive()
    assert second.pid != first.pid


def test_what_lives_is_left_alone(supervisor):
    first = supervisor.start(Service("sleeper", SLEEPER))
    supervisor.tend()
    assert supervisor.running["sleeper"] is first


def test_what_was_stopped_stays_so(supervisor):
    first = supervisor.start(Service("sleeper", SLEEPER))
    supervisor.stop("sleeper")
    supervisor.tend()
    assert not first.alive()
    assert supervisor.running == {}


def test_starting_what_is_there_ends_the_first(supervisor):
    first = supervisor.start(Service("sleeper", SLEEPER))
    second = supervisor.start(Service("sleeper", SLEEPER))
    assert not first.alive()
    assert second.alive()


def test_what_keeps_ending_is_reported_with_its_log(supervisor, monkeypatch):
    monkeypatch.setattr(module, "_TRIES", 3)
    supervisor.start(Service("broken", BROKEN))

    def tend():
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            supervisor.tend()
            time.sleep(0.02)

    with pytest.raises(FedsimError, match="broken keeps ending:\nno such key"):
        tend()
