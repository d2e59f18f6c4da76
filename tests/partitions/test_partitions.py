"""Every partitioner: exhaustive, disjoint, seeded, and what each promises of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.errors import FedsimError
from fedsim.partitions import (
    CIFAR10_PAIRS,
    IID,
    Dirichlet,
    Examples,
    InterpolatedPathological,
    Partition,
    Shards,
    parse_groups,
    subsample,
)

Labels = npt.NDArray[np.int64]

CIFAR10_LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 5000))

labels_of_any_kind = st.lists(st.integers(0, 6), min_size=1, max_size=60).map(np.array)
seeds = st.integers(0, 2**63 - 1)


def assert_disjoint_and_exhaustive(parts: list[Labels], n: int) -> None:
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(n))


def own_fractions(parts: list[Labels], labels: Labels) -> Labels:
    """Fraction of each client's examples that are of its own classes, one client a pair."""
    return np.array(
        [np.isin(labels[p], own).mean() for p, own in zip(parts, CIFAR10_PAIRS, strict=True)]
    )


@given(labels=labels_of_any_kind, seed=seeds, data=st.data())
def test_every_partition_is_disjoint_exhaustive_and_a_function_of_its_seed(
    labels: Labels, seed: int, data: st.DataObject
) -> None:
    n = len(labels)
    clients = data.draw(st.integers(1, n))
    groups = tuple((int(label),) for label in np.unique(labels))
    rho = data.draw(st.floats(0, 1))
    partitions: list[Partition] = [
        IID(clients, seed),
        Shards(max(1, n // clients // 2), clients, seed),
        Dirichlet(data.draw(st.floats(1e-6, 1e6)), clients, seed),
        InterpolatedPathological(rho, groups, len(groups), seed),
    ]
    for partition in partitions:
        parts = partition.indices(labels)
        assert len(parts) == partition.clients
        assert_disjoint_and_exhaustive(parts, n)
        again = partition.indices(labels.tolist())
        assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: IID(7, seed),
        lambda seed: Dirichlet(0.3, 7, seed),
        lambda seed: Shards(2, 7, seed),
        lambda seed: InterpolatedPathological(0.5, seed=seed),
        lambda seed: InterpolatedPathological(0.0, clients=10, seed=seed),
    ],
)
def test_another_seed_gives_another_partition(make: type[IID]) -> None:
    first, second = make(1).indices(CIFAR10_LABELS), make(2).indices(CIFAR10_LABELS)
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))


@given(n=st.integers(1, 200), data=st.data())
def test_iid_sizes_differ_by_one_at_most(n: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, n))
    sizes = [len(part) for part in IID(clients).indices(np.zeros(n, int))]
    assert max(sizes) - min(sizes) <= 1


def test_digits_fall_on_479_clients_of_three() -> None:
    parts = IID(479, seed=1).indices(np.arange(1437) % 10)
    assert {len(part) for part in parts} == {3}


def test_iid_clients_have_every_class_in_its_share() -> None:
    parts = IID(5, seed=3).indices(CIFAR10_LABELS)
    counts = np.array([np.bincount(CIFAR10_LABELS[part]) for part in parts])
    deviation = np.sqrt(10000 * 0.1 * 0.9 * 0.8)  # hypergeometric: 10,000 of 50,000
    assert np.abs(counts - 1000).max() < 4.5 * deviation


def test_pathological_clients_have_exactly_their_own_two_classes() -> None:
    parts = InterpolatedPathological(0.0, seed=1).indices(CIFAR10_LABELS)
    for part, own in zip(parts, CIFAR10_PAIRS, strict=True):
        np.testing.assert_array_equal(part, np.flatnonzero(np.isin(CIFAR10_LABELS, own)))


def test_a_groups_examples_are_dealt_evenly_and_its_classes_as_chance_has_it() -> None:
    labels = np.repeat([0, 1, 2], [30, 70, 50])
    partition = InterpolatedPathological(0.0, ((0, 1), (2,)), clients=5, seed=4)
    parts = partition.indices(labels)
    assert sorted(len(part) for part in parts[:3]) == [33, 33, 34]
    assert [len(part) for part in parts[3:]] == [25, 25]
    zeros = [int((labels[part] == 0).sum()) for part in parts[:3]]
    assert sum(zeros) == 30
    assert max(zeros) - min(zeros) > 1


@pytest.mark.parametrize("rho", [0.0, 0.1, 0.33, 0.5, 0.9, 1.0])
def test_interpolated_sizes_are_exact_and_own_class_fractions_as_expected(rho: float) -> None:
    m = round(rho * 10000)
    fractions = []
    for seed in range(6):
        parts = InterpolatedPathological(rho, seed=seed).indices(CIFAR10_LABELS)
        assert [len(part) for part in parts] == [10000] * 5
        assert_disjoint_and_exhaustive(parts, 50000)
        fractions.append(own_fractions(parts, CIFAR10_LABELS))
    # Of the m dealt back the own ones are hypergeometric: m draws, m good ones in 5m.
    deviation = np.sqrt(m * 0.2 * 0.8 * (4 * m) / max(5 * m - 1, 1)) / 10000
    expected = 1 - rho + rho / 5
    assert np.abs(np.array(fractions) - expected).max() <= 4.5 * deviation + 1e-12


@pytest.mark.parametrize("rho", [0.0, 0.33, 1.0])
def test_exactly_the_given_number_can_have_changed_hands(rho: float) -> None:
    parts = InterpolatedPathological(rho, seed=5).indices(CIFAR10_LABELS)
    kept = own_fractions(parts, CIFAR10_LABELS) * 10000
    assert (kept >= 10000 - round(rho * 10000)).all()


def test_exchanged_examples_are_drawn_from_both_classes_of_a_pair() -> None:
    parts = InterpolatedPathological(0.5, seed=2).indices(CIFAR10_LABELS)
    counts = np.array([np.bincount(CIFAR10_LABELS[part], minlength=10) for part in parts])
    for client, (one, other) in enumerate(CIFAR10_PAIRS):
        assert abs(counts[client, one] - counts[client, other]) < 250  # 5 standard deviations
    foreign = counts.copy()
    for client, own in enumerate(CIFAR10_PAIRS):
        foreign[client, list(own)] = 500
    assert np.abs(foreign - 500).max() < 110


@pytest.mark.parametrize("rho", [0.0, 0.4])
def test_any_groups_of_any_labels_hold_for_any_number_of_clients(rho: float) -> None:
    labels = np.repeat([3, 7, 11, 20, 21], [100, 50, 70, 30, 10])
    groups = parse_groups("3; 7,11,20; 21")
    partition = InterpolatedPathological(rho, groups, clients=8, seed=4)
    parts = partition.indices(labels)
    assert_disjoint_and_exhaustive(parts, 260)
    # 3, 3 and 2 clients a group; a class is shared evenly.
    assert [len(part) for part in parts] == [34, 33, 33, 50, 50, 50, 5, 5]
    if rho == 0:
        members = [set(labels[part]) for part in parts]
        assert members[:3] == [{3}] * 3
        assert all(one <= {7, 11, 20} for one in members[3:6])
        assert members[6:] == [{21}] * 2


def test_shards_of_sorted_labels_give_few_classes_and_equal_sizes() -> None:
    labels = np.random.default_rng(2).permutation(np.repeat(np.arange(10), 6000))
    parts = Shards(2, 100, seed=1).indices(labels)
    assert_disjoint_and_exhaustive(parts, 60000)
    assert {len(part) for part in parts} == {600}
    classes = [len(np.unique(labels[part])) for part in parts]
    assert max(classes) == 2
    assert min(classes) == 1  # who drew two shards of one class


@given(labels=labels_of_any_kind, shards=st.integers(1, 4), seed=seeds)
def test_a_client_holds_no_more_than_its_runs_of_sorted_labels(
    labels: Labels, shards: int, seed: int
) -> None:
    clients = max(1, len(labels) // (2 * shards))
    if clients * shards > len(labels):
        return
    rank = np.empty(len(labels), int)
    rank[np.argsort(labels, kind="stable")] = np.arange(len(labels))
    for part in Shards(shards, clients, seed).indices(labels):
        places = np.sort(rank[part])
        assert 1 + (np.diff(places) > 1).sum() <= shards


def test_dirichlet_mean_share_is_even_and_spread_follows_alpha() -> None:
    labels = np.zeros(1000, int)
    clients = 10
    for alpha in (0.1, 1.0, 10.0):
        shares = np.array(
            [
                [len(part) / 1000 for part in Dirichlet(alpha, clients, seed).indices(labels)]
                for seed in range(400)
            ]
        )
        # A share is Beta(alpha, (k - 1) alpha) but for rounding.
        variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
        assert np.abs(shares.mean(0) - 0.1).max() < 4.5 * np.sqrt(variance / 400)
        assert shares.var() == pytest.approx(variance, rel=0.15)


def test_large_alpha_is_even_and_small_alpha_leaves_clients_empty() -> None:
    even = Dirichlet(1e6, 5, seed=1).indices(CIFAR10_LABELS)
    assert all(abs(len(part) - 10000) < 100 for part in even)
    lumpy = Dirichlet(1e-6, 20, seed=1).indices(CIFAR10_LABELS)
    assert sum(len(part) == 0 for part in lumpy) >= 10
    assert_disjoint_and_exhaustive(lumpy, 50000)


def test_one_class_only_is_no_special_case() -> None:
    labels = np.full(30, 4)
    for partition in (
        IID(7),
        Dirichlet(0.5, 7),
        Shards(2, 7),
        InterpolatedPathological(0.5, ((4,),), clients=7),
    ):
        assert_disjoint_and_exhaustive(partition.indices(labels), 30)


def test_a_subsample_keeps_some_of_each_clients_own() -> None:
    parts = Dirichlet(0.3, 40, seed=1).indices(CIFAR10_LABELS)
    fewer = subsample(parts, 500, seed=1)
    for part, kept in zip(parts, fewer, strict=True):
        assert len(kept) == min(500, len(part))
        assert np.isin(kept, part).all()
        assert (np.diff(kept) > 0).all()
    alone = subsample([*parts[:3], parts[3][:10]], 500, seed=1)
    assert np.array_equal(alone[2], fewer[2])  # whoever else there is


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: IID(0), "partition.clients is 0; it must be at least 1"),
        (lambda: IID(31).indices(np.zeros(30, int)), "only 30 training examples; .* at most 30"),
        (lambda: Shards(0, 5), "partition.shards is 0"),
        (lambda: Shards(2, 16).indices(np.zeros(30, int)), "need 32 shards, but .* only 30"),
        (lambda: Dirichlet(0.0, 5), "partition.alpha is 0.0; it must be at least"),
        (lambda: Dirichlet(float("nan"), 5), "partition.alpha is nan"),
        (lambda: Dirichlet(1.0, -1), "partition.clients is -1"),
        (lambda: InterpolatedPathological(1.1), "partition.randomness is 1.1"),
        (lambda: InterpolatedPathological(float("nan")), "partition.randomness is nan"),
        (lambda: InterpolatedPathological(0.1, clients=3), "at least 5, one for each of"),
        (
            lambda: InterpolatedPathological(0.1).indices(np.arange(12)),
            "lack the classes 10, 11",
        ),
        (
            lambda: InterpolatedPathological(0.1).indices(np.array([0, 8, 3, 2, 4])),
            "the group 1,9 of partition.groups has 0 training examples for 1 clients",
        ),
        (lambda: parse_groups("1,9;9,2"), "the class 9 twice"),
        (lambda: parse_groups("1,9;;2"), "partition.groups is '1,9;;2'"),
        (lambda: parse_groups(""), "partition.groups is ''"),
        (lambda: parse_groups("cat,dog"), "such as '1,9;0,8"),
        (lambda: parse_groups("1;-2"), "0 or above"),
        (lambda: InterpolatedPathological(0.1, ((1,), ())), "every group must have a class"),
        (lambda: Shards(1, 2).indices([0.5, 1.0]), "must be integers .* 'iid' and 'by-owner'"),
        (lambda: IID(2).indices([]), r"targets of shape \(0,\); they must be \[N, ...\]"),
        (lambda: Shards(1, 2).indices([0, -1]), "the label -1 is negative"),
        (lambda: subsample([np.arange(3)], 0, seed=1), "at least 1"),
    ],
)
def test_what_cannot_be_dealt_ends_with_its_sentence(make: type, sentence: str) -> None:
    with pytest.raises(FedsimError, match=sentence):
        make()


def test_a_partition_of_ones_own_without_clients_is_told_what_it_lacks() -> None:
    @dataclass(frozen=True)
    class Lacking(Partition):
        region: int = 3

        def deal(self, examples: Examples, generator: np.random.Generator) -> list[Any]:
            return []

    with pytest.raises(FedsimError, match="names Lacking, which has no clients; a partition must"):
        Lacking()


def test_groups_parse_from_the_string_of_a_config() -> None:
    assert parse_groups("1,9;0,8;3,5;2,6;4,7") == CIFAR10_PAIRS
    assert parse_groups(" 1, 2 ; 3 ;") == ((1, 2), (3,))


def test_a_partition_that_deals_nothing_is_named() -> None:
    @dataclass(frozen=True)
    class Forgetful(Partition):
        clients: int = 2
        seed: int = 0

        def deal(self, examples, generator):
            del examples, generator

    with pytest.raises(FedsimError, match="Forgetful, whose deal gives a NoneType"):
        Forgetful().indices([0, 1])
