"""Functions of each number whose bits do not depend on the number's place in a tensor.

On a CPU torch takes most of a tensor by vector instructions and what is left at its end one by one,
and for a few functions (powers, sigmoid) the two differ in their last bits. Where a tensor holds a
block of clients, a client's bits would then depend on who stands beside it. Exponentials,
logarithms, roots and the four operations are the same in both.
"""

from __future__ import annotations

import math

from fedsim.lazy import Tensor


def power(values: Tensor, exponent: float) -> Tensor:
    """``values ** exponent`` of numbers that are not negative."""
    if exponent in (0.5, 1.0):  # a root, and a copy
        return values.pow(exponent)
    return (values.double().log() * exponent).exp_().to(values.dtype)


def powers_of(base: float, exponents: Tensor) -> Tensor:
    """``base ** exponents`` of a base in [0, 1) and exponents above 0."""
    log = math.log(base) if base else -math.inf
    return (exponents.double() * log).exp_().to(exponents.dtype)


def sigmoid_(values: Tensor) -> Tensor:
    """``1 / (1 + exp(-values))``, in place."""
    return values.neg_().exp_().add_(1).reciprocal_()
