"""Losses: one number per example, so that examples can be weighted for padding and privacy.

A loss maps ``(outputs [B, ...], targets [B, ...])`` to ``[B]``. If an example has many targets
(the positions of a sequence, the labels of an image, the numbers of a vector), its loss is the mean
over the targets that count. A target that does not count is `IGNORED` (classes) or NaN (numbers)
and adds nothing to the loss or to its gradient; an example without any target that counts has the
loss 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, TypeAlias

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Ge, Gt, Lt, Text, check_settings, read_weights, write_weights

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``loss(outputs [B, ...], targets [B, ...]) -> [B]``: one loss for each example."""


class ExampleLoss(ABC):
    """A loss with settings. Subclasses are frozen dataclasses whose fields are the settings."""

    higher_is_better: ClassVar[bool] = False
    predicts_targets: ClassVar[bool] = True
    """Whether outputs are the predicted targets, not the parameters of a distribution."""

    def __post_init__(self) -> None:
        check_settings(self, "task.")

    @abstractmethod
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example, ``[B]``."""


def is_fedsims_own(loss: object) -> bool:
    """Whether a loss or a metric is one of fedsim's, which draw nothing and keep no state."""
    return str(getattr(loss, "__module__", "")).startswith("fedsim.")


IGNORED = -100
"""Target that marks a position as not counting, as in PyTorch."""


def class_logits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs, after checking that they are logits ``[*targets.shape, K]`` for classes.

    Raises
    ------
    FedsimError
    """
    if targets.is_floating_point() or outputs.shape[:-1] != targets.shape:
        other = ""
        if targets.is_floating_point():
            other = (
                " For numbers set, for example, task.loss = 'squared-error' and task.metrics = "
                "'rmse' (the defaults are for classes); classes must be whole numbers: "
                "y.astype('int64'), also of booleans."
            )
        if targets.dim() > 1:
            other += " Of targets [N, 1] give y[:, 0], of one-hot rows [N, K] y.argmax(1)."
        raise FedsimError(
            f"the model gives outputs {list(outputs.shape)} for targets {list(targets.shape)} of "
            f"dtype {targets.dtype}; what compares them (task.loss, task.metrics) takes logits "
            f"[B, K] for classes [B], or [B, L, K] for classes [B, L] of positions.{other}"
        )
    return outputs


def like_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs in the shape of the targets, without a last axis of size 1.

    Raises
    ------
    FedsimError
        If there is not one number for each target.
    """
    if outputs.shape == targets.shape:
        return outputs
    if outputs.shape == (*targets.shape, 1):
        return outputs.squeeze(-1)
    hint = ""
    if not targets.is_floating_point():
        hint = (
            " Whole numbers are classes, with an output for each; amounts, and labels 0 and 1, "
            "must be y.astype('float32'), or for a table data.types = 'y=number'."
        )
    raise FedsimError(
        f"the model gives outputs {list(outputs.shape)} for targets {list(targets.shape)}; what "
        f"compares them (task.loss, task.metrics) takes one number for each target.{hint}"
    )


def mean_over(losses: Tensor, counts: Tensor) -> Tensor:
    """Mean over the positions that count, ``[B]``; other entries of ``losses`` are ignored."""
    if losses.dim() == 1:
        return torch.where(counts, losses, 0.0)
    total = torch.where(counts, losses, 0.0).flatten(1).sum(1)
    return total / counts.flatten(1).sum(1).clamp_min(1)


class NumberLoss(ExampleLoss):
    """A loss of numbers: the mean of a separate loss for each of an example's targets."""

    @abstractmethod
    def elementwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each number, in the shape of outputs and targets."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over each example's targets that are not NaN, ``[B]``."""
        outputs = like_targets(outputs, targets)
        targets = targets.to(outputs)
        counts = ~targets.isnan()
        # Masked before and after: NaN times zero is NaN, in the gradient too.
        outputs, targets = torch.where(counts, outputs, 0.0), torch.where(counts, targets, 0.0)
        return mean_over(self.elementwise(outputs, targets), counts)

    def without_mask(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The same loss in fewer operations, if no target is NaN; gradients differ by rounding."""
        outputs = like_targets(outputs, targets)
        losses = self.elementwise(outputs, targets.to(outputs))
        if losses.dim() == 1:
            return losses
        losses = losses.flatten(1)
        return losses.sum(1) / losses.shape[1]


@register("loss", "cross-entropy")
@dataclass(frozen=True)
class CrossEntropy(ExampleLoss):
    """Cross-entropy of logits ``[B, K]`` and classes ``[B]``, or ``[B, L, K]`` and ``[B, L]``.

    With ``label_smoothing`` s, an example's class has weight 1 - s, and s is spread evenly over all
    K classes (Szegedy et al. 2016). With positions it is the mean over those that count.
    ``class_weights`` multiply an example's loss, before its gradient is bounded, and nothing is
    divided by their sum, which would depend on other examples.
    """

    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Label smoothing: the share of a target that is spread evenly over all classes."""
    class_weights: Annotated[tuple[float, ...], Text(read_weights, write_weights)] = ()
    """Weights of the classes in the loss, declared, in their order, such as '1,5'; empty for 1."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of each example, ``[B]``.

        Raises
        ------
        FedsimError
            If outputs and targets do not have these shapes.
        """
        logits = class_logits(outputs, targets)
        if self.class_weights and len(self.class_weights) != logits.shape[-1]:
            raise FedsimError(
                f"task.class-weights has {len(self.class_weights)} numbers; it must have one for "
                f"each of the {logits.shape[-1]} classes of the model."
            )
        flat = torch.nn.functional.cross_entropy(
            logits.flatten(0, -2),
            targets.flatten(),
            reduction="none",
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
        )
        if self.class_weights:
            flat = flat * flat.new_tensor(self.class_weights)[targets.flatten().clamp_min(0)]
        return (
            flat if targets.dim() == 1 else mean_over(flat.view(targets.shape), targets != IGNORED)
        )


@register("loss", "binary-cross-entropy")
@dataclass(frozen=True)
class BinaryCrossEntropy(NumberLoss):
    """Cross-entropy of a logit and 0 or 1 for each label ``[B, K]``, or ``[B]``."""

    positive_weight: Annotated[float, Gt(0)] = 1.0
    """The weight of positive labels; above 1 where they are rare."""

    def elementwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Binary cross-entropy of each logit and label."""
        rare = None if self.positive_weight == 1 else outputs.new_tensor(self.positive_weight)
        return torch.nn.functional.binary_cross_entropy_with_logits(
            outputs, targets, reduction="none", pos_weight=rare
        )


@register("loss", "squared-error")
@dataclass(frozen=True)
class SquaredError(NumberLoss):
    """Mean of ``(output - target)^2`` over the targets of an example."""

    def elementwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``(output - target)^2``."""
        return (outputs - targets).square()


@register("loss", "absolute-error")
@dataclass(frozen=True)
class AbsoluteError(NumberLoss):
    """Mean of ``|output - target|`` over the targets of an example."""

    def elementwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``|output - target|``."""
        return (outputs - targets).abs()


@register("loss", "huber")
@dataclass(frozen=True)
class Huber(NumberLoss):
    """Mean of ``e^2 / 2`` where ``|e| <= delta``, and of ``delta (|e| - delta / 2)`` beyond.

    Here e is the output minus the target; the mean is over an example's targets.
    Source: Huber 1964.
    """

    delta: Annotated[float, Gt(0)] = 1.0
    """The error beyond which the loss grows linearly."""

    def elementwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Quadratic up to delta, linear beyond."""
        gap = outputs - targets
        return torch.nn.functional.huber_loss(
            gap, torch.zeros_like(gap), reduction="none", delta=self.delta
        )


@register("loss", "quantile-error")
@dataclass(frozen=True)
class QuantileError(NumberLoss):
    """Mean of ``max(-q e, (1 - q) e)``, e the output minus the target, over an example's targets.

    It is least if the output is the q-quantile of the targets. Source: Koenker and Bassett 1978.
    """

    quantile: Annotated[float, Gt(0), Lt(1)] = 0.5
    """q: the share of targets below the output."""

    def elementwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``max(-q e, (1 - q) e)``."""
        gap = outputs - targets
        return torch.maximum(-self.quantile * gap, (1 - self.quantile) * gap)


SHORTEST_TIME = 1e-3
"""Times count as at least this, in units of `Weibull.time_scale`: at 0 there is no likelihood."""


@register("loss", "weibull")
@dataclass(frozen=True)
class Weibull(ExampleLoss):
    """Negative log-likelihood of a time until an event, or until it was last seen without one.

    Targets ``[B, 2]`` are a time, and 1 if the event was seen then, else 0 (censored). Outputs
    ``[B, 2]`` are the logarithms of the scale, in units of ``time_scale``, and of the shape of a
    Weibull distribution; with a shape of 1 the hazard is constant. The loss needs no other example,
    as Cox's partial likelihood does, whose gradient is no sum over examples.
    Source: Kalbfleisch and Prentice 2002.
    """

    predicts_targets: ClassVar[bool] = False
    time_scale: Annotated[float, Gt(0)] = 1.0
    """The unit of time, declared: a typical time, so that outputs near 0 fit."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example, ``[B]``; 0 where the time or the event is NaN.

        Raises
        ------
        FedsimError
            If an example does not have two targets, a time and an event.
        """
        outputs = like_targets(outputs, targets)
        times, events = times_and_events(targets)
        counts = ~(times.isnan() | events.isnan())
        # Masked before and after: NaN times zero is NaN, in the gradient too.
        times, events = torch.where(counts, times, 1.0), torch.where(counts, events, 0.0)
        log_times = (times.to(outputs) / self.time_scale).clamp_min(SHORTEST_TIME).log()
        log_scale, log_shape = outputs[..., 0], outputs[..., 1]
        hazards = (log_times - log_scale) * log_shape.exp()  # logarithm of the cumulative hazard
        likelihoods = events.to(outputs) * (hazards + log_shape - log_times) - hazards.exp()
        return torch.where(counts, -likelihoods, 0.0)


def times_and_events(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Both columns of targets ``[B, 2]``.

    Raises
    ------
    FedsimError
        If targets have another shape.
    """
    if targets.shape[1:] != (2,):
        raise FedsimError(
            f"there are targets {list(targets.shape)}; survival (task.loss = 'weibull', "
            "task.metrics = 'concordance') takes [B, 2], a time and whether the event was seen, "
            "as data.columns = 'y=time+event' has them."
        )
    return targets[..., 0], targets[..., 1]


@check_arguments
def loss_of(name: str, factory: Callable[..., Any], settings: Mapping[str, Any]) -> Loss:
    """Make a loss from a class or from a function of outputs and targets.

    Parameters
    ----------
    name : str
        Name of the loss, for error messages.
    factory : callable
        The class or function.
    settings : mapping of str to value
        Arguments of the class's constructor, or further keyword arguments of the function.

    Raises
    ------
    FedsimError
        If objects of the class are not callable.
    """
    made: Any = with_settings(factory, settings)
    if not callable(made):
        raise FedsimError(
            f"task.loss is '{name}', whose objects cannot be called; it must be a function of "
            "outputs and targets, or a class of them."
        )
    return made  # type: ignore[no-any-return]


def with_settings(factory: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """An object of a class with these settings, or a function with them bound to it."""
    if isinstance(factory, type):
        return factory(**settings)
    return partial(factory, **settings) if settings else factory
