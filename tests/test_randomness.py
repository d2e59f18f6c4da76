from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.randomness import Address, Draws, Purpose, Randomness, Stream

ADDRESSES = [
    {"purpose": purpose, "level": level, "round": t, "client": client, "part": part}
    for purpose in Purpose
    for level in purpose.levels
    for t in (0, 3)
    for client in (0, 3)
    for part in (0, 3)
]


def test_addresses_that_differ_in_one_thing_share_no_draw():
    drawn = [Randomness(5, "ab").generator(**address).bytes(64) for address in ADDRESSES]
    assert len(set(drawn)) == len(drawn) == 112


def test_streams_do_not_run_into_each_other():
    # A stream counts in a word of its own: the next value of any other word is another stream.
    source = Randomness(5)
    base = source.generator(Purpose.NOISE, level="client", round=1, client=1, part=1)
    seen = {base.bytes(32) for _ in range(2000)}
    for changed in ({"round": 2}, {"client": 2}, {"part": 2}, {"level": "example"}):
        address = {"level": "client", "round": 1, "client": 1, "part": 1} | changed
        other = source.generator(Purpose.NOISE, **address)
        assert not seen & {other.bytes(32) for _ in range(2000)}


def test_a_moved_generator_draws_what_a_new_one_would():
    stream = Stream()
    for address in ADDRESSES:
        moved = Randomness(7).generator(**address, stream=stream)
        new = Randomness(7).generator(**address)
        # An odd number of each: what is left over of a word must not reach the next address.
        assert moved.random(3).tolist() == new.random(3).tolist()
        assert (
            moved.integers(9, size=3, dtype=np.int32).tolist()
            == new.integers(9, size=3, dtype=np.int32).tolist()
        )


def test_two_releases_of_one_seed_share_noise_and_amplified_samples_never():
    first, second = Randomness(5, "ab"), Randomness(5, "cd")
    for address in ADDRESSES:
        equal = first.generator(**address).bytes(32) == second.generator(**address).bytes(32)
        assert equal == (address["purpose"].keyed_by == "seed")
    secret = {purpose for purpose in Purpose if purpose.keyed_by == "release"}
    assert secret == {Purpose.NOISE, Purpose.STEP_NOISE, Purpose.SHARE, Purpose.AMPLIFIED_SAMPLE}


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_seeds_have_keys_of_their_own(first, second):
    draws = [Randomness(s).generator(Purpose.INIT, level="run").bytes(16) for s in (first, second)]
    assert (draws[0] == draws[1]) == (first == second)


def test_a_run_draws_the_same_in_another_process():
    script = (
        "from fedsim.randomness import *; source = Randomness(3, 'ab');"
        "print(source.generator(Purpose.NOISE, level='client', round=2).bytes(8).hex())"
    )
    once = Randomness(3, "ab").generator(Purpose.NOISE, level="client", round=2).bytes(8).hex()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == once


def test_the_operating_systems_draws_are_never_repeated():
    source = Randomness(None, "ab")
    assert source.entropy == "system"
    draws = [source.generator(Purpose.NOISE, level="client").bytes(16) for _ in range(50)]
    assert len(set(draws)) == 50


def test_a_first_time_is_watched_and_asking_again_is_not(monkeypatch):
    seen: list[Address] = []
    monkeypatch.setattr(Randomness, "address_observer", staticmethod(seen.append))
    source = Randomness(3)
    first = source.generator(Purpose.NOISE, level="client", round=2)
    again = source.for_replay().generator(Purpose.NOISE, level="client", round=2)
    assert first.bytes(8) == again.bytes(8)
    Draws(source, "client", amplified=True).generator(4, 1)
    assert [address[1:] for address in seen] == [
        ("client", Purpose.NOISE, 2, 0, 0),
        ("client", Purpose.AMPLIFIED_SAMPLE, 4, 0, 1),
    ]


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ({"level": "run"}, "NOISE has no level 'run'"),
        ({"level": "client", "round": -1}, "round -1"),
        ({"level": "client", "client": 2**63}, "client 9223372036854775808"),
        ({"level": "client", "part": 2**48}, "part 281474976710656"),
    ],
)
def test_an_address_that_does_not_exist_is_refused(address, named):
    with pytest.raises(ValueError, match=named):
        Randomness(3).generator(Purpose.NOISE, **address)


def test_a_seed_out_of_range_is_refused():
    with pytest.raises(ValueError, match="seed is -1"):
        Randomness(-1)


def test_counters_are_the_addresses_of_generators_and_are_noted_once_each(monkeypatch):
    used = []
    monkeypatch.setattr(Randomness, "address_observer", used.append)
    source, address = Randomness(3, "ab"), {"level": "example", "round": 2, "client": 7}
    key, words = source.counters(Purpose.STEP_NOISE, **address, parts=range(3, 5))
    assert [(one.part, one.round, one.client) for one in used] == [(3, 2, 7), (4, 2, 7)]
    generator = source.for_replay().generator(Purpose.STEP_NOISE, **address, part=4)
    state = generator.bit_generator.state["state"]
    assert tuple(state["key"].tolist()) == key
    assert state["counter"].tolist() == [0, words[0] + 1, words[1], words[2]]
    source.for_replay().counters(Purpose.STEP_NOISE, **address, parts=range(3, 5))
    assert len(used) == 2
    with pytest.raises(ValueError, match="no counters"):
        Randomness(None).counters(Purpose.STEP_NOISE, **address, parts=range(1))
    # Dropout is no secret: from the operating system it has a fresh key each time.
    fresh = [Randomness(None).counters(Purpose.DROPOUT, **address, parts=range(3)) for _ in "12"]
    assert fresh[0][0] != fresh[1][0]
    assert fresh[0][1] == fresh[1][1]
    with pytest.raises(ValueError, match="no level 'client'"):
        source.counters(Purpose.STEP_NOISE, level="client", round=1, client=0, parts=range(1))
