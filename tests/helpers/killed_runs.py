"""Runs that end as a killed process does: nothing of them is written any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedsim.runs.checkpoints import Checkpointing
from fedsim.runs.metrics import Row
from fedsim.runs.session import Session


class Killed(BaseException):
    """Stands for SIGKILL: nothing of fedsim's runs after it but what the test calls."""


@contextmanager
def killed_in(round_number: int) -> Iterator[None]:
    """The run of this block is killed when this round's checkpoint and row are to be written."""
    on_round = Checkpointing.on_round

    def killed(checkpointing: Checkpointing, row: Row) -> None:
        if row["round"] == round_number:
            checkpointing.wait()  # a process that is killed leaves no thread behind that writes
            raise Killed
        on_round(checkpointing, row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointing, "on_round", killed)
        patch.setattr(Session, "finish", lambda *_, **__: None)
        with pytest.raises(Killed):
            yield
