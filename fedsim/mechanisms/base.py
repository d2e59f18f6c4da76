"""Interface of mechanisms: segments of a row, each with its own, and additional scalars.

A mechanism maps each row into an L2 ball of known radius, in coordinates that it chooses
(AdaCliP's are whitened). The bounded rows are summed exactly, isotropic noise of standard
deviation ``z * radius`` is added to the sum once, and everything after that (division by a
denominator that does not depend on the data, change of coordinates, new state) is post-processing.
A composition (`PerLayer`, `PrivateScalar`) only defines which columns have which mechanism, which
scalars are added, and how ``1/z^2`` is split; `Releaser` does the rest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.privacy.exclusions import check_bounds_rows
from fedsim.privacy.noise import part_multiplier
from fedsim.rows.dense import Chunks, DenseRows, Rows, Weights, row_weights, scatter
from fedsim.rows.layout import Layout
from fedsim.settings import Interval, check_settings

Entry = TypeVar("Entry")
State = Mapping[str, "Tensor"]
Guarantee = Literal["gaussian", "none"]
Weighting = Literal["uniform", "num-examples"]
Number: TypeAlias = "float | Tensor"
"""A number, or one for each of several sums."""

NOISE_PREFIX = "noise."
"""Prefix of the noise's state within a release's state: it is secret, and never sent."""


def without_noise(state: State) -> dict[str, Tensor]:
    """The part of a state that is as public as the releases."""
    return {name: value for name, value in state.items() if not name.startswith(NOISE_PREFIX)}


# Above 1e9 the grid of a noise-free sum would be coarser than 1e-9.
BOUND_RANGE = (1e-30, 1e9)
NORM = Interval(ge=BOUND_RANGE[0], le=BOUND_RANGE[1])
"""Range of a norm, for the fields of a mechanism."""


@dataclass(frozen=True)
class Segment:
    """Columns of a row that are bounded together.

    Attributes
    ----------
    mechanism : SimpleMechanism
    layout : Layout
        Layout of these columns.
    prefix : str
        Prefix of the names of its state, scalars and noise multipliers in the mechanism.
    columns : tuple of slice, or None
        The columns; None for all.
    shares : tuple of float
        Factors of its share of ``1/z^2``, one for each composition that contains it.
    """

    mechanism: SimpleMechanism
    layout: Layout
    prefix: str = ""
    columns: tuple[slice, ...] | None = None
    shares: tuple[float, ...] = ()

    def named(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Add the segment's prefix to the names of entries."""
        return {self.prefix + name: entry for name, entry in entries.items()}

    def select(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """The segment's entries among a mechanism's, without prefix; never the noise's."""
        return {
            name.removeprefix(self.prefix): entry
            for name, entry in entries.items()
            if name.startswith(self.prefix) and not name.startswith(NOISE_PREFIX)
        }

    def round_state(self, state: State) -> State:
        """`SimpleMechanism.round_state` of the segment's part of a mechanism's state."""
        return self.mechanism.round_state(self.select(state))

    def part_of(self, rows: Rows) -> Rows:
        """The segment's columns of rows."""
        return rows if self.columns is None else rows.columns(self.columns)


class ScalarRange(NamedTuple):
    """Range ``center +- half`` of a number of each row, whose noisy mean is released."""

    center: float
    half: float


class NoiselessSum(NamedTuple):
    """A sum without noise on a separate grid, for mechanisms without a guarantee.

    Its terms are weighted like the rows. ``unit``: unit of the grid. ``wide``: whether it is a
    vector of a row's length instead of a number.
    """

    unit: float
    wide: bool = False


@dataclass(frozen=True)
class SideScalar:
    """A scalar passed with each row and clamped to its range; ``shares`` as in `Segment`."""

    name: str
    value_range: ScalarRange
    shares: tuple[float, ...]


class Mechanism(ABC):
    """Base of mechanisms: segments and scalars as data, frozen and without hidden state."""

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def guarantee(self) -> Guarantee:
        """``"gaussian"``: a release is one Gaussian of multiplier z on a sum of sensitivity C.

        Adjacency is add-remove (or zero-out) of one row; replace-one doubles the sensitivity,
        which the accountant takes into account. ``"none"``: no guarantee with any noise.
        """
        return "gaussian"

    @property
    def takes_weights(self) -> bool:
        """Whether a plan may multiply its bounded rows by declared weights in [0, 1].

        Not if it adapts, or releases numbers of each row: their means would need the weights too.
        """
        return False

    @property
    def weighting(self) -> Weighting:
        """Weights of rows: "uniform" (0 or 1), or by the number of examples."""
        return "uniform"

    @abstractmethod
    def segments(self, layout: Layout) -> tuple[Segment, ...]:
        """Segments that together cover a row, each column once."""

    @property
    def side_scalars(self) -> tuple[SideScalar, ...]:
        """Additional scalars of each row, the innermost composition's first."""
        return ()

    @property
    def side_scalar_names(self) -> tuple[str, ...]:
        """Names of the scalars that must be passed with the rows."""
        return tuple(side.name for side in self.side_scalars)

    def released_names(self, layout: Layout) -> tuple[str, ...]:
        """Names in `Release.side_scalars` and `Release.info`: what is released with the mean."""
        names: list[str] = []
        for segment in self.segments(layout):
            mechanism, state = segment.mechanism, segment.mechanism.init(segment.layout)
            info = mechanism.info(mechanism.round_state(state), state, segment.layout.d)
            names += [*segment.named(mechanism.scalars), *segment.named(info)]
        return (*names, *(side.name for side in self.side_scalars if all(side.shares)))

    def init(self, layout: Layout) -> State:
        """State before the first round."""
        state: dict[str, Tensor] = {}
        for segment in self.segments(layout):
            state |= segment.named(segment.mechanism.init(segment.layout))
        return state

    def bounding_state(self, state: State, layout: Layout) -> State:
        """Part of a state needed to bound rows; it is sent to clients that make shares."""
        needed: dict[str, Tensor] = {}
        for segment in self.segments(layout):
            round_state, needs = segment.round_state(state), segment.mechanism.bounding_entries
            needed |= segment.named(
                {k: v for k, v in round_state.items() if needs is None or k in needs}
            )
        return needed

    def noise_multipliers(
        self, noise_multiplier: float, denominator: float, layout: Layout
    ) -> Mapping[str, float]:
        """Noise multipliers of the parts of one release: ``1/z^2 = sum_j 1/z_j^2``.

        A segment's vector is called ``sum``, a scalar by its name. The order is the one in which
        noise is drawn; a part with infinite noise is not released.

        Raises
        ------
        FedsimError
            If no such split exists.
        """
        split: dict[str, float] = {}
        for segment in self.segments(layout):
            z = part_multiplier(noise_multiplier, segment.shares)
            split |= segment.named(segment.mechanism.split(z, denominator))
        if names := split.keys() & {side.name for side in self.side_scalars}:
            raise FedsimError(
                f"the scalar '{min(names)}' has the name of a number that {self} releases itself; "
                "mechanism.private-scalar must name another."
            )
        return split | {
            side.name: part_multiplier(noise_multiplier, side.shares) for side in self.side_scalars
        }

    def sensitivity(self, state: State, layout: Layout) -> float:
        """C: largest L2 norm of a row's contribution to the sum, in the mechanism's coordinates."""
        radii = (
            s.mechanism.radius(s.round_state(state), s.layout.d) for s in self.segments(layout)
        )
        return math.hypot(*map(float, radii))

    @property
    def largest_norm(self) -> float:
        """Largest L2 norm of a bounded row, in any round and for any model.

        Infinite if rows are not bounded, if the mechanism has a state and so may change from round
        to round, or if it depends on the model (its size, or its number of layers).
        """
        norms = set()
        for layers in (1, 2):
            layout = Layout.of({f"{k}.weight": torch.zeros(layers) for k in range(layers)})
            state = self.init(layout)
            norms.add(math.inf if state else self.sensitivity(state, layout))
        return norms.pop() if len(norms) == 1 else math.inf

    @check_arguments
    def bound(
        self, block: Tensor, state: State | None = None, layout: Layout | None = None
    ) -> Tensor:
        """The bounded rows of ``block [n, d]``, before rounding to the sum's grid.

        Non-finite rows become zero. ``state`` is by default that of the first round; without
        ``layout``, a row is a single entry.

        Returns
        -------
        Tensor ``[n, d]``
            In the block's dtype.
        """
        if block.dim() != 2 or not block.is_floating_point():
            raise FedsimError(
                f"block is a tensor {list(block.shape)} of {block.dtype}; it must hold rows "
                "[n, d] of floating-point numbers."
            )
        layout = Layout.of({"row": block.new_empty(block.shape[1])}) if layout is None else layout
        state = state_on(self.init(layout) if state is None else state, block.device)
        rows, out = DenseRows(block), torch.empty_like(block)
        bad = torch.zeros(len(block), dtype=torch.bool, device=block.device)
        for segment in self.segments(layout):
            round_state = segment.round_state(state)
            for chunk, y in Chunks().split(segment.part_of(rows).dense()):
                bad[chunk] |= bound_and_weight_(segment.mechanism, y, round_state, 1.0, 1.0)[1]
                scatter(out[chunk], segment.mechanism.restore(y, round_state), segment.columns)
        return out.masked_fill_(bad[:, None], 0.0)


def require_mechanism(part: object, wrapper: str) -> None:
    """Refuse a robust mean, or an object that is no mechanism, as a part of a composition.

    Raises
    ------
    FedsimError
    """
    if not isinstance(part, Mechanism):
        raise FedsimError(f"{wrapper} wraps {part!r}; it must be a mechanism.")
    check_bounds_rows(part, wrapper)


class BoundedRows(NamedTuple):
    """Result of shaping rows: multiplied by ``factor [..., c]``, they lie within the ball.

    The factor is NaN for a non-finite row. ``clipped``: longer than the bound. ``scalars``: the
    mechanism's scalars, centred, and terms of its noiseless sums, ``[..., c]`` or, if wide,
    ``[..., c, d]``.
    """

    factor: Tensor
    clipped: Tensor
    scalars: Mapping[str, Tensor]


@dataclass(frozen=True)
class Released:
    """Released values that the next state is computed from, and the noise of the mean.

    For n sums: ``mean [n, d]``, side scalars ``[n]``, multiplier and denominator ``[n, 1]``.
    ``noiseless_sums``, ``[..., 1]`` or ``[..., d]``, are by name, for mechanisms that define them.
    """

    mean: Tensor
    side_scalars: Mapping[str, Number]
    noise_multiplier: Tensor
    denominator: Tensor
    noiseless_sums: Mapping[str, Tensor]


class SimpleMechanism(Mechanism):
    """A mechanism with a single segment, for which one isotropic Gaussian is enough.

    A subclass implements:

    - always, `radius` and `bound_`: the largest norm of a bounded row, and how a row is bounded;
    - if it adapts, `init`, `round_state` and `next`: its state, what each round derives from it,
      and the state after a release;
    - if its coordinates are not the parameters', `restore`: the inverse map;
    - if it releases numbers in addition to the vector, `scalars` and `split`: these, their noise;
    - without a guarantee, `noiseless_sums`, `divisor`, `weights` and `unbounded`: sums without
      noise, the divisor of the mean, the weights of rows, and that norms have no bound;
    - for speed, `keeps_rows`: whether `bound_` leaves rows unchanged (see also `ScalingMechanism`);
    - for a report, `info`; for clients that make shares, `bounding_entries`.

    Tensors are of one sum, or of n owners' sums with a leading ``n`` (``...`` below). Only `info`
    may read a value: on a GPU that waits for all work before it.
    """

    bounding_entries: ClassVar[tuple[str, ...] | None] = None
    """Entries of `round_state` that are needed to bound rows; None for all."""
    scalars: ClassVar[Mapping[str, ScalarRange]] = {}
    """Scalars that `bound_` computes from rows, and whose noisy means are released."""
    unbounded: ClassVar[bool] = False
    """Whether the radius is infinite: the grid of the sum then has a fixed unit."""
    keeps_rows: ClassVar[bool] = False
    """Whether `bound_` returns factors and leaves the rows unchanged."""

    @property
    def takes_weights(self) -> bool:
        """Whether it has neither a state nor scalars, and sums rows at all."""
        has_state = type(self).init is not SimpleMechanism.init
        return not (has_state or self.scalars or getattr(self, "protects_nobody", False))

    @property
    def noiseless_sums(self) -> Mapping[str, NoiselessSum]:
        """Sums without noise, of terms that `bound_` computes, for `divisor` and `next`."""
        return {}

    def segments(self, layout: Layout) -> tuple[Segment, ...]:
        """One segment, of this mechanism."""
        return (Segment(self, layout),)

    def init(self, layout: Layout) -> State:
        """State before the first round; a mechanism without state never changes."""
        return {}

    def round_state(self, state: State) -> State:
        """Values to bound rows and restore their mean, derived from the state once a round."""
        return state

    @abstractmethod
    def radius(self, round_state: State, d: int) -> Number:
        """Largest L2 norm of a bounded row, in the mechanism's coordinates, ``[...]``."""

    @abstractmethod
    def bound_(self, y: Tensor, round_state: State) -> BoundedRows:
        """Bound float64 rows ``y [..., c, d]``: change them in place, up to the returned factor."""

    def restore(self, w: Tensor, round_state: State) -> Tensor:
        """Rows or a mean ``w [..., d]``, mapped back to the parameters' coordinates."""
        return w

    def split(self, noise_multiplier: float, denominator: float) -> Mapping[str, float]:
        """Noise multipliers of the vector, ``sum``, and of the released scalars."""
        return {"sum": noise_multiplier}

    def weights(self, weights: Weights | None, count: int, device: torch.device) -> Tensor:
        """Validated weights of rows, float64 ``[count]``."""
        return row_weights(weights, count, device)

    def divisor(self, noiseless_sums: Mapping[str, Tensor], denominator: Tensor) -> Tensor:
        """Divisor of a sum, ``[..., 1]``: the denominator, or computed from the noiseless sums."""
        return denominator

    def next(self, state: State, round_state: State, released: Released) -> State:
        """State after a release, computed from released values alone."""
        return state

    def info(self, round_state: State, new: State, d: int) -> dict[str, float]:
        """Diagnostics of one release, as public as the mean: by default the clip norm."""
        return {} if self.unbounded else {"clip-norm": float(self.radius(round_state, d))}


def bound_and_weight_(
    mechanism: SimpleMechanism, y: Tensor, round_state: State, unit: Number, weights: Number
) -> tuple[BoundedRows, Tensor]:
    """Replace float64 rows ``y [..., c, d]`` by bounded, weighted rows in units of a grid.

    Returns the result of `SimpleMechanism.bound_`, and which rows were not finite, bool
    ``[..., c]``.
    """
    bounded = mechanism.bound_(y, round_state)
    factor = bounded.factor / per_row(unit) * weights
    bad = factor.isnan()
    # NaN times zero is NaN: bad rows are wiped. On a GPU always, since asking would wait for it.
    if y.is_cuda or bool(bad.any()):
        y.masked_fill_(bad[..., None], 0.0)
        factor = factor.masked_fill(bad, 0.0)
    y.mul_(factor[..., None])
    return bounded, bad


def per_row(number: Number) -> Number:
    """One number per sum, ``[...]``, in a shape that broadcasts against ``[..., rows]``."""
    return number.unsqueeze(-1) if torch.is_tensor(number) and number.ndim else number


def state_on(state: State, device: torch.device) -> State:
    """State with its vectors on ``device``; scalars stay on the CPU, where reading is cheap."""
    return {name: tensor.to(device) if tensor.ndim else tensor for name, tensor in state.items()}
