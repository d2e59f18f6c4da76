"""What one test of an audit found, and how sure it can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import chdtr, chdtrc, log_ndtr

__all__ = ["Check", "Subject", "chi_square_p", "invariant", "normal_p", "smallest"]

Floats = npt.NDArray[np.float64]
Subject = Literal["sampler", "bound", "noise", "plan", "ledger"]


@dataclass(frozen=True)
class Check:
    """A test of one thing that the claim takes for granted.

    Attributes
    ----------
    subject : "sampler", "bound", "noise", "plan" or "ledger"
        Which of the five things that make a release it is about.
    name : str
    looked_at : str
        At what, and how much of it.
    measured, allowed : str
        The statistic, and what it should have been.
    p_value : float
        Probability of something at least as odd, if all is as claimed; every comparison that
        the test makes is counted. 0 for what cannot happen at all.
    """

    subject: Subject
    name: str
    looked_at: str
    measured: str
    allowed: str
    p_value: float

    def __str__(self) -> str:
        return f"{self.subject}: {self.name}"

    def refutes(self, risk: float) -> bool:
        """Whether so small a p-value is evidence, where true claims may fail at this rate."""
        return self.p_value <= risk


def invariant(subject: Subject, name: str, looked_at: str, broken: str | None, holds: str) -> Check:
    """A test of something that is true or false: ``broken`` says what was seen instead."""
    return Check(subject, name, looked_at, broken or holds, holds, 0.0 if broken else 1.0)


def smallest(p_values: npt.ArrayLike) -> float:
    """The p-value of the oddest of several comparisons (Bonferroni)."""
    values = np.asarray(p_values, dtype=np.float64)
    return float(min(1.0, values.size * values.min())) if values.size else 1.0


def normal_p(scores: npt.ArrayLike) -> Floats:
    """Two-sided p-values of standard normal scores."""
    return np.asarray(2 * np.exp(log_ndtr(-np.abs(np.asarray(scores, dtype=np.float64)))))


def chi_square_p(values: npt.ArrayLike, degrees: npt.ArrayLike) -> Floats:
    """Two-sided p-values of chi-square statistics: too large and too small are both odd."""
    x, k = np.asarray(values, dtype=np.float64), np.asarray(degrees, dtype=np.float64)
    return np.asarray(np.minimum(1.0, 2 * np.minimum(chdtr(k, x), chdtrc(k, x))))
