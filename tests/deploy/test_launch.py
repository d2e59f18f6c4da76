"""What is said of a run that failed on one of Flower's runtimes."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from fedsim.config import RunConfig
from fedsim.deploy.launch import _directory, _follow, _interruptible_by
from fedsim.errors import FedsimError
from fedsim.runs.channel import CallbackServer
from fedsim.runs.record import RunRecord
from fedsim.strategies import RunFailedError

LOG = """
ray.exceptions.OutOfMemoryError: the node ran out of memory
  File "vce_api.py", line 270, in run_api
The above exception was the direct cause of the following exception:
RuntimeError: Simulation Runtime crashed.
The above exception was the direct cause of the following exception:
RuntimeError: An error was encountered. Ending simulation.
"""


class Failing:
    """An operator whose run has failed."""

    def __init__(self, log: str) -> None:
        self._log = log

    def follow(self, run_id: int, look: Any) -> str:
        return "finished:failed"

    def log(self, run_id: int) -> str:
        return self._log


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (LOG, "OutOfMemoryError: the node ran out of memory"),
        ("RuntimeError: An error was encountered. Ending simulation.", "Ending simulation"),
        ("nothing that is an error", "nothing that is an error"),
    ],
)
def test_a_run_that_failed_in_a_simulation_says_what_flower_wraps(log: str, reason: str) -> None:
    with pytest.raises(RunFailedError, match=f"for run 7: .*{reason}"):
        _follow(Failing(log), 7, lambda: None)


def lose_the_superlink(*, asked: bool) -> None:
    with CallbackServer([]) as server, _interruptible_by(server):
        if asked:
            signal.raise_signal(signal.SIGINT)
        raise FedsimError("the SuperLink ended")


def test_a_run_whose_flower_a_scheduler_has_ended_too_is_interrupted() -> None:
    with pytest.raises(KeyboardInterrupt):
        lose_the_superlink(asked=True)
    with pytest.raises(FedsimError):
        lose_the_superlink(asked=False)


def test_a_run_without_a_directory_of_the_users_has_one_with_its_config() -> None:
    """Without it no report of the run can be written, which was said to be an error."""
    with _directory(None, RunConfig.of(["rounds=3"])) as path:
        assert RunRecord.read(path).config["rounds"] == 3
    assert not path.exists()
