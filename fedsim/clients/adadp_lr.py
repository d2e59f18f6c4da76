"""ADADP: a learning rate adapted by the difference between one full step and two half steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from fedsim.clients.base import Gradient, LocalAlgorithm, RunFacts, State, Step
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.rows.packing import power
from fedsim.settings import Ge, Gt, Le

AT_LIMIT = "at-limit"
"""Name of the metric that is 1 where a client's final rate is ``eta_max``, else 0."""


@register("client", "adadp-lr")
@dataclass(frozen=True)
class AdadpLR(LocalAlgorithm):
    """Learning-rate adaptation of Koskela and Honkela, arXiv 1809.03832.

    One iteration takes two gradient evaluations, on fresh batches (and with fresh noise where
    gradients are privatised)::

        half = theta - eta/2 G1,  full = theta - eta G1        G1 at theta
        hat  = half - eta/2 G2                                 G2 at half
        err  = || (full - hat) / max(1, |full|) ||
        theta <- full, unless discard and err > tol
        eta   <- eta min(max((tol / err)^exponent, alpha_min), alpha_max), in [eta_min, eta_max]

    The paper keeps the full step everywhere; the authors' code keeps hat, the result of the two
    half steps (``keep="half"``). err is the paper's (6), as in the authors' code;
    ``error="plain"`` is its (3), as Algorithm 1 prints it: ``|| full - hat ||``.

    An iteration whose err is not finite is rejected, and counts as err = infinity. Iterations
    continue across epochs; an unfinished iteration at the end of a round is dropped.

    Where ``tol`` and ``discard`` are unset, `for_run` chooses them for a run of a config. A
    `Trainer` that you build yourself does not call it: they are then 0.1 and true, the values for
    gradients without noise.
    """

    lr: Annotated[float, Gt(0)] = 0.1
    """eta_0, the initial learning rate of a client."""
    tol: Annotated[float | None, Gt(0)] = None
    """tol, the error at which the learning rate stays unchanged; unset for the paper's values: 1
    with noised gradients, else 0.1."""
    exponent: Annotated[float, Gt(0)] = 1.0
    """The exponent of tol / err in the new rate: 1 as in the paper's text, or 1/2 as in its
    code."""
    keep: Literal["full", "half"] = "full"
    """Which result an iteration keeps: that of the full step, as in the paper, or of the two half
    steps, as in the authors' code, which uses both gradients."""
    error: Literal["relative", "plain"] = "relative"
    """How an iteration's error is measured: relative, the difference in each coordinate divided by
    max(1, |full step|), or plain, the norm of the difference, as in the paper's Algorithm 1."""
    discard: bool | None = None
    """Whether an iteration with err > tol is discarded, which wastes noised gradients; unset for
    true without noise, else false."""
    alpha_min: Annotated[float, Gt(0), Le(1)] = 0.9
    """The smallest factor by which the learning rate changes in one iteration."""
    alpha_max: Annotated[float, Ge(1)] = 1.1
    """The largest factor by which the learning rate changes in one iteration."""
    eta_min: Annotated[float, Ge(0)] = 1e-8
    """The smallest learning rate."""
    eta_max: Annotated[float, Gt(0)] = 10.0
    """The largest learning rate. Without a limit the rate of a client whose classes are separable
    grows for ever."""
    adapt_rounds: Annotated[int, Ge(0)] = 0
    """The number of rounds with adaptive steps; later rounds make plain steps at the rate reached,
    which client.state must keep. 0 for adaptive steps in all rounds. The paper counts epochs."""
    post_scale: Annotated[float, Gt(0)] = 1.0
    """Scale of the plain steps after adapt-rounds: k rounds later their rate is eta post-scale / (1
    + post-decay k)."""
    post_decay: Annotated[float, Ge(0)] = 0.1
    """Decay of the rate of the plain steps after adapt-rounds; see post-scale."""

    carried: ClassVar[tuple[str, ...]] = ("eta",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eta_min <= self.lr <= self.eta_max:
            raise FedsimError(
                f"client.lr is {self.lr:g}; it must be at least client.eta-min, {self.eta_min:g}, "
                f"and at most client.eta-max, {self.eta_max:g}."
            )

    def for_run(self, facts: RunFacts) -> Self:
        """The algorithm with the paper's tol and discard for this run, where they are unset."""
        noised = facts.private_examples
        tol = (1.0 if noised else 0.1) if self.tol is None else self.tol
        return replace(self, tol=tol, discard=not noised if self.discard is None else self.discard)

    def numbers(self) -> dict[str, float]:
        """The initial rate, its upper limit, and the tolerance."""
        return {
            "lr": self.lr,
            "eta_max": self.eta_max,
            "tol": 0.1 if self.tol is None else self.tol,
        }

    def init(self, theta: Tensor, numbers: State) -> State:
        """Initial state: no accepted or rejected iterations, no half step in progress."""
        zeros = theta.new_zeros(len(theta))
        return {
            **super().init(theta, numbers),
            "eta": numbers["lr"].clone(),
            "half": theta,
            "peak": _row_peaks(theta),
            "accepted": zeros,
            "rejected": zeros.clone(),
        }

    def point(self, state: State) -> Tensor:
        """``theta`` in the first phase of an iteration, ``half`` in the second."""
        half: Tensor = state["half"]
        return half

    def phase(self, at: Step) -> Hashable:
        """0 or 1 for the first or second half of an iteration, or "fixed rate" for a plain step."""
        return "fixed rate" if self._rate_is_fixed(at) else at.index % 2

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """Make one half of an iteration, or a plain step once the rate is fixed."""
        theta, eta = state["theta"], state["eta"]
        if self._rate_is_fixed(at):
            gradient.subtract_from(theta, eta * at.number(self._late_rate_factor))
        elif at.index % 2 == 0:
            # Keep theta unchanged, since a rejected iteration returns to it.
            half = state.pop("spare", None)
            if half is None:
                half = theta.clone()
                gradient.subtract_from(half, eta / 2)
            else:
                gradient.subtract_from(theta, eta / 2, out=half)
            state["half"], state["first"] = half, gradient
        else:
            self._full_step(state, gradient)

    def _rate_is_fixed(self, at: Step) -> bool:
        return 0 < self.adapt_rounds < at.round

    def _late_rate_factor(self, at: Step) -> float:
        """Factor of the rate once it is no longer adapted."""
        return self.post_scale / (1 + self.post_decay * (at.round - self.adapt_rounds))

    def _full_step(self, state: State, gradient: Gradient) -> None:
        theta, eta, first = state["theta"], state["eta"], state.pop("first")
        if self.error == "plain":
            err, peak, new_peak = _plain_error(eta, first, gradient), state["peak"], state["peak"]
        else:
            err, peak, new_peak = _error(theta, eta, first, gradient, state["peak"])
        accept = err < torch.inf  # False for NaN too
        if self.discard is not False:
            accept = accept & (err <= state["tol"])
        new = state["half"]
        if self.keep == "full":
            first.subtract_from(theta, eta, out=new)
        else:
            gradient.subtract_from(new, eta / 2)
        # Two buffers take turns as theta: the other one is the next half step's ("spare"). Between
        # iterations "half" is theta itself, so that `point` is right in both phases.
        state["theta"], state["spare"] = _select(accept, new, theta)
        state["half"] = state["theta"]
        state["peak"] = torch.where(accept, new_peak, peak)
        state["accepted"] = state["accepted"] + accept
        state["rejected"] = state["rejected"] + ~accept
        # tol / 0 is infinity, which is clamped. NaN comes from a step that was not finite, and is
        # replaced by 0: the rate shrinks by alpha_min.
        ratio = power(state["tol"] / err, self.exponent).nan_to_num_(nan=0.0)
        eta = eta * ratio.clamp_(self.alpha_min, self.alpha_max)
        state["eta"] = torch.minimum(eta.clamp_(min=self.eta_min), state["eta_max"])

    def report(self, state: State) -> dict[str, Tensor]:
        """The final rate, whether it is the limit, and numbers of (un)accepted iterations."""
        eta = state["eta"]
        return {
            "eta": eta,
            AT_LIMIT: (eta >= state["eta_max"]).to(eta.dtype),
            "accepted": state["accepted"],
            "rejected": state["rejected"],
        }


def _select(accept: Tensor, new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """``new`` where accepted, else ``old``, bit for bit; and the tensor that can be reused.

    On a CPU rows are copied only if some clients accept and others do not; on a GPU reading
    ``accept`` would wait for the device.
    """
    if accept.is_cuda:
        return torch.where(accept.unsqueeze(1), new, old), new
    accepted: list[bool] = accept.tolist()
    if all(accepted):
        return new, old
    for k, client_takes in enumerate(accepted):
        if client_takes:
            old[k].copy_(new[k])
    return old, new


def _plain_error(eta: Tensor, first: Gradient, second: Gradient) -> Tensor:
    """``|| full - hat || [n]``, which is ``eta/2 || G2 - G1 ||``."""
    distance: Tensor = second.distance(first)
    return distance * (eta / 2)


def _error(
    theta: Tensor, eta: Tensor, first: Gradient, second: Gradient, peak: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``err [n]``, and bounds of ``|theta|`` before and after the iteration, each ``[n]``.

    ``full - hat`` is ``eta/2 (G2 - G1)``. Where no coordinate of ``full`` can exceed 1 its
    denominators are all 1, and the norm of the difference is enough: ``full`` is not computed.
    ``peak`` bounds the coordinates of theta. It only grows from step to step, and is recomputed
    when it is too large to exclude a denominator above 1.
    """
    if theta.is_cuda:
        return _dense_error(theta, eta, first, second), peak, peak
    err = _plain_error(eta, first, second)
    reach = eta * first.max_abs()
    are_small = peak + reach <= 1
    if not bool(are_small.all()):
        for k in (~are_small).nonzero().flatten().tolist():
            row = slice(k, k + 1)
            peak[row] = _row_peaks(theta[row])
            if not bool(peak[k] + reach[k] <= 1):
                err[row] = _dense_error(theta[row], eta[row], first[row], second[row])
    return err, peak, peak + reach + eta * second.max_abs()


def _row_peaks(theta: Tensor) -> Tensor:
    """The largest absolute value of each row, ``[n]``; NaN if the row has a NaN."""
    return torch.maximum(theta.amax(1), -theta.amin(1))


def _dense_error(theta: Tensor, eta: Tensor, first: Gradient, second: Gradient) -> Tensor:
    g = first.dense()
    scale = torch.sub(theta, g * eta.unsqueeze(1)).abs_().clamp_(min=1)
    norm: Tensor = torch.linalg.vector_norm(g.sub_(second.dense()).div_(scale), dim=1)
    return norm.mul_(eta / 2)
