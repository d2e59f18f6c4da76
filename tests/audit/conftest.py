"""What tests of audits share."""

from __future__ import annotations

import pytest
from whitebox import evidence


@pytest.fixture
def few_system_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the rounds with the system's entropy: a third of an audit's time otherwise."""
    monkeypatch.setattr(evidence, "SYSTEM_ROUNDS", 100)
