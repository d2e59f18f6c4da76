"""What tests of audits share."""

from __future__ import annotations

import pytest

from fedsim.audit import conformance


@pytest.fixture
def few_system_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the rounds with the system's entropy: a third of an audit's time otherwise."""
    monkeypatch.setattr(conformance, "SYSTEM_ROUNDS", 100)
