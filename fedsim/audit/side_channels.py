"""Everything that leaves a round beside the parameters: it must follow from what was released.

Metrics, numbers that describe a release, state that outlives a round, what clients are sent next:
each number is tested in three ways. Federations whose clients differ but have the same bounded
sum show the same number. A number that noise does not change, no canary changes. And a function
of the released parameters where all clients send zeros is the same function with a canary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedsim.audit.adversarial_clients import equal_sums
from fedsim.audit.checks import Check, Floats, invariant
from fedsim.audit.noise_scale import allowed_length
from fedsim.audit.observation import Observation, Target, observe, parameters
from fedsim.audit.worlds import ALONE, OPPOSED, longest_row

SEEDS = 96
SMALLEST_DIFFERENCE = 1e-12
FUNCTION = 1e-8
"""A number whose residual is at most this part of its spread is a function of the release."""
BROKEN = 1e-5
OUTLIER = 12.0
"""Residual stds by which a number that only nearly follows from the release may be off."""
MOST_NUMBERS = 512
NOISY = ("info.", "state.mechanism", "sent.")
"""Numbers that may follow from released scalars too, or from released parameters in any way."""


@dataclass(frozen=True)
class NoiseOnly:
    """What leaves runs of clients that send zeros, at many seeds, with few parameters.

    Attributes
    ----------
    target : Target
        With one parameter a layer.
    seed : int
        Of the first run, and of runs with a canary.
    runs : sequence of Observation
    """

    target: Target
    seed: int
    runs: Sequence[Observation]

    @classmethod
    def of(cls, target: Target, seed: int) -> NoiseOnly:
        """Make the runs."""
        small = target.with_model({name: tensor[:1] for name, tensor in target.start.items()})
        clients = small.silent_clients()
        seeds = range(seed, seed + SEEDS)
        return cls(small, seed, [observe(small, clients, s, leaving=True) for s in seeds])

    def stds(self, index: int) -> dict[str, float]:
        """Standard deviations of the numbers that the mechanism shows after round ``index + 1``.

        Less what the size of the cohort explains: clients that send zeros add to a number, too.
        """
        shown = [seen.shown[index] for seen in self.runs if len(seen.shown) > index]
        if len(shown) < len(self.runs) or not shown[0]:
            return {}
        values = np.array([list(numbers.values()) for numbers in shown])
        sizes = np.array([seen.sizes[index] for seen in self.runs])
        residuals = _residuals(np.stack([np.ones(len(sizes)), sizes], 1), values)
        stds = np.sqrt(np.square(residuals).sum(0) / (len(values) - 2))
        stds[np.ptp(values, axis=0) == 0] = 0.0
        return dict(zip(shown[0], stds.tolist(), strict=True))


def _residuals(design: Floats, values: Floats) -> Floats:
    return np.asarray(values - design @ np.linalg.lstsq(design, values, rcond=None)[0])


def side_channel_checks(noise_only: NoiseOnly) -> list[Check]:
    """Every test of what leaves a round beside the parameters.

    Parameters
    ----------
    noise_only : NoiseOnly
        Of one round more than the first one in which the canary is sampled.
    """
    broken = _unprotected(noise_only) or _unexplained(noise_only)
    names = len(noise_only.runs[0].leaving[-1]) if noise_only.runs[0].leaving else 0
    return [
        _same_sums(noise_only.target, noise_only.seed),
        invariant(
            "plan", "what else leaves a round",
            f"{names} numbers or arrays of {SEEDS} runs without and two with a canary", broken,
            "functions of the release",
        ),
    ]  # fmt: skip


def _unprotected(noise_only: NoiseOnly) -> str | None:
    """Clients' metrics leave a private round only where a setting says so."""
    if noise_only.target.settings.shows_clients:
        return None
    for seen in noise_only.runs:
        for numbers in seen.leaving:
            for name in numbers:
                if name.startswith(("metrics.", "evaluation.")):
                    return f"{name} leaves a round whose metrics are not released"
    return None


def _unexplained(noise_only: NoiseOnly) -> str | None:
    target = noise_only.target
    reference = _table(noise_only.runs)
    if reference is None:
        return "not the same numbers leave every round"
    names, values = reference
    # The runs without a canary show how each number follows from the release: by a linear
    # regression on moves, their squares and norms. A number is then constant, a function of the
    # release (its residuals are rounding), or has noise of its own; a canary may change none of
    # these three relations.
    designs = np.stack([_design(seen) for seen in noise_only.runs])
    coefficients = np.linalg.lstsq(designs, values, rcond=None)[0]
    spread = values.std(0)
    freedom = len(values) - np.linalg.matrix_rank(designs)
    residuals = np.sqrt(np.square(values - designs @ coefficients).sum(0) / max(freedom, 1))
    # A canary that may move a release by several standard deviations is no small deviation.
    small = allowed_length(target.event) <= 1
    for world in (ALONE, OPPOSED):
        clients = target.world(world, neighbour="zero-out")
        seen = observe(target, clients, noise_only.seed, leaving=True)
        table = _table([seen])
        if table is None or table[0] != names:
            return "other numbers leave a round with a canary"
        found, predicted = table[1][0], _design(seen) @ coefficients
        for index, name in enumerate(names):
            size = 1 + abs(values[0, index])
            off = abs(found[index] - predicted[index])
            if spread[index] <= SMALLEST_DIFFERENCE * size:
                if abs(found[index] - values[0, index]) > SMALLEST_DIFFERENCE * size:
                    return f"{name} has no noise and moves with a canary"
            elif residuals[index] <= FUNCTION * spread[index]:
                if off > BROKEN * (spread[index] + abs(found[index])):
                    return f"{name} follows from the release only if all clients send zeros"
            elif small and off > OUTLIER * residuals[index] and not name.startswith(NOISY):
                return f"{name} is {off / residuals[index]:.3g} std from what the release explains"
    return None


def _table(runs: Sequence[Observation]) -> tuple[list[str], Floats] | None:
    """Every number after the last round ``[runs, numbers]``, with names; None if they differ."""
    rows: list[list[float]] = []
    names: list[str] = []
    for seen in runs:
        if not seen.leaving:
            return None
        flat = _flat(seen.leaving[-1])
        if names and list(flat) != names:
            return None
        names = list(flat)
        rows.append(list(flat.values()))
    return names[:MOST_NUMBERS], np.array(rows)[:, :MOST_NUMBERS]


def _flat(numbers: Mapping[str, Floats]) -> dict[str, float]:
    return {
        f"{name}[{index}]" if len(entries) > 1 else name: float(entry)
        for name, entries in numbers.items()
        for index, entry in enumerate(entries)
    }


def _design(seen: Observation) -> Floats:
    """What may explain a number: released moves, their squares and norms, sizes of cohorts."""
    moves = seen.moves
    scale = np.maximum(np.linalg.norm(moves, axis=1), 1e-300)
    return np.concatenate([[1.0], seen.sizes, moves.ravel(), np.square(moves).ravel(), scale])


def _same_sums(target: Target, seed: int) -> Check:
    """Federations with the same bounded sums show the same, to the last bit."""
    target = target.with_model(parameters(64))
    bounded = longest_row(target.mechanism, target.layout)
    rows = torch.stack([4 * bounded, 16 * bounded])
    short, long = target.mechanism.bound(rows, layout=target.layout)
    longer = not target.adapts and torch.equal(short, long)
    runs = [
        observe(target, clients, seed, leaving=True)
        for clients in equal_sums(target.population, bounded, target.sides, longer=longer)
    ]
    return invariant(
        "plan", "nothing but the sum",
        f"{target.rounds} rounds of two federations with the same sums of other rows",
        _difference(*runs), "the same in all that leaves a round",
    )  # fmt: skip


def _difference(first: Observation, second: Observation) -> str | None:
    if not np.array_equal(first.moves, second.moves):
        return "the released parameters differ"
    for before, after in zip(first.leaving, second.leaving, strict=False):
        if before.keys() != after.keys():
            return "other numbers leave a round"
        for name in before:
            if not np.array_equal(before[name], after[name], equal_nan=True):
                return f"{name} differs"
    return None if len(first.leaving) == len(second.leaving) else "the runs end at other rounds"
