"""Epsilon by Opacus's accountant of privacy random variables, for whoever wants a second opinion.

Ours composes loss distributions that are rounded to an upper bound on a grid; this one convolves
discretised privacy random variables and adds a margin of error (Gopi, Lee & Wutschitz 2021). Two
codes that share nothing should agree within that margin. Opacus loads torch, so it is imported
when it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedsim.errors import FedsimError
from fedsim.privacy.pld import Component

__all__ = ["EPSILON_ERROR", "prv_epsilon"]

EPSILON_ERROR = 0.01
"""What the answer may be too large by."""


def prv_epsilon(counts: Mapping[Component, int], delta: float) -> float:
    """Upper bound on epsilon at ``delta`` of ``counts[c]`` releases of each component c.

    Raises
    ------
    FedsimError
        If Opacus cannot account for them.
    """
    from opacus.accountants.prv import PRVAccountant

    if not counts:
        return 0.0
    accountant = PRVAccountant()
    accountant.history = [(c.noise_multiplier, c.rate, count) for c, count in counts.items()]
    try:
        with np.errstate(all="ignore"):  # log(1 - rate) where the rate is 1
            return float(accountant.get_epsilon(delta, eps_error=EPSILON_ERROR))
    except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
        raise FedsimError(
            f"--prv: Opacus's PRV accountant gives up on these releases ({error}); leave it out."
        ) from None
