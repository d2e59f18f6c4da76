"""Checks of what users write: that a mechanism bounds, a sampler follows its law, noise is what its
plan says, gradients are of one example each, and every release has its line in the ledger.

Each is made of the config's own objects. fedsim's code around them is tested by its own tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.array_types import Floats
from fedsim.audit.adapters.flower import strategy_target
from fedsim.audit.catalogue import DECLARED_LAW
from fedsim.audit.catalogue import NOISE as ALL_NOISE
from fedsim.audit.federation import SyntheticFederation, TargetRelease
from fedsim.audit.findings import Finding, SampleChecks, invariant, make_checks
from fedsim.audit.noise_checks import NoiseSample, against_sizes
from fedsim.clients import LocalAlgorithm
from fedsim.clients.base import Gradient, Step
from fedsim.clients.base import State as ClientState
from fedsim.federation.buffered.schedule import ReleaseSchedule
from fedsim.mechanisms import Clipping, Mechanism, State
from fedsim.privacy.laws import declared_population
from fedsim.privacy.laws.buffered import Buffered
from fedsim.privacy.noise import Correlated
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.rows.dense import scatter
from fedsim.rows.exact import grid_unit
from fedsim.runs import factories
from fedsim.runs.resolve import Resolved
from fedsim.strategies import Availability, DPFedAvg
from fedsim.training import ClientData, Trainer

NOISE_SHAPES = ((16, 32), (256,), (8, 32))
"""Shapes of the arrays whose noise is examined."""
MAX_NOISE_ROUNDS, NOISE_RUNS = 64, 2
LEDGER_ROUNDS = 3
LENGTHS = (1e-200, 1e-3, 0.5, 1.0, 1.5, 5.0, 1e3, 1e200)
"""Lengths of hostile rows, in units of the bound's sensitivity."""
SLACK = 1e-6
"""Relative tolerance for float64 rounding."""
OWN_EXAMPLES, OWN_SLACK = 8, 1e-2
"""Number of the config's examples next to the canary, and the tolerance for their gradients."""
FAINT = 1e-3
"""A noise multiplier so small that rounding errors of the noise do not matter."""


@dataclass(frozen=True)
class Scale:
    """Units of rows and noise in one round, for each coordinate.

    Attributes
    ----------
    center, radius : float64 ``[d]``
        A bounded row minus ``center``, divided by ``radius``, has norm 1 at most (in the columns
        of each bound). The std of the sum's noise is ``radius`` times the noise multiplier.
    zero : float64 ``[d]``
        What a row of zeros adds to the sum, minus the center.
    step : float64 ``[d]``
        Step of the sums' grid, in units of ``radius``.
    """

    center: Floats
    radius: Floats
    zero: Floats
    step: Floats

    @classmethod
    def from_mechanism(cls, mechanism: Mechanism, state: State, layout: Layout) -> Scale:
        """Compute it from the bounds' radii and their maps of a row of zeros and a row of ones."""
        center, radius, step = (np.empty(layout.d) for _ in range(3))
        # A mechanism may center and scale rows before it clips them, and undo that afterwards. This
        # affine map is known from two points: zeros give the center, ones minus that the scale.
        for segment in mechanism.segments(layout):
            round_state = segment.round_state(state)
            zeros = torch.zeros(segment.layout.d, dtype=torch.float64)
            at_zero = segment.mechanism.restore(zeros, round_state)
            at_one = segment.mechanism.restore(zeros + 1, round_state)
            limit = float(segment.mechanism.radius(round_state, segment.layout.d))
            scatter(torch.from_numpy(center), at_zero, segment.columns)
            scatter(torch.from_numpy(radius), limit * (at_one - at_zero), segment.columns)
            scatter(torch.from_numpy(step), zeros + grid_unit(limit) / limit, segment.columns)
        still = torch.zeros(1, layout.d, dtype=torch.float64)
        zero = mechanism.bound(still, state, layout)[0].numpy() - center
        return cls(center, radius, zero, step)

    def steps(self, mean: Floats, denominator: float, zeros: float = 0.0) -> Floats:
        """Noise of a mean ``[..., d]`` over ``zeros`` rows of zeros, in steps of the sum's grid."""
        # Each zero row, minus the center, was rounded towards zero to the grid before the sum.
        shifted = zeros * np.trunc(self.zero / self.radius / self.step)
        return np.asarray((mean - self.center) * denominator / self.radius / self.step - shifted)


@dataclass(frozen=True)
class GradientRecorder(LocalAlgorithm):
    """Client algorithm that records every gradient and leaves the parameters unchanged."""

    gradients: list[tuple[int, int, Tensor]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def step(self, state: ClientState, gradient: Gradient, step: Step) -> None:
        """Record the round, the step and the gradient."""
        self.gradients.append((step.round, step.index, gradient.dense().clone()))


def checks(resolved: Resolved, seed: int) -> Iterator[SampleChecks]:
    """Samples and checks of a config's objects, at the levels at which it claims privacy."""
    plan, trainer = resolved.plan, resolved.trainer
    if resolved.config.private:
        yield lambda: (plan.mechanism, trainer.layout), BOUND
        yield lambda: noise_of(plan, seed), NOISE
        if (schedule := resolved.devices.schedule) is not None:
            yield lambda: schedule, SCHEDULE
        else:
            yield lambda: (plan.sampler, plan.event(), plan.rounds or 1, seed), DECLARED_LAW
        yield lambda: (plan, seed), LEDGER
    if trainer.privacy is not None:
        privacy = trainer.privacy
        if not resolved.config.private or privacy.mechanism != plan.mechanism:
            yield lambda: (privacy.mechanism, trainer.layout), BOUND
        yield lambda: resolved, ROWS


def bounded_rows(mechanism: Mechanism, layout: Layout) -> Finding:
    """Whether no row, whatever a client sends, adds more than the sensitivity to the sum."""
    state = mechanism.init(layout)
    scale, rows = (
        Scale.from_mechanism(mechanism, state, layout),
        hostile_rows(mechanism, state, layout),
    )
    added = mechanism.bound(rows, state, layout).numpy()
    fault, longest = None, 0.0
    if not np.isfinite(added).all():
        fault = "a row that is not finite"
    for segment in mechanism.segments(layout):
        columns = np.zeros(layout.d)
        scatter(torch.from_numpy(columns), torch.ones(segment.layout.d), segment.columns)
        units = ((added - scale.center) / scale.radius)[:, columns > 0]
        longest = max(longest, float(np.linalg.norm(units, axis=1).max(initial=0.0)))
    if longest > 1 + SLACK:
        fault = fault or f"a row of {longest:.6g} times the claimed length"
    return invariant(f"{len(rows)} rows of {layout.d:,} entries", fault, "none longer than claimed")


def hostile_rows(mechanism: Mechanism, state: State, layout: Layout) -> Tensor:
    """Rows ``[n, d]`` of many lengths and directions, and some that are not finite."""
    d, c = layout.d, mechanism.sensitivity(state, layout)
    draws = torch.Generator().manual_seed(1)
    directions = [torch.randn(d, generator=draws, dtype=torch.float64) for _ in range(4)]
    directions += [torch.ones(d), torch.where(torch.arange(d) % 2 == 0, 1.0, -1.0)]
    directions += [(torch.arange(d) == place).double() for place in (0, d // 2, d - 1)]
    for entry in layout.entries:
        one_layer = torch.zeros(d)
        one_layer[entry.start : entry.stop] = 1.0
        directions.append(one_layer)
    unit = torch.stack([row.double() / row.double().norm() for row in directions])
    rows = torch.cat([sign * c * length * unit for length in LENGTHS for sign in (1, -1)])
    special = torch.zeros(4, d, dtype=torch.float64)
    special[1], special[2, 0], special[3, -1] = torch.nan, torch.inf, -torch.inf
    return torch.cat([rows, special])


def noise_of(plan: ReleasePlan[Any], seed: int) -> NoiseSample:
    """Noise of whole runs in which all clients send zeros, in standard deviations."""
    plain = replace(
        plan, mechanism=Clipping(1.0)
    )  # noise knows no mechanism: this one adds no state
    rounds = min(plan.rounds or MAX_NOISE_ROUNDS, MAX_NOISE_ROUNDS)
    unit = plan.noise.multiplier / plain.denominator
    runs = []
    for run in range(NOISE_RUNS):
        federation = silent_federation(plain, rounds, seed + run, NOISE_SHAPES)
        target = strategy_target(lambda f: make_strategy(plain, f.seed))
        models = TargetRelease.from_result(target(federation), federation).models
        moves = np.diff(models, axis=0, prepend=0.0) / unit
        noise = plan.noise
        runs.append(noise.matrix(rounds) @ moves if isinstance(noise, Correlated) else moves)
    ends = np.cumsum([math.prod(shape) for shape in NOISE_SHAPES]).tolist()
    layers = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
    z = np.stack(runs)
    # More noise than claimed is no violation, but its other properties can be tested.
    return NoiseSample.from_noise(z / max(1.0, float(np.sqrt(np.square(z).mean()))), layers)


def silent_federation(
    plan: ReleasePlan[Any],
    rounds: int,
    seed: int,
    shapes: tuple[tuple[int, ...], ...] = ((4,),),
) -> SyntheticFederation:
    """A federation of the plan's population whose rows are all zero."""
    n, d = declared_population(plan.sampler), sum(math.prod(shape) for shape in shapes)
    return SyntheticFederation(np.zeros((n, d)), np.ones(n), rounds, seed, shapes=shapes)


def make_strategy(plan: ReleasePlan[Any], seed: int) -> DPFedAvg:
    """A strategy of this plan that adds the released mean to the model.

    The devices of a buffered cohort take made-up times.
    """
    schedule = None
    if isinstance(plan.sampler, Buffered):
        draws = np.random.default_rng(seed)
        seconds = draws.lognormal(size=declared_population(plan.sampler))
        schedule = ReleaseSchedule.of(plan.sampler, seconds, seed)
    availability = Availability(schedule=schedule)
    return DPFedAvg(plan=plan, seed=seed, delta=1e-5, availability=availability)


def own_examples(resolved: Resolved) -> Finding:
    """How far one example moves a client's noisy sum, with the config's own model and data."""
    privacy = resolved.trainer.privacy
    assert privacy is not None
    data = resolved.trainer.data
    largest = max(data.indices, key=len)[: OWN_EXAMPLES + 1]
    x, y = data.x[largest], data.y[largest]
    without = _sum(resolved, x[:-1], y[:-1])
    longest, name, fault = 0.0, "none", None
    for what, (features, target) in _canaries(x[-1], y[-1], data.y).items():
        with_one = torch.cat([x[:-1], features[None]]), torch.cat([y[:-1], target[None]])
        length = float(np.linalg.norm(_sum(resolved, *with_one) - without))
        if not np.isfinite(length):
            fault = f"a gradient that is not finite, with an example that {what}"
        elif length > longest:
            longest, name = length, what
    # In units of the bounds, each of which allows a length of one.
    allowed = math.sqrt(len(privacy.mechanism.segments(resolved.trainer.layout)))
    if longest > allowed * (1 + OWN_SLACK):
        fault = f"{longest:.4g} bounds, with an example that {name}"
    examined = f"{len(largest) - 1} examples of one client, with and without another"
    return invariant(examined, fault, f"{allowed:.4g} bounds at most")


def _canaries(x: Tensor, y: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Features and target of canary examples, by what is special about each."""
    canaries = {"is one of the client's": (x, y)}
    others = targets[(targets != y).reshape(len(targets), -1).any(1)]
    if len(others):
        canaries["is mislabelled"] = (x, others[0])
    if x.is_floating_point():
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
        canaries |= {
            "is noise": (noise, y),
            "is a hundred times as large": (100 * x, y),
            "is huge": (torch.full_like(x, 1e15), y),
            "is NaN": (torch.full_like(x, torch.nan), y),
        }
    return canaries


def _sum(resolved: Resolved, x: Tensor, y: Tensor) -> Floats:
    """First noisy sum of a client with these examples, in units of the bounds, ``[d]``.

    All examples are in the batch. The noise depends on the seed only, and cancels in a difference.
    """
    privacy = resolved.trainer.privacy
    assert privacy is not None
    recorder = GradientRecorder()
    source = resolved.trainer.data
    trainer = Trainer(
        resolved.trainer.model,
        recorder,
        ClientData(x, y, [np.arange(len(y))], source.mean, source.std),
        batch_size=0,
        steps=1,
        loss=factories.loss(resolved.config),
        metrics={},
        path=resolved.config.client.path,
        kernel=resolved.config.client.kernel,
        randomness=Randomness(1, "audit"),
        device=resolved.trainer.device,
        privacy=replace(privacy.scaled(FAINT), max_epsilon=None),
    )
    for _ in trainer.train(trainer.initial(), np.zeros(1, dtype=np.int64), 1):
        pass
    ((_, _, gradient),) = recorder.gradients
    mean = trainer.packing.unpack(gradient)[0].double().cpu().numpy()
    scale = Scale.from_mechanism(
        privacy.mechanism, privacy.mechanism.init(trainer.layout), trainer.layout
    )
    return np.asarray((mean - scale.center) * len(y) / scale.radius)


def releases_of_clients(schedule: ReleaseSchedule) -> Finding:
    """Whether a schedule has each client in as few releases, as far apart, as is charged."""
    charged, inside = schedule.cohort.participation(schedule.cohort.rounds), schedule.releases > 0
    clients, releases = schedule.client_ids[inside], schedule.releases[inside]
    order = np.lexsort((releases, clients))
    gaps = np.diff(releases[order])[np.diff(clients[order]) == 0]
    most, least = int(np.bincount(clients).max(initial=0)), int(gaps.min(initial=charged.rounds))
    fault = None
    if most > charged.participations:
        fault = f"a client is in {most} releases"
    elif least < charged.separation:
        fault = f"a client is in two releases {least} apart"
    examined = f"{len(clients):,} updates in {charged.rounds:,} releases"
    words = f"a client in at most {charged.participations:,}, at least {charged.separation:,} apart"
    return invariant(examined, fault, words)


def ledger_lines(plan: ReleasePlan[Any], seed: int) -> Finding:
    """Whether each round has one line in the ledger, which charges what the plan says."""
    rounds = min(plan.rounds or LEDGER_ROUNDS, LEDGER_ROUNDS)
    strategy = make_strategy(plan, seed)
    strategy_target(lambda _: strategy)(silent_federation(plan, rounds, seed))
    entries = strategy.ledger.entries
    lines = {entry.round: entry.event for entry in entries}
    fault = None if len(entries) == rounds else f"{len(entries)} lines"
    for number in range(1, rounds + 1):
        if number not in lines:
            fault = fault or f"round {number} has no line"
        elif lines[number] != plan.charge(number):
            fault = fault or f"round {number} is charged as {lines[number].law.label}"
    return invariant(f"{rounds} rounds", fault, "one line each, of what the plan charges")


# Cohort sizes are not known here.
NOISE = tuple(check for check in ALL_NOISE if check.test is not against_sizes)
BOUND = make_checks("bound", ("what hostile rows add", bounded_rows, "rows longer than C pass"))
ROWS = make_checks(
    "bound",
    ("what one example moves in the model itself", own_examples, "gradients are not per example"),
)
SCHEDULE = make_checks(
    "sampler",
    ("releases of each client", releases_of_clients, "clients are in more releases than charged"),
)
LEDGER = make_checks(
    "ledger", ("a line for every release", ledger_lines, "a release is not charged")
)
