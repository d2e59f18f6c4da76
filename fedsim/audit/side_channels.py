"""Everything that leaves a round beside the parameters: it must follow from what was released.

Metrics, what a release says of itself, state that outlives a round, what clients are sent next:
each number is looked at in three ways. Federations whose clients differ but have the same bounded
sum show the same. What noise alone does not move, no canary moves. And what is a function of the
released parameters where all clients send zeros is the same function of them with a canary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedsim.audit.adversarial_clients import equal_sums
from fedsim.audit.checks import Check, Floats, invariant
from fedsim.audit.observation import Observation, Parameters, Target, observe, parameters
from fedsim.audit.worlds import ALONE, OPPOSED
from fedsim.rows import Layout

SEEDS = 96
SMALLEST_DIFFERENCE = 1e-12
FUNCTION = 1e-8
"""A number whose residual is that part of its own spread is a function of the release."""
BROKEN = 1e-5
OUTLIER = 12.0
"""Residual stds by which a number that only nearly follows from the release may be off."""
MOST_NUMBERS = 512
NOISY = ("info.", "state.mechanism", "sent.")
"""What may follow from released scalars, too, or from released parameters in any way."""


@dataclass(frozen=True)
class NoiseOnly:
    """What leaves runs of clients that send zeros, at many seeds, with few parameters.

    Attributes
    ----------
    start : mapping of name to Tensor
    seeds : sequence of int
        The first is that of runs with a canary.
    runs : sequence of Observation
    """

    start: Parameters
    seeds: Sequence[int]
    runs: Sequence[Observation]

    @classmethod
    def of(cls, target: Target, start: Parameters, seed: int) -> NoiseOnly:
        """Make the runs, with one parameter a layer."""
        small = {name: tensor[:1] for name, tensor in start.items()}
        clients = target.silent_clients(small)
        seeds = range(seed, seed + SEEDS)
        return cls(small, seeds, [observe(target, clients, small, s, leaving=True) for s in seeds])

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


def longest_row(target: Target, layout: Layout) -> torch.Tensor:
    """A row ``[d]`` that is just as long as its bound, or as each of its bounds."""
    huge = torch.full((1, layout.d), 1e12, dtype=torch.float64)
    return target.mechanism.bound(huge, layout=layout)[0]


def side_channel_checks(target: Target, noise_only: NoiseOnly, mu: float) -> list[Check]:
    """Every test of what leaves a round beside the parameters.

    Parameters
    ----------
    target : Target
        Of one round more than it takes to see the canary, whose seed is that of ``noise_only``.
    mu : float
        How many standard deviations of the noise a client may move a release.
    """
    broken = _unprotected(target, noise_only.runs) or _unexplained(target, noise_only, mu)
    names = len(noise_only.runs[0].leaving[-1]) if noise_only.runs[0].leaving else 0
    return [
        _same_sums(target, noise_only.seeds[0]),
        invariant(
            "plan", "what else leaves a round",
            f"{names} numbers or arrays of {SEEDS} runs without and two with a canary", broken,
            "functions of what is released",
        ),
    ]  # fmt: skip


def _unprotected(target: Target, runs: Sequence[Observation]) -> str | None:
    """Clients' metrics leave a private round only where a setting says so."""
    if target.settings.shows_clients:
        return None
    for seen in runs:
        for numbers in seen.leaving:
            for name in numbers:
                if name.startswith(("metrics.", "evaluation.")):
                    return f"{name} leaves a round whose metrics are not released"
    return None


def _unexplained(target: Target, noise_only: NoiseOnly, mu: float) -> str | None:
    reference = _table(noise_only.runs)
    if reference is None:
        return "not the same numbers leave every round"
    names, values = reference
    designs = np.stack([_design(seen) for seen in noise_only.runs])
    coefficients = np.linalg.lstsq(designs, values, rcond=None)[0]
    spread = values.std(0)
    freedom = len(values) - np.linalg.matrix_rank(designs)
    residuals = np.sqrt(np.square(values - designs @ coefficients).sum(0) / max(freedom, 1))
    for world in (ALONE, OPPOSED):
        clients = target.world(world, noise_only.start, neighbour="zero-out")
        seen = observe(target, clients, noise_only.start, noise_only.seeds[0], leaving=True)
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
                    return f"{name} follows from the release only where nobody sends anything"
            elif mu <= 1 and off > OUTLIER * residuals[index] and not name.startswith(NOISY):
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
    start = parameters(64)
    layout = Layout.of(start)
    bounded = longest_row(target, layout)
    short, long = target.mechanism.bound(torch.stack([4 * bounded, 16 * bounded]), layout=layout)
    longer = not target.adapts(start) and torch.equal(short, long)
    runs = [
        observe(target, clients, start, seed, leaving=True)
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
