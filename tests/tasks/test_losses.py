"""Losses: one number for each example, and nothing of what does not count."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedsim import RunConfig, registry
from fedsim.allowed_code import allow
from fedsim.errors import FedsimError
from fedsim.runs import factories
from fedsim.tasks import (
    IGNORED,
    AbsoluteError,
    Accuracy,
    BinaryCrossEntropy,
    CrossEntropy,
    Huber,
    QuantileError,
    SquaredError,
    Weibull,
)
from fedsim.tasks.statistics_loss import StatisticsLoss


def loss_of(**task):
    return factories.loss(RunConfig.parse({"task": task}))


@pytest.mark.parametrize(
    ("targets", "remedy"),
    [
        (torch.zeros(4), "y.astype"),
        (torch.zeros(4, 1, dtype=torch.int64), r"give y\[:, 0\]"),
        (torch.eye(4, 3, dtype=torch.int64), r"y.argmax\(1\)"),
        (torch.eye(4, 3), r"y.argmax\(1\)"),
    ],
)
def test_targets_that_are_no_classes_come_with_a_remedy(targets, remedy: str) -> None:
    with pytest.raises(FedsimError, match=remedy):
        CrossEntropy()(torch.zeros(4, 3), targets)


def test_the_loss_of_a_sequence_is_the_mean_over_the_positions_that_count() -> None:
    z = torch.randn(3, 6, 5, requires_grad=True)
    y = torch.randint(5, (3, 6))
    y[0, 2:], y[2] = IGNORED, IGNORED
    losses = CrossEntropy()(z, y)
    assert losses[0].item() == pytest.approx(F.cross_entropy(z[0, :2], y[0, :2]).item())
    assert losses[1].item() == pytest.approx(F.cross_entropy(z[1], y[1]).item())
    assert losses[2].item() == 0
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    assert gradient[2].abs().sum() == 0
    assert gradient[0, 2:].abs().sum() == 0
    assert bool(gradient.isfinite().all())


NUMBERS = [
    *(SquaredError(), AbsoluteError(), BinaryCrossEntropy(), BinaryCrossEntropy(3.0)),
    *(Huber(0.5), QuantileError(0.9)),
]


@pytest.mark.parametrize("loss", NUMBERS)
def test_numbers_that_do_not_count_have_no_part_in_a_loss_or_its_gradient(loss) -> None:
    z, y = torch.randn(3, 4), (torch.rand(3, 4) < 0.5).float()
    masked = y.clone()
    masked[0, 1:], masked[2] = math.nan, math.nan
    z.requires_grad_()
    losses = loss(z, masked)
    assert losses[0].item() == pytest.approx(loss(z[:1, :1], y[:1, :1]).item())
    assert losses[1].item() == pytest.approx(loss(z[1:2], y[1:2]).item())
    assert losses[2].item() == 0
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    assert bool(gradient.isfinite().all())
    assert gradient[0, 1:].abs().sum() == gradient[2].abs().sum() == 0


@pytest.mark.parametrize("shape", [(7,), (7, 5), (64, 784), (3, 4, 5), (1, 1)])
@pytest.mark.parametrize("loss", NUMBERS)
def test_a_loss_without_masks_is_the_same_where_every_target_counts(loss, shape) -> None:
    outputs, targets = torch.randn(shape), torch.rand(shape).round()
    results = []
    for of_examples in (loss, loss.without_mask):
        leaf = outputs.clone().requires_grad_()
        losses = of_examples(leaf, targets)
        results.append((losses, *torch.autograd.grad(losses, leaf, torch.full(shape[:1], 0.3))))
    (losses, gradients), (unmasked, unmasked_gradients) = results
    assert torch.equal(losses, unmasked)
    torch.testing.assert_close(gradients, unmasked_gradients, rtol=1e-6, atol=1e-9)


def test_losses_of_numbers_are_pytorchs() -> None:
    z, y = torch.randn(7, 1), torch.randn(7)
    torch.testing.assert_close(SquaredError()(z, y), (z[:, 0] - y) ** 2)
    torch.testing.assert_close(AbsoluteError()(z[:, 0], y), (z[:, 0] - y).abs())
    labels = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    expected = F.binary_cross_entropy_with_logits(z[:, 0], labels.float(), reduction="none")
    torch.testing.assert_close(BinaryCrossEntropy()(z, labels), expected)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (CrossEntropy(), torch.zeros(2, 3), torch.zeros(2)),
        (CrossEntropy(), torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64)),
        (SquaredError(), torch.zeros(2, 3), torch.zeros(2)),
        (BinaryCrossEntropy(), torch.zeros(2, 3), torch.zeros(2, 4)),
        (StatisticsLoss(), torch.zeros(2, 3), torch.zeros(2, 4)),
    ],
)
def test_outputs_that_do_not_fit_end_with_a_sentence(loss, outputs, targets) -> None:
    with pytest.raises(FedsimError, match=r"the model gives outputs .*task\.loss"):
        loss(outputs, targets)


def test_amounts_that_are_taken_for_classes_are_said_how_to_give() -> None:
    with pytest.raises(FedsimError, match=r"Whole numbers are classes.*astype\('float32'\)"):
        SquaredError()(torch.zeros(2, 31), torch.tensor([20, 30]))


@pytest.mark.parametrize("name", registry.names("loss"))
def test_every_loss_gives_one_number_for_each_example_under_vmap(name: str) -> None:
    # Of statistics a target has four sums, after the inputs' own term.
    width = 2 if name == "weibull" else 5  # a time and an event
    outputs = torch.randn(4, 3, 1 + 4 * 5 if name == "statistics" else width)
    classes = name == "cross-entropy"
    targets = torch.randint(5, (4, 3)) if classes else (torch.rand(4, 3, width) < 0.5).float()
    loss = loss_of(loss=name)
    apart = torch.stack([loss(z, y) for z, y in zip(outputs, targets, strict=True)])
    torch.testing.assert_close(torch.func.vmap(loss)(outputs, targets), apart)


def test_smoothed_labels_are_of_all_classes_alike() -> None:
    z, y = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 4, 2, IGNORED])
    hard = z.new_zeros(4, 5).scatter_(1, y.clamp_min(0)[:, None], 1.0)
    expected = -((0.8 * hard + 0.2 / 5) * z.log_softmax(-1)).sum(-1)
    losses = CrossEntropy(0.2)(z, y)
    torch.testing.assert_close(losses[:3], expected[:3])
    assert losses[3].item() == 0
    words = CrossEntropy(0.2)(z[None], y[None])
    torch.testing.assert_close(words, expected[:3].mean()[None])


def test_errors_far_off_and_on_one_side_count_as_they_are_told() -> None:
    gaps, zeros = torch.tensor([-3.0, -0.5, 0.25, 2.0]), torch.zeros(4)
    expected = torch.tensor([2 * (3 - 1.0), 0.125, 0.03125, 2.0])
    torch.testing.assert_close(Huber(2.0)(gaps, zeros), expected)
    torch.testing.assert_close(
        QuantileError(0.9)(gaps, zeros), torch.tensor([2.7, 0.45, 0.025, 0.2])
    )
    torch.testing.assert_close(QuantileError()(gaps, zeros), AbsoluteError()(gaps, zeros) / 2)


def test_a_label_that_is_there_counts_as_often_as_told() -> None:
    z, y = torch.randn(6, 3), (torch.rand(6, 3) < 0.5).float()
    plain = F.binary_cross_entropy_with_logits(z, y, reduction="none")
    expected = (plain * (1 + 2 * y)).mean(1)
    torch.testing.assert_close(BinaryCrossEntropy(3.0)(z, y), expected)


def scaled(outputs, targets, scale=1.0, *, shift=0.0):
    return scale * (outputs[:, 0] - targets).abs() + shift


def compared(outputs, soft_targets):
    return (outputs[:, 0] - soft_targets).abs()


class NoLoss:
    pass


def test_settings_of_a_loss_are_keys_or_options_of_ones_own() -> None:
    assert loss_of(**{"label-smoothing": 0.1}) == CrossEntropy(0.1)
    assert loss_of(loss="huber", delta=0.5) == Huber(0.5)
    own = loss_of(loss="test_losses:scaled", options={"scale": 2.0, "shift": 1.0})
    assert own(torch.ones(2, 1), torch.zeros(2)).tolist() == [3, 3]
    allow(["torch.nn"])
    torchs = loss_of(loss="torch.nn:HuberLoss", options={"reduction": "none", "delta": 0.5})
    z, y = torch.randn(5), torch.randn(5)
    torch.testing.assert_close(torchs(z, y), Huber(0.5)(z, y))
    flat = RunConfig.parse({"task": {"loss": "test_losses:scaled", "options": {"scale": 2.0}}})
    assert RunConfig.from_run_config(flat.to_run_config()) == flat


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ({"delta": 1.0}, r"task.delta = 1.0 has no effect with task.loss = 'cross-entropy'; it be"),
        ({"loss": "huber", "delta": 0.0}, r"task.delta = 0.0; it must be greater than 0"),
        ({"label-smoothing": 1}, r"task.label-smoothing = 1; it must be less than 1"),
        ({"loss": "crossentropy"}, r"task.loss = 'crossentropy'; did you mean 'cross-entropy'"),
        (
            {"loss": "test_losses:scaled", "options": {"scala": 1}},
            r"task.options.scala is not a setting of 'test_losses:scaled'; it takes scale, shift",
        ),
        (
            {"loss": "test_losses:scaled", "options": {"outputs": 1}},
            r"task.options.outputs is set; its value follows from other keys",
        ),
        (
            {"loss": "test_losses:compared", "options": {"soft-targets": 1}},
            r"task.options.soft-targets is set; its value follows from other keys",
        ),
        (
            {"loss": "test_losses:NoLoss"},
            r"'test_losses:NoLoss', a class that is not a fedsim\.tasks",
        ),
    ],
)
def test_settings_that_a_loss_does_not_have_are_refused_by_name(task, sentence) -> None:
    with pytest.raises(FedsimError, match=sentence):
        loss_of(**task)


@pytest.mark.parametrize(
    ("cls", "settings"),
    [(CrossEntropy, [1.0]), (Huber, [0.0]), (QuantileError, [0.0]), (BinaryCrossEntropy, [-1.0])],
)
def test_a_loss_refuses_settings_out_of_range_in_python_too(cls, settings) -> None:
    with pytest.raises(FedsimError, match=r"task\.[a-z-]+ is"):
        cls(*settings)


def test_the_default_metric_of_numbers_is_named_where_the_loss_is_of_numbers() -> None:
    with pytest.raises(FedsimError, match=r"task\.metrics = 'rmse'"):
        Accuracy().update(Accuracy().init(), torch.zeros(2, 1), torch.tensor([0.5, 1.5]))


def test_an_example_counts_as_often_as_its_class_is_declared_to() -> None:
    z, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, IGNORED, 0])
    weights = torch.tensor([1.0, 0.0, 2.5])
    plain = CrossEntropy(0.1)(z, y)
    loss = CrossEntropy(0.1, class_weights=(1, 0, 2.5))
    weighted = loss(z, y)
    torch.testing.assert_close(weighted, plain * weights[y.clamp_min(0)])
    # An example's loss is the same whoever else is in the batch: nothing is divided by weights.
    torch.testing.assert_close(loss(z[3:4], y[3:4])[0], weighted[3])
    assert loss_of(**{"class-weights": "1, 0,2.5"}) == CrossEntropy(class_weights=(1.0, 0.0, 2.5))
    with pytest.raises(FedsimError, match=r"class-weights has 2 numbers; .* each of the 3 classes"):
        CrossEntropy(class_weights=(1, 2))(z, y)
    for wrong in ("1,-1", "1,nan", "a,b", "1,inf", "1;2"):
        with pytest.raises(FedsimError, match=r"class-weights = .*; it must be numbers from 0"):
            loss_of(**{"class-weights": wrong})


def test_times_have_the_likelihood_of_a_weibull_distribution_with_those_not_seen_censored() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, 2, generator=generator, dtype=torch.float64).mul(0.5).requires_grad_()
    times = torch.rand(50, generator=generator, dtype=torch.float64) * 900 + 1
    seen = torch.arange(50) % 3 > 0
    y = torch.stack([times, seen.double()], 1)
    law = torch.distributions.Weibull(z[:, 0].exp(), z[:, 1].exp())
    unit = times / 300
    survival = -((unit / z[:, 0].exp()) ** z[:, 1].exp())
    expected = -torch.where(seen, law.log_prob(unit), survival)
    losses = Weibull(time_scale=300)(z, y)
    torch.testing.assert_close(losses, expected)
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    (known,) = torch.autograd.grad(expected.sum(), z)
    torch.testing.assert_close(gradient, known)


def test_a_time_or_an_event_that_is_missing_adds_nothing_and_a_time_of_zero_is_finite() -> None:
    z = torch.zeros(3, 2, requires_grad=True)
    y = torch.tensor([[math.nan, 1.0], [2.0, math.nan], [0.0, 1.0]])
    losses = Weibull()(z, y)
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    assert losses[:2].tolist() == [0, 0]
    assert gradient[:2].abs().sum() == 0
    assert bool(losses.isfinite().all() and gradient.isfinite().all())
    with pytest.raises(FedsimError, match=r"takes \[B, 2\], a time and whether the event was seen"):
        Weibull()(torch.zeros(3, 3), torch.zeros(3, 3))
