"""Normal draws at counters: Philox, the formula, and the text of the fused kernel."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
import torch
from scipy import stats

from fedsim.kernels.device_normals import (
    _MANTISSA,
    PIECE,
    _normal,
    normals_at,
    philox,
    signed,
    source,
)

# Random123 (Salmon et al. 2011), kat_vectors, "philox4x64 10": counter, key, the four words.
PUBLISHED = [
    "0000000000000000 0000000000000000 0000000000000000 0000000000000000 "
    "0000000000000000 0000000000000000 "
    "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b",
    "ffffffffffffffff ffffffffffffffff ffffffffffffffff ffffffffffffffff "
    "ffffffffffffffff ffffffffffffffff "
    "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0",
    "243f6a8885a308d3 13198a2e03707344 a4093822299f31d0 082efa98ec4e6c89 "
    "452821e638d01377 be5466cf34e90c6c "
    "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
]


def words(*numbers):
    return [torch.tensor([signed(number)]) for number in numbers]


def random_words(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(-(2**63), 2**63, shape))


@pytest.mark.parametrize("line", PUBLISHED)
def test_philox_gives_the_published_words(line):
    numbers = [int(word, 16) for word in line.split()]
    drawn = philox(words(*numbers[:4]), words(*numbers[4:6]))
    assert [int(word) % 2**64 for word in drawn] == numbers[6:]


def test_philox_is_numpys():
    key, counter = [3, 2**64 - 5], [2**64 - 2, 7, 2**63 + 1, 9]
    before = np.array([counter[0] - 1, *counter[1:]], dtype=np.uint64)
    numpys = np.random.Philox(counter=before, key=np.array(key, dtype=np.uint64))
    drawn = torch.cat(philox(words(*counter), words(*key)))
    assert np.array_equal(drawn.numpy().view(np.uint64), numpys.random_raw(4))


def test_a_normal_is_that_of_the_formula():
    word, other = random_words(2, 20_000)
    word[:4] = torch.tensor([0, -1, 1, -(2**63)])
    other[:4] = torch.tensor([-1, 0, _MANTISSA << 11, -(2**63)])
    u = (word.numpy().view(np.uint64).astype(np.longdouble) + 0.5).astype(np.float64) / 2**64
    v = (((other.numpy() >> 11) & _MANTISSA) + np.longdouble(0.5)) / 2**52
    size = np.sqrt(-2 * np.log(u.astype(np.longdouble))) * np.sin(v * np.longdouble(np.pi) / 2)
    expected = np.where(other.numpy() < 0, -size, size).astype(np.float64)
    np.testing.assert_allclose(_normal(word, other).numpy(), expected, rtol=5e-15, atol=0)
    assert 9.4 < float(_normal(*words(0, _MANTISSA << 11))) < 9.5


@pytest.mark.parametrize("hardened", [False, True])
def test_draws_are_standard_normal(hardened):
    draws = normals_at(random_words(4, 2), random_words(4, 3), 50_000, hardened=hardened)
    assert stats.kstest(draws.flatten().numpy(), "norm").pvalue > 1e-4
    assert abs(float((draws[:, 1:] * draws[:, :-1]).mean())) < 5 / 200_000**0.5
    assert abs(float((draws[0] * draws[1]).mean())) < 5 / 50_000**0.5


def test_a_hardened_draw_is_half_the_sum_of_four_normals_of_two_counters():
    key, counter = random_words(1, 2), random_words(1, 3)
    drawn = []
    for first in (14, 15):
        four = philox((torch.tensor([first]), *counter[0, :, None]), key[0, :, None])
        drawn += [_normal(*four[:2]), _normal(*four[2:])]
    hardened = normals_at(key, counter, 9, hardened=True)
    assert torch.equal(hardened[0, 7:8], sum(drawn[1:], drawn[0]) * 0.5)
    plain = normals_at(key, counter, 20, hardened=False)
    assert torch.equal(plain[0, 14:15], drawn[0])


@pytest.mark.parametrize("hardened", [False, True])
def test_a_stream_is_the_same_alone_in_pieces_and_for_any_size(monkeypatch, hardened):
    key, counter = random_words(3, 2), random_words(3, 3)
    together = normals_at(key, counter, 1000, hardened=hardened)
    monkeypatch.setattr("fedsim.kernels.device_normals.PIECE", 77)
    for k in range(3):
        one = slice(k, k + 1)
        alone = normals_at(key[one], counter[one], 700, hardened=hardened)
        assert torch.equal(alone, together[one, :700])
    assert PIECE > 77


SHIM = """
#include <cstring>
#include <cmath>
static double __dadd_rn(double a, double b) { return a + b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __ddiv_rn(double a, double b) { return a / b; }
static double __dsqrt_rn(double a) { return std::sqrt(a); }
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned __int128)a * b >> 64;
}
static double __longlong_as_double(long long a) { double b; std::memcpy(&b, &a, 8); return b; }
static long long __double_as_longlong(double a) { long long b; std::memcpy(&b, &a, 8); return b; }
"""
DRAW = """
extern "C" void draw(const long long *w, long long count, long long stride, long long *out) {
  for (long long j = 0; j < count; j++)
    out[j] = normals<long long>(j * stride, w[0], w[1], w[2], w[3], w[4]);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler of C++")
@pytest.mark.parametrize("terms", [1, 4])
def test_the_text_of_the_fused_kernel_draws_the_same_bytes(tmp_path, terms):
    """Compiled for a CPU, with CUDA's functions written out."""
    code, made = tmp_path / "draws.cpp", tmp_path / "draws.so"
    code.write_text(SHIM + source(terms) + DRAW)
    flags = ["-O2", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Werror"]
    subprocess.run(["g++", *flags, str(code), "-o", str(made)], check=True, timeout=120)
    key, counter = random_words(1, 2, seed=5), random_words(1, 3, seed=6)
    own = torch.cat([counter[0], key[0]]).contiguous()
    out = torch.empty(5000, dtype=torch.int64)
    count, stride = (ctypes.c_longlong(number) for number in (5000, -(-terms // 2)))
    pointers = ctypes.c_void_p(own.data_ptr()), ctypes.c_void_p(out.data_ptr())
    ctypes.CDLL(str(made)).draw(pointers[0], count, stride, pointers[1])
    expected = normals_at(key, counter, 5000, hardened=terms == 4)[0]
    assert torch.equal(out.view(torch.float64), expected)


@pytest.mark.parametrize("terms", [1, 4])
def test_torch_finds_the_kernel_in_its_text(terms):
    assert torch.cuda.jiterator._create_jit_fn(source(terms)).kernel_name == "normals"
