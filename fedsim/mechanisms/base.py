"""What a mechanism is: segments of a row, each with its bound, and scalars beside them.

A bound turns each row into one that lies in an L2 ball of known radius, in coordinates of
its own (AdaCliP's are whitened). The bounded rows are summed exactly, isotropic noise of
standard deviation ``z * radius`` is put on the sum once, and everything after that (division
by a denominator that does not depend on the data, change of coordinates, new state) is
post-processing. A composition (`PerLayer`, `PrivateScalar`) only says which columns have
which bound, which scalars go beside, and how ``1/z^2`` is shared out; `Releaser` does the rest.
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
from fedsim.privacy.noise import part_multiplier
from fedsim.rows.dense import Chunks, DenseRows, Rows, Weights, row_weights, scatter
from fedsim.rows.layout import Layout
from fedsim.settings import Between, Gt, check_settings

Entry = TypeVar("Entry")
State = Mapping[str, "Tensor"]
Guarantee = Literal["gaussian", "none"]
Weighting = Literal["uniform", "num-examples"]
Number: TypeAlias = "float | Tensor"
"""A number, or one for each of several sums."""

NOISE_PREFIX = "noise."
"""Of the noise's own state, in the state that a release returns: secret, and never sent."""


def without_noise(state: State) -> dict[str, Tensor]:
    """What of a state is as public as the releases."""
    return {name: value for name, value in state.items() if not name.startswith(NOISE_PREFIX)}


# Above 1e9 the grid of a noise-free sum would be coarser than 1e-9.
BOUND_RANGE = (1e-30, 1e9)
NORM = (Gt(0), Between(*BOUND_RANGE))
"""What a norm may be, as a field of a bound says it."""


@dataclass(frozen=True)
class Segment:
    """Columns of a row that have a bound of their own.

    Attributes
    ----------
    bound : Bound
    layout : Layout
        Of these columns.
    prefix : str
        Before the names of its state, scalars and noise multipliers.
    columns : tuple of slice, or None
        None is all of them.
    shares : tuple of float
        Factors, one for each composition around it, of its share of ``1/z^2``.
    """

    bound: Bound
    layout: Layout
    prefix: str = ""
    columns: tuple[slice, ...] | None = None
    shares: tuple[float, ...] = ()

    def named(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Entries by their names in the mechanism."""
        return {self.prefix + name: entry for name, entry in entries.items()}

    def select(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """What of a mechanism's entries is the segment's, by names in it; never the noise's."""
        return {
            name.removeprefix(self.prefix): entry
            for name, entry in entries.items()
            if name.startswith(self.prefix) and not name.startswith(NOISE_PREFIX)
        }

    def ready(self, state: State) -> State:
        """`Bound.ready`, of a mechanism's state."""
        return self.bound.ready(self.select(state))

    def part_of(self, rows: Rows) -> Rows:
        """The segment's columns of rows."""
        return rows if self.columns is None else rows.columns(self.columns)


class Scalar(NamedTuple):
    """A number for each row, within ``center +- half``, of which a release has the noisy mean."""

    center: float
    half: float


class BareSum(NamedTuple):
    """What is summed on a grid of its own and without noise, for bounds without a guarantee.

    It is weighted like its row. ``unit`` is the grid's; ``wide``: a vector like the row, and not a
    number.
    """

    unit: float
    wide: bool = False


@dataclass(frozen=True)
class Side:
    """A scalar that comes with each row, clamped to its range; ``shares`` as of a `Segment`."""

    name: str
    scalar: Scalar
    shares: tuple[float, ...]


class Mechanism(ABC):
    """Parts and sides as data. Subclasses are frozen dataclasses without hidden state."""

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def guarantee(self) -> Guarantee:
        """``"gaussian"``: a release is one Gaussian of multiplier z on a sum of sensitivity C.

        Adjacency is add-remove (or zero-out) of one row; replace-one doubles the sensitivity,
        which is the accountant's business. ``"none"``: no (epsilon, delta) whatever the noise.
        """
        return "gaussian"

    @property
    def weighting(self) -> Weighting:
        """What a sum takes as weights beyond a mask."""
        return "uniform"

    @abstractmethod
    def cover(self, layout: Layout) -> tuple[Segment, ...]:
        """Bounds that together cover a row, each column once."""

    @property
    def sides(self) -> tuple[Side, ...]:
        """Scalars beside the row, the innermost first."""
        return ()

    @property
    def side_names(self) -> tuple[str, ...]:
        """Scalars that a sum must be given with its rows."""
        return tuple(side.name for side in self.sides)

    def shown(self, layout: Layout) -> tuple[str, ...]:
        """Names of what a release shows beside the mean: `Release.sides` and `Release.info`."""
        names: list[str] = []
        for segment in self.cover(layout):
            bound, state = segment.bound, segment.bound.init(segment.layout)
            info = bound.info(bound.ready(state), state, segment.layout.d)
            names += [*segment.named(bound.scalars), *segment.named(info)]
        return (*names, *(side.name for side in self.sides if all(side.shares)))

    def init(self, layout: Layout) -> State:
        """State before the first round."""
        state: dict[str, Tensor] = {}
        for segment in self.cover(layout):
            state |= segment.named(segment.bound.init(segment.layout))
        return state

    def bounding_state(self, state: State, layout: Layout) -> State:
        """What bounding rows takes of a state; it is sent to clients that make shares."""
        needed: dict[str, Tensor] = {}
        for segment in self.cover(layout):
            ready, needs = segment.ready(state), segment.bound.needs
            needed |= segment.named({k: v for k, v in ready.items() if needs is None or k in needs})
        return needed

    def noise_multipliers(
        self, noise_multiplier: float, denominator: float, layout: Layout
    ) -> Mapping[str, float]:
        """Noise multipliers of what one release consists of: ``1/z^2 = sum_j 1/z_j^2``.

        A segment's vector is called ``sum``, a scalar by its name. They stand in the order in
        which noise is drawn; one that is infinite is not released.

        Raises
        ------
        FedsimError
            If no such split exists.
        """
        split: dict[str, float] = {}
        for segment in self.cover(layout):
            z = part_multiplier(noise_multiplier, segment.shares)
            split |= segment.named(segment.bound.split(z, denominator))
        if names := split.keys() & {side.name for side in self.sides}:
            raise FedsimError(
                f"the scalar '{min(names)}' has the name of what {self} releases itself; its name "
                "(mechanism.private-scalar) must be another."
            )
        return split | {
            side.name: part_multiplier(noise_multiplier, side.shares) for side in self.sides
        }

    def sensitivity(self, state: State, layout: Layout) -> float:
        """C: the L2 norm that one row can add to the sum, in the bounds' coordinates."""
        radii = (s.bound.radius(s.ready(state), s.layout.d) for s in self.cover(layout))
        return math.hypot(*map(float, radii))

    @check_arguments
    def bound(
        self, block: Tensor, state: State | None = None, layout: Layout | None = None
    ) -> Tensor:
        """What each row of ``block [n, d]`` contributes, before it is rounded to the sum's grid.

        Non-finite rows contribute zero. Without ``state``, that of the first round; without
        ``layout``, a row is one entry.

        Returns
        -------
        Tensor ``[n, d]``
            Of the block's dtype.
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
        for segment in self.cover(layout):
            ready = segment.ready(state)
            for chunk, y in Chunks().of(segment.part_of(rows).dense()):
                bad[chunk] |= bounded_(segment.bound, y, ready, 1.0, 1.0)[1]
                scatter(out[chunk], segment.bound.restore(y, ready), segment.columns)
        return out.masked_fill_(bad[:, None], 0.0)


def require_mechanism(part: object, wrapper: str) -> None:
    """Refuse to wrap what is no mechanism.

    Raises
    ------
    FedsimError
    """
    if not isinstance(part, Mechanism):
        raise FedsimError(
            f"{wrapper} wraps {part!r}, which is no Mechanism. A robust mean takes a round's rows "
            "whole: mechanism.per-layer and mechanism.private-scalar must be unset with it, and "
            "client.mechanism.name another."
        )


class Shaped(NamedTuple):
    """Rows that ``factor [..., c]`` brings into the ball; NaN marks a non-finite row.

    ``clipped`` says which of them were longer than their bound; ``sides`` are the bound's
    scalars, centred, and what goes into its bare sums, ``[..., c]``, or wide, ``[..., c, d]``.
    """

    factor: Tensor
    clipped: Tensor
    sides: Mapping[str, Tensor]


@dataclass(frozen=True)
class Released:
    """What a state is updated from: the noisy mean and scalars, and how noisy the mean is.

    Of n sums: ``mean [n, d]``, sides ``[n]``, and ``[n, 1]`` for what goes with the mean.
    ``bare_sums`` are sums without noise, ``[..., 1]`` or ``[..., d]``, of the bound that asks
    for them by name.
    """

    mean: Tensor
    sides: Mapping[str, Number]
    noise_multiplier: Tensor
    denominator: Tensor
    bare_sums: Mapping[str, Tensor]


class Bound(Mechanism):
    """A bound in coordinates where one isotropic Gaussian does; a mechanism of one segment.

    What a subclass gives:

    - always, `radius` and `shape_`: how long a bounded row may be, and how a row is bounded;
    - if it adapts, `init`, `ready` and `next`: its state, what a round derives from it, and the
      state after a release;
    - if its coordinates are not the parameters', `restore`: the way back;
    - if it releases numbers beside the vector, `scalars` and `split`: these, and their noise;
    - without a guarantee, `bare_sums`, `divisor`, `weights` and `free`: sums without noise, what
      the mean is divided by and weighted with, and that no norm is known;
    - for speed, `scaled` and `implicit`: the same without copies of rows, or without rows;
    - for a report, `info`; for clients that make shares, `needs`.

    All see one sum, or those of n owners with a leading ``n`` on every tensor (``...`` below), and
    none but `info` reads a value, which on a GPU would wait for it.
    """

    needs: ClassVar[tuple[str, ...] | None] = None
    """Entries of `ready` without which no row can be bounded; None for all of them."""
    scalars: ClassVar[Mapping[str, Scalar]] = {}
    """Scalars that `shape_` makes of rows, and that a release has the noisy means of."""
    free: ClassVar[bool] = False
    """Whether the radius is infinite: rows are then summed in a unit of no bound's."""

    @property
    def bare_sums(self) -> Mapping[str, BareSum]:
        """What `shape_` makes of rows beside, summed for `divisor` and `next` alone."""
        return {}

    def cover(self, layout: Layout) -> tuple[Segment, ...]:
        """Itself."""
        return (Segment(self, layout),)

    def init(self, layout: Layout) -> State:
        """State before the first round; a bound that has none never changes."""
        return {}

    def ready(self, state: State) -> State:
        """What bounding rows and restoring their mean takes, derived once a round."""
        return state

    @abstractmethod
    def radius(self, ready: State, d: int) -> Number:
        """L2 norm that no bounded row exceeds, in the bound's coordinates, ``[...]``."""

    @abstractmethod
    def shape_(self, y: Tensor, ready: State) -> Shaped:
        """Overwrite float64 rows ``y [..., c, d]`` and say by which factor they fit the ball."""

    def scaled(self, rows: Tensor, ready: State) -> Shaped | None:
        """As `shape_`, of rows ``[c, d]`` on a CPU that it only multiplies; they stay unchanged.

        None, the default, where it does more to any row.
        """
        return None

    def implicit(
        self, rows: Rows, ready: State, unit: Number, weights: Tensor
    ) -> tuple[Shaped, Tensor] | None:
        """For rows that are not written out: their factors, and their bounded sum ``[..., d]``.

        The sum is in units of a grid, not yet on it. None where the bound needs dense rows.
        """
        return None

    def restore(self, w: Tensor, ready: State) -> Tensor:
        """Rows or a mean ``w [..., d]`` in the parameters' coordinates."""
        return w

    def split(self, noise_multiplier: float, denominator: float) -> Mapping[str, float]:
        """Noise multipliers of the vector, ``sum``, and of the released scalars."""
        return {"sum": noise_multiplier}

    def weights(self, weights: Weights | None, count: int, device: torch.device) -> Tensor:
        """Weights of rows, checked, float64 ``[count]``."""
        return row_weights(weights, count, device)

    def divisor(self, bare_sums: Mapping[str, Tensor], denominator: Tensor) -> Tensor:
        """What a sum is divided by, ``[..., 1]``, from the denominator or the bare sums."""
        return denominator

    def next(self, state: State, ready: State, released: Released) -> State:
        """State after a release, a function of released values alone."""
        return state

    def info(self, ready: State, new: State, d: int) -> dict[str, float]:
        """What to show of one release, as public as the mean: by default the clip norm."""
        return {} if self.free else {"clip-norm": float(self.radius(ready, d))}


def bounded_(
    bound: Bound, y: Tensor, ready: State, unit: Number, weights: Number
) -> tuple[Shaped, Tensor]:
    """Overwrite float64 rows ``y [..., c, d]`` by bounded, weighted rows in units of a grid.

    Returns their shape and which rows, bool ``[..., c]``, were not finite.
    """
    shaped = bound.shape_(y, ready)
    factor = shaped.factor / per_row(unit) * weights
    bad = factor.isnan()
    # A row of NaN times zero is NaN: non-finite rows are wiped, not multiplied by zero.
    if y.is_cuda or bool(bad.any()):
        y.masked_fill_(bad[..., None], 0.0)
        factor = factor.masked_fill(bad, 0.0)
    y.mul_(factor[..., None])
    return shaped, bad


def per_row(number: Number) -> Number:
    """A number a sum, ``[...]``, to go with ``[..., rows]``."""
    return number.unsqueeze(-1) if torch.is_tensor(number) and number.ndim else number


def state_on(state: State, device: torch.device) -> State:
    """State with its vectors on ``device``; scalars stay on the CPU, where they are read."""
    return {name: tensor.to(device) if tensor.ndim else tensor for name, tensor in state.items()}
