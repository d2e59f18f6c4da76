"""One release, in one line."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedsim.cohorts import FullCohort, PoissonCohort
from fedsim.federation.aggregation.shares import ShareRequest, make_shares, split
from fedsim.mechanisms import Mechanism, NoiseSource, Release, Releaser
from fedsim.privacy import Independent
from fedsim.privacy.noise import Noise
from fedsim.privacy.plan import ReleasePlan
from fedsim.rows import DenseRows, Layout


def layout_of_rows(rows: Tensor) -> Layout:
    """A row is one entry."""
    return Layout.of({"w": torch.empty(rows.shape[1], dtype=rows.dtype)})


def plan_of(mechanism: Mechanism, noise: Noise, denominator: float) -> ReleasePlan[Mechanism]:
    """A plan with this denominator, whose sampler draws everybody where it is a whole number."""
    population = math.ceil(denominator)
    whole = population == denominator
    sampler = (
        FullCohort(population) if whole else PoissonCohort(denominator / population, population)
    )
    return ReleasePlan(level="client", sampler=sampler, mechanism=mechanism, noise=noise, rounds=9)


def releaser(
    mechanism: Mechanism, layout: Layout, z: float = 0.0, denominator: float = 1.0
) -> Releaser:
    """With independent noise."""
    return Releaser(plan_of(mechanism, Independent(z), denominator), layout)


def source(*seed: int, hardened: bool = False) -> NoiseSource:
    """Draws of their own for each seed."""
    return NoiseSource(np.random.default_rng(list(seed)), hardened)


def sources(seed: int, n: int) -> list[NoiseSource]:
    """Of n owners."""
    return [source(seed, k) for k in range(n)]


def one_round(
    mechanism, state, rows, z, denominator, noise=None, *, layout=None, blocks=None,
    side_scalars=None,
    weights=None,
) -> Release:  # fmt: skip
    """Of dense rows, in blocks of these sizes."""
    releasing = releaser(mechanism, layout or layout_of_rows(rows), z, denominator)
    total, start = releasing.start(state), 0
    for size in blocks or (len(rows),):
        part = slice(start, start + size)
        total.add(
            DenseRows(rows[part]),
            weights=None if weights is None else weights[part],
            side_scalars={name: values[part] for name, values in (side_scalars or {}).items()},
        )
        start += size
    return releasing.release(total, noise or source(0))


def shares_of(
    mechanism, state, rows, z, denominator, noise, *, layout=None, asked=None, side_scalars=None
):
    """What these rows' clients would send."""
    layout = layout or layout_of_rows(rows)
    return make_shares(
        ShareRequest(mechanism, Independent(z), denominator, len(rows) if asked is None else asked),
        rows,
        mechanism.bounding_state(state, layout),
        layout,
        sources=noise,
        side_scalars=side_scalars,
    )


def numbers_in(shares, total) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Rows in the mechanism's coordinates, and scalars, of shares that enter this sum."""
    values = {
        name: units * total.grids[name].unit for name, units in split(total, shares.units).items()
    }
    rows = total.join_segments([values.pop(part.segment.prefix + "sum") for part in total.segments])
    return rows, values
