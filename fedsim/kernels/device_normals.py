"""Standard normal draws at counters, where their tensors are: the same bytes on every device.

A draw is a function of key and counter and of nothing else, so that no state has to follow a
client from block to block, and a captured step draws what an eager one does. Philox 4x64 with ten
rounds (Salmon et al. 2011) gives four random words for each counter; two words give a normal, by
the method of Box and Muller: ``sqrt(-2 ln u)`` times the cosine of a random angle, written as its
sign and its absolute value ``sin(pi/2 v)``.

Logarithm and sine are the series below, and every operation is one of integers, or one that IEEE
754 rounds in one way only (no fused multiply-add). So torch's operations, on a CPU or a GPU, and
the fused kernel give the same bytes. There are some hundred operations for each word: as one kernel
on a GPU they are limited by arithmetic, operation by operation by memory.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_log = logging.getLogger(__name__)

ROUNDS = 10
MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_LOW = 2**32 - 1
_MANTISSA, _ONE = 2**52 - 1, 1023 << 52
_ROOT_2 = math.sqrt(2)

# ln m = 2 s (1 + s^2/3 + s^4/5 + ...), s = (m - 1) / (m + 1), for m from 1/sqrt(2) to sqrt(2): the
# first term left out is below 2^-60 of the sum. sin x = x (1 - x^2/3! + ...) up to pi/2: 2^-59.
LOG_SERIES = [1 / (2 * k + 1) for k in range(12)]
SINE_SERIES = [(-1) ** k / math.factorial(2 * k + 1) for k in range(12)]

PIECE = 2**22
"""Draws that torch's operations make at a time: they need some twelve times their memory."""


def signed(word: int) -> int:
    """An unsigned 64-bit word as the int64 that has its bits."""
    return word - 2**64 if word >= 2**63 else word


def normals_at(key: Tensor, counter: Tensor, size: int, *, hardened: bool) -> Tensor:
    """Standard normal draws of ``n`` streams, float64 ``[n, size]``.

    Parameters
    ----------
    key : int64 Tensor ``[n, 2]``
        Words of Philox's keys.
    counter : int64 Tensor ``[n, 3]``
        The last three words of its counters. The first one counts within a stream: draw ``j`` takes
        the counters from ``j`` on, or from ``2 j`` on if hardened. No two draws share one.
    size : int
    hardened : bool
        Whether each is the sum of four normals, halved, as in `fedsim.mechanisms.NoiseSource`.
    """
    terms = 4 if hardened else 1
    first = torch.arange(size, dtype=torch.int64, device=key.device) * -(-terms // 2)
    words = [column.unsqueeze(1) for column in (*counter.unbind(1), *key.unbind(1))]
    # Not for tensors without data, which only say that they are on a GPU.
    fused = _fused(terms) if key.device.type == "cuda" and type(key) is Tensor else None
    if fused is not None:
        draws: Tensor = fused(first.unsqueeze(0), *words).view(torch.float64)
        return draws
    out = torch.empty(len(key), size, dtype=torch.float64, device=key.device)
    width = max(1, PIECE // max(1, len(key)))
    for start in range(0, size, width):
        out[:, start : start + width] = _sums(first[None, start : start + width], words, terms)
    return out


def uniforms_at(key: Tensor, counter: Tensor, size: int, piece: int = 0) -> Tensor:
    """Uniform draws in [0, 1) of ``n`` streams, float64 ``[n, size]``: four for each counter.

    Parameters as of `normals_at`; ``piece`` counts pieces of ``size`` draws in the streams.
    """
    count = -(-size // 4)
    first = torch.arange(piece * count, (piece + 1) * count, dtype=torch.int64, device=key.device)
    words = [column.unsqueeze(1) for column in (*counter.unbind(1), *key.unbind(1))]
    drawn = torch.stack(philox((first[None], *words[:3]), words[3:]), dim=2)
    return ((drawn.flatten(1)[:, :size] >> 11) & (2**53 - 1)).double() * 2.0**-53


def stream_words(
    streams: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys ``[n, 2]`` and counters ``[n, 3]`` of n streams, from their unsigned words."""
    rows = [[*map(signed, (*key, *counter))] for key, counter in streams]
    columns = torch.tensor(rows, dtype=torch.int64, device=device)
    return columns[:, :2], columns[:, 2:]


def _sums(first: Tensor, words: Sequence[Tensor], terms: int) -> Tensor:
    """Sums of ``terms`` normals from the blocks at ``first`` and after it, by torch's operations.

    ``words`` are the other three of the counter, and two of the key.
    """
    total: Tensor | None = None
    for block in range(-(-terms // 2)):
        drawn = philox((first + block, *words[:3]), (words[3], words[4]))
        for pair in range(min(2, terms - 2 * block)):
            normal = _normal(*drawn[2 * pair : 2 * pair + 2])
            total = normal if total is None else total + normal
    assert total is not None
    return total if terms == 1 else total * 0.5


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """The four words of Philox 4x64-10 for four of a counter and two of a key, all int64."""
    a, b, c, d = counter
    for number in range(ROUNDS):
        first, second = (signed(number * step % 2**64) for step in KEY_STEPS)
        high, low = _product(MULTIPLIERS[0], a)
        other_high, other_low = _product(MULTIPLIERS[1], c)
        a, b = other_high ^ b ^ (key[0] + first), other_low
        c, d = high ^ d ^ (key[1] + second), low
    return [a, b, c, d]


def _product(number: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 128-bit product, from 32-bit pieces whose products do not overflow."""
    high, low = number >> 32, number & _LOW
    word_high, word_low = _shifted(word), word & _LOW
    middle = word_low * high + _shifted(word_low * low)
    other = word_high * low + (middle & _LOW)
    return word_high * high + _shifted(middle) + _shifted(other), word * signed(number)


def _shifted(word: Tensor) -> Tensor:
    """The upper half of an unsigned word."""
    return (word >> 32) & _LOW


def _normal(word: Tensor, other: Tensor) -> Tensor:
    """A normal from two random words."""
    # u = (word + 1/2) / 2^64 in (0, 1], rounded once; the tail reaches 9.4 standard deviations.
    u = _shifted(word).double() * 2.0**32 + ((word & _LOW).double() + 0.5)
    bits = u.view(torch.int64)
    m = ((bits & _MANTISSA) | _ONE).view(torch.float64)
    large = m > _ROOT_2
    m = torch.where(large, m * 0.5, m)
    exponent = ((bits >> 52) - (1023 + 64) + large).double()
    s = (m - 1.0) / (m + 1.0)
    logarithm = exponent * math.log(2) + (s * 2.0) * _series(s * s, LOG_SERIES)
    x = (((other >> 11) & _MANTISSA).double() + 0.5) * 2.0**-52 * (math.pi / 2)
    size = _root(logarithm * -2.0) * (x * _series(x * x, SINE_SERIES))
    return torch.where(other < 0, -size, size)


def _root(values: Tensor) -> Tensor:
    """The square root, rounded once: on a CPU numpy's, since torch's is a library's estimate."""
    if values.is_cuda:
        return values.sqrt()
    return torch.from_numpy(np.sqrt(values.numpy()))


def _series(z: Tensor, coefficients: Sequence[float]) -> Tensor:
    """A polynomial in ``z``, by Horner's rule."""
    total = torch.full_like(z, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * z + coefficient
    return total


def source(terms: int) -> str:
    """The same as one function of CUDA for each number, by functions that are never fused."""

    def series(coefficients: Sequence[float]) -> str:
        text = repr(coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            text = f"__dadd_rn(__dmul_rn({text}, z), {coefficient!r})"
        return text

    return f"""template <typename T> double normal_of(T word_bits, T other_bits) {{
  unsigned long long word = word_bits, other = other_bits;
  double u = __dadd_rn(__dmul_rn((double)(word >> 32), 4294967296.0),
                       __dadd_rn((double)(word & {_LOW}ULL), 0.5));
  long long bits = __double_as_longlong(u);
  double m = __longlong_as_double((bits & {_MANTISSA}LL) | {_ONE}LL);
  int large = m > {_ROOT_2!r};
  m = large ? __dmul_rn(m, 0.5) : m;
  double exponent = (double)((bits >> 52) - {1023 + 64} + large);
  double s = __ddiv_rn(__dadd_rn(m, -1.0), __dadd_rn(m, 1.0)), z = __dmul_rn(s, s);
  double logarithm = __dadd_rn(__dmul_rn(exponent, {math.log(2)!r}),
                               __dmul_rn(__dmul_rn(s, 2.0), {series(LOG_SERIES)}));
  double v = __dmul_rn(__dadd_rn((double)((other >> 11) & {_MANTISSA}ULL), 0.5), {2.0**-52!r});
  double x = __dmul_rn(v, {math.pi / 2!r});
  z = __dmul_rn(x, x);
  double sine = __dmul_rn(x, {series(SINE_SERIES)});
  double size = __dmul_rn(__dsqrt_rn(__dmul_rn(logarithm, -2.0)), sine);
  return (other >> 63) ? -size : size;
}}
template <typename T> T normals(T first, T word1, T word2, T word3, T key0, T key1) {{
  double total = 0;
  for (int block = 0; block < {-(-terms // 2)}; block++) {{
    unsigned long long a = first + block, b = word1, c = word2, d = word3, k = key0, l = key1;
    for (int round = 0; round < {ROUNDS}; round++) {{
      unsigned long long high = __umul64hi({MULTIPLIERS[0]}ULL, a), low = {MULTIPLIERS[0]}ULL * a;
      unsigned long long high2 = __umul64hi({MULTIPLIERS[1]}ULL, c), low2 = {MULTIPLIERS[1]}ULL * c;
      a = high2 ^ b ^ k, b = low2, c = high ^ d ^ l, d = low;
      k += {KEY_STEPS[0]}ULL, l += {KEY_STEPS[1]}ULL;
    }}
    double normal = normal_of<T>(a, b);
    total = block ? __dadd_rn(total, normal) : normal;
    if ({terms} - 2 * block >= 2) total = __dadd_rn(total, normal_of<T>(c, d));
  }}
  return __double_as_longlong({"total" if terms == 1 else "__dmul_rn(total, 0.5)"});
}}"""


@functools.cache
def _fused(terms: int) -> Callable[..., Tensor] | None:
    """The fused kernel; None where it cannot be compiled or gives other bytes than torch does."""
    if not torch.cuda.is_available():
        return None
    try:
        kernel: Any = torch.cuda.jiterator._create_jit_fn(source(terms))
        words = torch.arange(1, 6, dtype=torch.int64, device="cuda").mul_(signed(KEY_STEPS[0]))
        first = torch.arange(2**14, dtype=torch.int64, device="cuda")
        columns = list(words.view(5, 1, 1))
        drawn = kernel(first[None], *columns).view(torch.float64)
        if torch.equal(drawn, _sums(first[None], columns, terms)):
            return kernel  # type: ignore[no-any-return]
        _log.warning("compiled for this GPU, draws of noise are wrong; torch's operations draw it")
    # Whatever torch's compiler for this GPU raises.
    except Exception as error:
        _log.warning("draws of noise are not compiled for this GPU (%s)", error)
    return None
