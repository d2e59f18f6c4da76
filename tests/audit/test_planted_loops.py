"""Planted bugs in the styles of four packages: each is found, and named."""

from __future__ import annotations

from typing import Any

import planted_loops
import pytest

from fedsim.audit import TargetClaim, Verdict, audit_target

SAMPLED = {"sampling": "poisson", "rate": 0.5}
EXAMPLES = {**SAMPLED, "row": "example"}
BY_HAND = {**EXAMPLES, "adjacency": "add-remove"}
LOCAL = {"noise_multiplier": None, "epsilon": 0.5, "rounds": 1, "adjacency": "replace-one"}
FEW = {"rounds": 2}

# Style, bug, claim, cause.
BUGS: list[tuple[str, str, dict[str, Any], str]] = [
    ("flower_server", "noise of the mean in each update", FEW, "times too small"),
    ("flower_server", "the sum is clipped", FEW, "the sum is clipped instead of each row"),
    ("flower_server", "momentum without noise", FEW, "added again in later rounds, without noise"),
    ("flower_mod", "local, sensitivity times epsilon", LOCAL, "times too small"),
    (
        "flower_mod", "the last array is not in the norm", FEW,
        "the norm leaves out a part of the row",
    ),
    (
        "opacus",
        "the batch's gradient is clipped",
        EXAMPLES,
        "the sum is clipped instead of each row",
    ),
    ("opacus", "noise in float16", EXAMPLES, "noise has too few values"),
    (
        "opacus", "a generator with a seed of its own in each step", EXAMPLES,
        "noise is the same in every run",
    ),
    ("batches", "divides by the batch's size", BY_HAND, "the denominator is counted"),
    ("pfl", "each parameter is clipped", {}, "each array is clipped by itself"),
    ("pfl", "noise is divided by the cohort twice", {}, "times too small"),
    ("pfl", "Laplace noise of the same variance", {}, "not Gaussian"),
    ("pfl", "every second noise is the one before, negated", {}, "noise is used again"),
    ("pfl", "users clip to the first C", {}, "rows are clipped to another C than noise has"),
    ("nvflare", "each entry is clipped", {}, "each entry is clipped by itself"),
    ("nvflare", "a layer is left out", {}, "an array has no noise"),
    ("nvflare", "noise by the size of each array", {}, "another size in an array"),
    ("sampler", "nobody twice in a row", SAMPLED, "rounds are not drawn independently"),
    ("sampler", "at a higher rate", SAMPLED, "more is sampled than claimed"),
    ("sampler", "one client in every round", SAMPLED, "some are sampled more often"),
    ("sampler", "two clients together", SAMPLED, "rows are not drawn independently"),
    ("sampler", "a cohort for two rounds", SAMPLED, "rounds are not drawn independently"),
]  # fmt: skip
HONEST: list[tuple[str, str, dict[str, Any]]] = [
    ("flower_server", "", FEW), ("flower_mod", "", FEW), ("flower_mod", "local", LOCAL),
    ("opacus", "", EXAMPLES), ("batches", "", BY_HAND), ("pfl", "", {}), ("nvflare", "", {}),
    ("sampler", "", SAMPLED), ("pfl", "a server's rate that falls", {}),
]  # fmt: skip
FAST = {
    "nvflare: each entry is clipped",
    "sampler: two clients together",
    "nvflare: ",
}


# What shows in how often rows are sampled takes more runs than what shows in how far they move: as
# many as an audit makes in its minute.
FEW_RUNS, MANY_RUNS = 48, 240
COUNTED = {
    "divides by the batch's size",
    "one client in every round",
    "two clients together",
}


def verdict(style: str, bug: str, changes: dict[str, Any], seed: int = 1) -> Verdict:
    runs = MANY_RUNS if bug in COUNTED else FEW_RUNS
    usual = {"noise_multiplier": 1.0, "rounds": 5, "adjacency": "zero-out"}
    claim = TargetClaim(**{**usual, **changes})
    return audit_target(getattr(planted_loops, style)(bug), claim, runs=runs, seed=1000 * seed)


def named(bugs: list[Any]) -> list[Any]:
    """One bug of each style that is fast to run is always planted."""
    names = [f"{bug[0]}: {bug[1]}" for bug in bugs]
    marks = [() if name in FAST else pytest.mark.slow for name in names]
    return [
        pytest.param(*bug, id=name, marks=mark)
        for bug, name, mark in zip(bugs, names, marks, strict=True)
    ]


@pytest.mark.parametrize(("style", "bug", "changes", "cause"), named(BUGS))
def test_a_bug_of_a_peers_style_is_found_and_named(
    style: str, bug: str, changes: dict[str, Any], cause: str
) -> None:
    found = {finding.cause for finding in verdict(style, bug, changes).failed}
    assert any(cause in one for one in found), found


@pytest.mark.parametrize(("style", "bug", "changes"), named(HONEST))
def test_the_same_code_without_a_bug_is_accepted(
    style: str, bug: str, changes: dict[str, Any]
) -> None:
    honest = verdict(style, bug, changes)
    assert honest.accepted, honest.refuting


@pytest.mark.slow
@pytest.mark.parametrize(("style", "bug", "changes", "cause"), BUGS)
def test_it_is_found_with_every_seed(
    style: str, bug: str, changes: dict[str, Any], cause: str
) -> None:
    for seed in range(2, 6):
        found = {finding.cause for finding in verdict(style, bug, changes, seed).failed}
        assert any(cause in one for one in found), (seed, found)
