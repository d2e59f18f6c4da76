"""How far a canary moved a release, in standard deviations of its noise.

An observer knows the mechanism, its public state and the ledger. The bound says how far a row
can reach along each coordinate; noise, in that unit, must be the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.special import chdtr
from torch import Tensor

from fedsim.audit.checks import Finding, Floats, Statistic, invariant, statistical
from fedsim.audit.target import Observation, Target
from fedsim.clients import LocalAlgorithm
from fedsim.clients.base import Gradient, Step
from fedsim.clients.base import State as ClientState
from fedsim.mechanisms import Mechanism, State
from fedsim.privacy import Event
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.rows.dense import scatter
from fedsim.rows.exact import grid_unit
from fedsim.runs import factories
from fedsim.runs.resolve import Resolved
from fedsim.training import ClientData, Trainer

SLACK = 1e-6
"""Rounding to the grid, and of differences of parameters."""
COARSE = 2.0**44
"""Grid steps beyond which a number in float64 no longer shows one."""
OWN_EXAMPLES, OWN_SLACK = 8, 1e-2
"""Of the config's data, beside the canary."""
FAINT = 1e-3
"""A noise multiplier so small that rounding of noise does not matter."""


@dataclass(frozen=True)
class Scale:
    """The units of noise in one round, coordinate by coordinate.

    Attributes
    ----------
    center, half : float64 ``[d]``
        The sum's noise has standard deviation ``half`` times a noise multiplier, and a bounded
        row differs from ``center`` by no more than ``half`` in length, in those units.
    zero : float64 ``[d]``
        What a row of zeros adds to the sum, beside the center.
    step : float64 ``[d]``
        Of the grid that sums lie on, in units of ``half``.
    """

    center: Floats
    half: Floats
    zero: Floats
    step: Floats

    @classmethod
    def of(cls, mechanism: Mechanism, state: State, layout: Layout) -> Scale:
        """From the bounds' radii, and where they put a row of zeros and a row of ones."""
        center, half, step = (np.empty(layout.d) for _ in range(3))
        # A bound may center and stretch rows before it clips them, and undo that afterwards: what
        # it makes of zeros is the center, and of ones, less that, the stretch of each coordinate.
        for segment in mechanism.cover(layout):
            ready = segment.ready(state)
            zeros = torch.zeros(segment.layout.d, dtype=torch.float64)
            at_zero = segment.bound.restore(zeros, ready)
            at_one = segment.bound.restore(zeros + 1, ready)
            radius = float(segment.bound.radius(ready, segment.layout.d))
            scatter(torch.from_numpy(center), at_zero, segment.columns)
            scatter(torch.from_numpy(half), radius * (at_one - at_zero), segment.columns)
            scatter(torch.from_numpy(step), zeros + grid_unit(radius) / radius, segment.columns)
        still = torch.zeros(1, layout.d, dtype=torch.float64)
        zero = mechanism.bound(still, state, layout)[0].numpy() - center
        return cls(center, half, zero, step)

    def steps(self, mean: Floats, denominator: float, zeros: float = 0.0) -> Floats:
        """A mean ``[..., d]`` of so many rows of zeros and noise, in steps of the sum's grid."""
        # A row of zeros that is moved to a center is rounded to the grid there.
        shifted = zeros * np.trunc(self.zero / self.half / self.step)
        return np.asarray((mean - self.center) * denominator / self.half / self.step - shifted)


def shaped(states: Sequence[State]) -> bool:
    """Whether more than one number of a mechanism's state changes from round to round."""
    first, last = states[0], states[-1]
    changing = [n for n in first if n in last and not torch.equal(first[n], last[n])]
    return len(changing) > 1 or any(first[name].numel() > 1 for name in changing)


def in_units(observed: Observation, target: Target) -> tuple[Floats, Floats]:
    """Noise of a run in which all clients sent zero: ``[rounds, d]`` twice.

    First over its noise multiplier, then in steps of the grid that it lies on: NaN in rounds where
    float64 parameters are too coarse to show these.
    """
    denominator = target.plan.denominator
    units, steps = np.empty_like(observed.moves), np.empty_like(observed.moves)
    reached = np.abs(np.cumsum(observed.moves, axis=0)) + np.abs(observed.moves)
    known: State | None = None
    for index, (move, count) in enumerate(zip(observed.moves, observed.sizes, strict=True)):
        state = observed.states[min(index, len(observed.states) - 1)]
        if known is None or not _same(state, known):
            scale, known = Scale.of(target.mechanism, state, target.layout), state
        units[index] = ((move - scale.center) * denominator - count * scale.zero) / scale.half
        steps[index] = scale.steps(move, denominator, count)
        if (reached[index] * denominator > COARSE * scale.half * scale.step).any():
            steps[index] = np.nan
    return target.whitened(units), steps


def _same(state: State, other: State) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[n], other[n]) for n in state)


@dataclass(frozen=True)
class MeasuredNoise:
    """How large released noise is, estimated over whole runs.

    Attributes
    ----------
    stds : float64 ``[d]``
        Standard deviations in the unit of `in_units`, one for each layer.
    values : int
        How many values the least certain of them is an estimate from.
    layers : int
        How many estimates there are.
    """

    stds: Floats
    values: int
    layers: int

    @classmethod
    def of(cls, units: Floats, layers: Sequence[slice]) -> MeasuredNoise:
        """From ``units [..., d]`` of a model with these layers' columns."""
        stds = np.empty(units.shape[-1])
        for layer in layers:
            stds[layer] = np.sqrt(np.square(units[..., layer]).mean())
        width = min(layer.stop - layer.start for layer in layers)
        return cls(stds, width * (units.size // units.shape[-1]), len(layers))

    def of_round(self, observed: Observation, index: int, target: Target) -> Floats:
        """Standard deviation of a move in the round with this index, ``[d]``."""
        state = observed.states[min(index, len(observed.states) - 1)]
        half = Scale.of(target.mechanism, state, target.layout).half
        return self.stds * half / target.plan.denominator


def length_moved(
    looked_at: str,
    length: float,
    whose: str,
    allowed: float,
    noise: MeasuredNoise,
    shares: tuple[float, float] = (1.0, 0.0),
    scalar_degrees: int = 1,
) -> Finding:
    """Whether a move is longer than allowed, in standard deviations that are estimates.

    A variance from N values is a chi-square with N degrees over N; of a sum of two terms, the
    degrees are those of the mixture (Satterthwaite).

    Parameters
    ----------
    looked_at : str
    length : float
        In standard deviations of the noise.
    whose : str
        What moved the release so far.
    allowed : float
        In standard deviations of the noise that is charged.
    noise : MeasuredNoise
    shares : tuple of float
        Parts of its square that are moves of parameters, and of scalars that are released.
    scalar_degrees : int
        Degrees of freedom of these scalars' variances.
    """
    parts = np.array(shares) / (sum(shares) or 1.0)
    degrees = 1 / float((np.square(parts) / [noise.values, scalar_degrees]).sum())

    def p(lengths: Floats, _: object) -> Floats:
        squares = np.square(np.maximum(lengths, 1e-150))
        ratio = np.where(np.isfinite(squares), (allowed * (1 + SLACK)) ** 2 / squares, 0.0)
        # The longest move is along the layer whose noise happens to be estimated as smallest.
        return np.asarray(np.minimum(1.0, noise.layers * chdtr(degrees, degrees * ratio)))

    words = f"{{}} std of the noise, {whose} ({allowed:.5g} is claimed)"
    return statistical(looked_at, Statistic(words, np.array([length]), p, allowed))


def allowed_length(event: Event) -> float:
    """Standard deviations of the noise by which the event lets one row move a release."""
    return (2.0 if event.adjacency == "replace-one" else 1.0) / event.total_noise_multiplier


def scalars_moved(
    absent: Observation, present: Observation, stds: Mapping[str, float]
) -> tuple[float, str | None]:
    """How far released scalars moved in the last round, and one that did and has no noise."""
    farthest, without_noise = 0.0, None
    before, after = (run.statistics[-1] if run.statistics else {} for run in (absent, present))
    for name, std in stds.items():
        difference = abs(after.get(name, 0.0) - before.get(name, 0.0))
        if difference <= 1e-12 * (1 + abs(before.get(name, 0.0))):
            continue
        if std == 0:
            without_noise = name
        else:
            farthest = max(farthest, difference / std)
    return farthest, without_noise


@dataclass(frozen=True)
class GradientRecorder(LocalAlgorithm):
    """Notes every gradient that it is given, and leaves the parameters unchanged."""

    gradients: list[tuple[int, int, Tensor]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def step(self, state: ClientState, gradient: Gradient, step: Step) -> None:
        """Note the round, the step and the gradient."""
        self.gradients.append((step.round, step.index, gradient.dense().clone()))


def own_examples(resolved: Resolved) -> Finding:
    """What one example moves, through the config's own model, with and without it."""
    privacy = resolved.local.privacy
    assert privacy is not None
    data = resolved.trainer.data
    largest = max(data.indices, key=len)[: OWN_EXAMPLES + 1]
    x, y = data.x[largest], data.y[largest]
    without = _sum(resolved, x[:-1], y[:-1])
    longest, name, broken = 0.0, "none", None
    for what, (features, target) in _canaries(x[-1], y[-1], data.y).items():
        with_one = torch.cat([x[:-1], features[None]]), torch.cat([y[:-1], target[None]])
        length = float(np.linalg.norm(_sum(resolved, *with_one) - without))
        if not np.isfinite(length):
            broken = f"a gradient that is not finite, with an example that {what}"
        elif length > longest:
            longest, name = length, what
    # In units of the bounds: one for each bound that a row has.
    allowed = math.sqrt(len(privacy.mechanism.cover(resolved.trainer.layout)))
    if longest > allowed * (1 + OWN_SLACK):
        broken = f"{longest:.4g} bounds, with an example that {name}"
    looked = f"{len(largest) - 1} examples of one client, with and without another"
    return invariant(looked, broken, f"{allowed:.4g} bounds at most")


def _canaries(x: Tensor, y: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Features and target of examples, by what is special about each."""
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
    """The first noisy sum of a client that has these examples, in units of the bounds, ``[d]``.

    All are in the batch, and the noise is the same for any examples: it cancels in a difference.
    """
    privacy = resolved.local.privacy
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
        privacy=replace(
            privacy, noise=privacy.made.scaled(FAINT), ledger_dir=None, max_epsilon=None
        ),
    )
    for _ in trainer.train(trainer.initial(), np.zeros(1, dtype=np.int64), 1):
        pass
    ((_, _, gradient),) = recorder.gradients
    mean = trainer.packing.unpack(gradient)[0].double().cpu().numpy()
    scale = Scale.of(privacy.mechanism, privacy.mechanism.init(trainer.layout), trainer.layout)
    return np.asarray((mean - scale.center) * len(y) / scale.half)
