"""AdaCliP: clipping in coordinates whitened by estimates from earlier releases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.base import NORM, Released, State
from fedsim.mechanisms.scaling import ScalingMechanism, clip_factor
from fedsim.registry import register
from fedsim.rows.layout import Layout
from fedsim.settings import Ge, Interval, Le


@register("mechanism", "adaclip")
@dataclass(frozen=True)
class AdaClip(ScalingMechanism):
    """Coordinate-wise adaptive clipping (Pichapati et al. 2019).

    Let m and s be estimates of the rows' mean and standard deviation, coordinate by coordinate,
    and ``b = sqrt(s / gamma) * sqrt(sum(s))``. Rows become ``w = (g - m) / b``, and are clipped
    to norm 1, summed (W) and noised; the released mean is ``b * W / r + m``, with the fixed
    denominator r. m and s are updated from that mean alone.

    Guarantee: W changes by at most 1 in L2 norm when a row is added or removed; the noise on it
    has standard deviation z.

    The algorithm as printed has three defects. At ordinary learning rates it starts with every row
    clipped and stays there, since rows are whitened and b begins near 0: its rates are on another
    scale, such as 1e5 where clipping's is 1. It estimates the variance of the batch's mean, not of
    a row. Its positive-part estimate of idle coordinates amplifies its own noise. The defaults
    start as clipping at C, estimate per row, and with ``h2 = C^2 gamma / d`` never add more noise
    than clipping at C. ``literal=True`` is the printed form.

    With ``center=False`` rows are not centred: ``w = g / b``, and the mean is ``b * W / r``. b must
    then cover the rows' second moment about 0 instead of their variance, so that ``m^2`` is added
    to the estimate, coordinate by coordinate, of which s is the root.
    """

    clip_norm: Annotated[float, NORM] = 1.0
    """C, the clip norm of the first round. The literal form starts at h1 and h2."""
    h1: Annotated[float, Interval(ge=1e-60, le=1e60)] = 1e-12
    """The smallest estimate of a variance."""
    h2: Annotated[float | None, Interval(ge=1e-60, le=1e60)] = None
    """The largest estimate of a variance; unset for C^2 gamma / d. Ten times that suits
    concentrated gradients."""
    beta1: Annotated[float, Ge(0), Le(1)] = 0.99
    """Decay rate of m, the estimate of the rows' mean."""
    beta2: Annotated[float, Ge(0), Le(1)] = 0.9
    """Decay rate of s^2, the estimate of the rows' variance."""
    gamma: Annotated[float, Interval(ge=1e-6, le=1e6)] = 1.0
    """Expected squared norm of a whitened row; 1 in the paper."""
    center: bool = True
    """Whether rows are centred at m; otherwise at 0, and m^2 counts as variance."""
    variance: Literal["per-example", "literal"] = "per-example"
    """Estimate the variance of a row, or (literal) of the rows' mean, smaller by r."""
    clamp: Literal["pre", "post"] = "pre"
    """Clamp an estimate to [h1, h2] before it enters the moving average, or after."""
    literal: bool = False
    """The paper's own Algorithm 1, which clips every row at ordinary rates; it needs an h2."""

    bounding_entries: ClassVar[tuple[str, ...]] = ("scale", "m")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.h2 is not None and self.h2 < self.h1:
            raise FedsimError(f"h2 is {self.h2}; it must be at least h1, {self.h1}.")
        if not self.literal:
            return
        if self.h2 is None:
            raise FedsimError("h2 is not set; the literal form needs it.")
        if self.gamma != 1.0 or not self.center or self.clamp != "pre":
            raise FedsimError("literal is true; gamma, center and clamp must keep their defaults.")
        # The literal form implies this field; set here, so that the value shows it.
        object.__setattr__(self, "variance", "literal")

    def init(self, layout: Layout) -> State:
        """``m`` (zero) and ``s``, float64 ``[d]``."""
        m = torch.zeros(layout.d, dtype=torch.float64)
        if self.literal:
            start = (self.h1 * self._h2(layout.d)) ** 0.5
        else:
            start = self.clip_norm * (self.gamma / layout.d) ** 0.5
        return {"m": m, "s": torch.full_like(m, start)}

    def scales(self, norms: Tensor, round_state: State, unit: Tensor | float) -> Tensor:
        """``min(1, 1 / norm)``, for whitened norms."""
        return clip_factor(norms, 1.0, unit)

    def whitening(self, round_state: State) -> tuple[Tensor | None, Tensor | None]:
        """Scale ``1 / b`` and center m (None if rows are not centred)."""
        return round_state["scale"], round_state["m"] if self.center else None

    def round_state(self, state: State) -> State:
        """b, ``1 / b``, and m if rows are centred."""
        s = state["s"]
        b = (s / self.gamma).sqrt_().mul_(s.sum(-1, keepdim=True).sqrt_())
        round_state = {"b": b, "scale": 1 / b}
        return {**round_state, "m": state["m"]} if self.center else round_state

    def radius(self, round_state: State, d: int) -> float:
        """1, in whitened coordinates."""
        return 1.0

    def restore(self, w: Tensor, round_state: State) -> Tensor:
        """``b * w + m``."""
        rows = w * round_state["b"]
        return rows.add_(round_state["m"]) if self.center else rows

    def _h2(self, d: int) -> float:
        # Not below h1: the literal range would be empty.
        return max(self.clip_norm**2 * self.gamma / d, self.h1) if self.h2 is None else self.h2

    def next(self, state: State, round_state: State, released: Released) -> State:
        """Moving averages of the released mean, and of its square minus its noise's variance."""
        m, s, b, r = state["m"], state["s"], round_state["b"], released.denominator
        noise_variance = (b * released.noise_multiplier).div_(r).square_()
        # With the old m: the noise of this release is independent of it, so that its variance can
        # be subtracted.
        estimate = (released.mean - m).square_().sub_(noise_variance)
        if self.variance == "per-example":
            estimate.mul_(r)
        if not self.center:  # E g^2 = Var g + m^2
            estimate.add_(m.square())
        h2 = self._h2(s.shape[-1])
        if self.clamp == "pre":
            estimate.clamp_(self.h1, h2)
        squares = s.square().mul_(self.beta2).add_(estimate.mul_(1 - self.beta2))
        if self.clamp == "post":
            squares.clamp_(self.h1, h2)
        mean = (m * self.beta1).add_(released.mean * (1 - self.beta1))
        return {"m": mean, "s": squares.sqrt_()}

    def info(self, round_state: State, new: State, d: int) -> dict[str, float]:
        """Root mean square of b: the C at which plain clipping has as much noise."""
        return {"clip-norm": float(torch.linalg.vector_norm(round_state["b"]) / d**0.5)}
