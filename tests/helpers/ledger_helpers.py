"""Releases to write into ledgers."""

from __future__ import annotations

from pathlib import Path

from fedsim.cohorts import PoissonCohort
from fedsim.privacy import Accountant, Entry, Event, Ledger
from fedsim.privacy.laws import PoissonLaw

COHORT = PoissonCohort(0.2, 479)
DELTA = 1e-5
ZEROED = Event(noise_multiplier=1.5, law=PoissonLaw(rate=0.2, adjacency="zero-out"))


def release(round: int, z: float = 1.5) -> dict[str, object]:
    """What `Ledger.record` is told of a round."""
    return {
        "round": round,
        "event": Event.of(COHORT, z),
        "clip_norm": 1.0,
        "mechanism": "normalization",
        "entropy": "config",
        "run": "seed-1",
    }


def written(path: Path, rounds: int = 3) -> bytes:
    """A ledger file of so many rounds."""
    ledger = Ledger(path, delta=DELTA)
    for t in range(1, rounds + 1):
        ledger.record(Entry(**release(t)))
    return path.read_bytes()


def spent(rounds: int, z: float = 1.5) -> float:
    """Epsilon after so many rounds."""
    return Accountant([Event.of(COHORT, z, count=rounds)]).epsilon(DELTA)
