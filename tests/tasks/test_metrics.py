"""Metrics against scikit-learn, and against themselves cut into blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import hypothesis_examples
from torch import Tensor

from fedsim import RunConfig, registry
from fedsim.errors import FedsimError
from fedsim.runs import factories
from fedsim.tasks import (
    AUC,
    F1,
    IGNORED,
    R2,
    RMSE,
    Accuracy,
    AveragePrecision,
    CalibrationError,
    Concordance,
    CrossEntropy,
    ExactSum,
    MeanOf,
    Metric,
    Perplexity,
    TopK,
)
from fedsim.tasks.metrics import predicted_classes


def metrics_of(metrics: object) -> dict[str, Metric]:
    return factories.metrics(RunConfig.parse({"task": {"metrics": metrics}}))


Case = tuple[Metric, Callable[[Tensor, Tensor], float], str]


def softmax(z: Tensor) -> np.ndarray:
    return z.double().softmax(-1).numpy()


def by_hand_ece(z: Tensor, y: Tensor) -> float:
    p = softmax(z)
    confidence, right = p.max(1), p.argmax(1) == y.numpy()
    edges = np.linspace(0, 1, 16)
    total = 0.0
    for low, high in pairwise(edges):
        mine = (confidence > low) & (confidence <= high)
        if mine.any():
            total += mine.mean() * abs(confidence[mine].mean() - right[mine].mean())
    return total


CASES: list[Case] = [
    (Accuracy(), lambda z, y: sk.accuracy_score(y, z.argmax(1)), "classes"),
    (
        TopK(2),
        lambda z, y: sk.top_k_accuracy_score(y, z.numpy(), k=2, labels=range(4)),
        "classes",
    ),
    (F1(), lambda z, y: sk.f1_score(y, z.argmax(1), average="macro"), "classes"),
    (F1("micro"), lambda z, y: sk.f1_score(y, z.argmax(1), average="micro"), "classes"),
    (
        Perplexity(),
        lambda z, y: math.exp(sk.log_loss(y, softmax(z), labels=range(4))),
        "classes",
    ),
    (CalibrationError(), by_hand_ece, "classes"),
    (AUC(), lambda z, y: sk.roc_auc_score(y, (z[:, 1] - z[:, 0]).numpy()), "binary"),
    (
        AUC(),
        lambda z, y: sk.roc_auc_score(y, softmax(z), multi_class="ovr", labels=range(4)),
        "classes",
    ),
    (AUC(), lambda z, y: sk.roc_auc_score(y, z.numpy(), average="macro"), "labels"),
    (
        AveragePrecision(),
        lambda z, y: sk.average_precision_score(y, (z[:, 1] - z[:, 0]).numpy()),
        "binary",
    ),
    (
        AveragePrecision(),
        lambda z, y: sk.average_precision_score(y, z.numpy(), average="macro"),
        "labels",
    ),
    (
        F1(),
        lambda z, y: sk.f1_score(y, (z > 0).int().numpy(), average="macro", zero_division=0),
        "labels",
    ),
    (R2(), lambda z, y: sk.r2_score(y, z.numpy()), "numbers"),
    (R2(), lambda z, y: sk.r2_score(y, z.numpy()), "vectors"),
    (RMSE(), lambda z, y: sk.root_mean_squared_error(y, z[:, 0].numpy()), "numbers"),
    (
        MeanOf(CrossEntropy()),
        lambda z, y: sk.log_loss(y, softmax(z), labels=range(4)),
        "classes",
    ),
]


def examples(kind: str, seed: int, n: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    # Few distinct scores: ties are where rankings differ.
    z = torch.randint(-3, 4, (n, 4), generator=generator).float() / 2
    if kind == "classes":
        # Every class occurs, as scikit-learn wants it.
        return z + torch.arange(4) * 1e-4, torch.arange(n)[
            torch.randperm(n, generator=generator)
        ] % 4
    if kind == "binary":
        return z[:, :2], order % 2
    if kind == "labels":
        return z, (torch.rand(n, 4, generator=generator) < 0.4).float()
    if kind == "numbers":
        return z[:, :1], torch.randn(n, generator=generator) + 1000
    return z, torch.randn(n, 4, generator=generator)


def value_in_parts(metric: Metric, z: Tensor, y: Tensor, cuts: list[int]) -> float:
    """The metric of pieces, merged as a tree that leans to the right."""
    states = [
        metric.update(metric.init(), a, b)
        for a, b in zip(z.tensor_split(cuts), y.tensor_split(cuts), strict=True)
    ]
    while len(states) > 1:
        states = [*states[:-2], metric.merge(states[-1], states[-2])]
    return metric.finish(states[0])


@pytest.mark.parametrize(("metric", "reference", "kind"), CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_metric_is_scikit_learns(
    metric: Metric, reference: Callable[[Tensor, Tensor], float], kind: str, seed: int
) -> None:
    z, y = examples(kind, seed)
    ours = metric.finish(metric.update(metric.init(), z, y))
    assert ours == pytest.approx(reference(z, y), rel=1e-5, abs=1e-7)


@hypothesis_examples(15)
@given(
    st.sampled_from(CASES),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 60), max_size=8),
    st.randoms(use_true_random=False),
)
def test_a_metric_is_the_same_number_however_examples_are_cut_and_ordered(
    case: Case, seed: int, cuts: list[int], random: object
) -> None:
    metric, _, kind = case
    z, y = examples(kind, seed)
    whole = metric.finish(metric.update(metric.init(), z, y))
    assert value_in_parts(metric, z, y, sorted(cuts)) == whole
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))
    assert value_in_parts(metric, z[order], y[order], sorted(cuts)) == whole


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=64), max_size=30))
def test_an_exact_sum_is_the_sum_of_rationals(values: list[float]) -> None:
    total = ExactSum.from_values(np.array(values))
    assert Fraction(total.units, 1 << 1200) == sum(map(Fraction, values), Fraction(0))
    assert total.count == len(values)


def test_what_is_not_finite_makes_a_mean_nan() -> None:
    assert math.isnan(
        (ExactSum.from_values(np.array([1.0, np.inf])) + ExactSum.from_values(np.ones(3))).mean
    )
    assert math.isnan(ExactSum().mean)


def test_positions_that_do_not_count_are_in_no_metric() -> None:
    z = torch.randn(3, 4, 5)
    y = torch.randint(5, (3, 4))
    y[0, 2:] = IGNORED
    y[1] = IGNORED
    kept = y != IGNORED
    for metric in (Accuracy(), TopK(2), Perplexity(), F1(), CalibrationError()):
        flat = metric.finish(metric.update(metric.init(), z[kept], y[kept]))
        assert metric.finish(metric.update(metric.init(), z, y)) == flat
    v, w = torch.randn(6, 3), torch.randn(6, 3)
    w[0, 1] = math.nan
    known = ~w.isnan()
    alone = [R2().finish(R2().update((), v[known[:, k], k], w[known[:, k], k])) for k in range(3)]
    assert R2().finish(R2().update((), v, w)) == pytest.approx(sum(alone) / 3)
    flat = RMSE().finish(RMSE().update(RMSE().init(), v[known], w[known]))
    assert RMSE().finish(RMSE().update(RMSE().init(), v, w)) == flat


def test_what_is_not_defined_is_nan_and_not_an_error() -> None:
    nothing = torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)
    for name in registry.names("metric"):
        (metric,) = metrics_of(name).values()
        assert math.isnan(metric.finish(metric.init())), name
    for metric in (Accuracy(), AUC(), F1(), Perplexity(), CalibrationError(), AveragePrecision()):
        assert math.isnan(metric.finish(metric.update(metric.init(), *nothing)))
    one_class = torch.randn(5, 2), torch.ones(5, dtype=torch.int64)
    assert math.isnan(AUC().finish(AUC().update((), *one_class)))
    constant = torch.randn(5), torch.full((5,), 3.7)
    assert math.isnan(R2().finish(R2().update((), *constant)))


def test_r2_of_numbers_far_from_zero_loses_nothing() -> None:
    y = torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64)
    assert R2().finish(R2().update((), y + 0.5, y)) == 1 - 0.75 / 2


def test_one_output_is_a_logit() -> None:
    z, y = torch.tensor([[-1.0], [2.0], [3.0]]), torch.tensor([0, 1, 0])
    for outputs in (z, z[:, 0]):
        assert Accuracy().finish(Accuracy().update(Accuracy().init(), outputs, y)) == 2 / 3
        assert AUC().finish(AUC().update((), outputs, y)) == 0.5


@pytest.mark.parametrize("metric", [Accuracy(), F1(average="micro"), TopK(1)])
def test_an_output_that_is_nan_is_measured_as_the_class_that_predict_gives(metric: Metric) -> None:
    for classes in (1, 2, 3):
        outputs = torch.full((4, classes), math.nan)
        predicted = predicted_classes(outputs)
        assert predicted.tolist() == [0] * 4
        assert metric.finish(metric.update(metric.init(), outputs, predicted)) == 1
        assert metric.finish(metric.update(metric.init(), outputs, predicted + 1)) == 0


@pytest.mark.parametrize("metric", [Accuracy(), F1(), TopK(1), TopK(2), CalibrationError(), AUC()])
def test_a_model_with_one_output_is_measured_as_one_with_two(metric: Metric) -> None:
    z, y = torch.tensor([[-40.0], [50.0], [60.0], [-50.0]]), torch.tensor([0, 1, 1, 0])
    best = 0.0 if metric.higher_is_better is False else 1.0
    for outputs, targets in ((z, y), (z[:, 0], y), (z.view(2, 2), y.view(2, 2))):
        assert metric.finish(metric.update(metric.init(), outputs, targets)) == best
    z = torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 2
    two = torch.cat([torch.zeros(40, 1), z], 1)
    for other in (metric, Perplexity()):
        one, both = (other.finish(other.update(other.init(), logits, y)) for logits in (z, two))
        assert one == both


@pytest.mark.parametrize(
    ("metric", "outputs", "targets"),
    [
        (Accuracy(), (4, 3), torch.zeros(4)),
        (Accuracy(), (4, 3), torch.zeros(4, 1, dtype=torch.int64)),
        (Perplexity(), (4, 3, 5), torch.zeros(4, dtype=torch.int64)),
        (RMSE(), (4, 3), torch.zeros(4)),
        (AUC(), (4, 3), torch.zeros(4, 2)),
    ],
)
def test_outputs_that_do_not_fit_their_targets_end_with_a_sentence(
    metric: Metric, outputs: tuple[int, ...], targets: Tensor
) -> None:
    with pytest.raises(FedsimError, match=r"the model gives outputs .* task\.metrics"):
        metric.update(metric.init(), torch.zeros(outputs), targets)


def test_metrics_are_called_by_their_names_and_options() -> None:
    chosen = metrics_of("top-k(k=3), top-k,auc ,f1(average=micro), calibration-error( bins = 10 )")
    assert chosen == {
        "top-k-3": TopK(3),
        "top-k": TopK(5),
        "auc": AUC(),
        "f1-micro": F1("micro"),
        "calibration-error-10": CalibrationError(10),
    }
    assert metrics_of(["accuracy", "top-k(k=2)"]) == metrics_of("accuracy,top-k(k=2)")
    assert metrics_of("") == {}
    written = [
        RunConfig.from_overrides([f"task.metrics={text}"])
        for text in ("auc,f1", "auc , f1,", "auc, f1")
    ]
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ("acuracy", r"task\.metrics = 'acuracy'; did you mean 'accuracy'\? It must be"),
        ("top-3", r"task\.metrics = 'top-3'; did you mean 'top-k'"),
        ("top-k(k=0)", r"task\.metrics\.top-k\.k = 0; it must be at least 1"),
        ("top-k(k=1.5)", r"task\.metrics\.top-k\.k = 1\.5; it must be a whole number"),
        ("top-k(n=3)", r"task\.metrics\.top-k\.n is not a setting of 'top-k'; it takes k\."),
        ("accuracy(k=3)", r"is not a setting of 'accuracy'; it takes no options"),
        ("f1(average=weighted)", r"task\.metrics\.f1\.average = 'weighted'; it must be 'macro' or"),
        ("top-k(3)", r"task\.metrics\.top-k has '3'; it must be of the form key=value"),
        ("top-k(k=3", r"task\.metrics has 'top-k\(k=3'; it must be of the form name, or name\("),
        ("auc,accuracy,auc", r"has two that would be called 'auc'"),
        ("test_metrics:first,test_metrics:none", r"test_metrics' has no callable 'none'"),
        ([1], r"task\.metrics = \[1\]; it must be a string"),
    ],
)
def test_metrics_that_there_are_not_are_refused_by_name(metrics: object, sentence: str) -> None:
    with pytest.raises(FedsimError, match=sentence):
        metrics_of(metrics)


def first(outputs: Tensor, targets: Tensor, column: int = 0) -> Tensor:
    return outputs[:, column]


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


@dataclass(frozen=True)
class Own(TopK):
    pass


def test_a_function_is_a_metric_that_is_averaged() -> None:
    metric = metrics_of("test_metrics:first")["first"]
    z, y = torch.tensor([[1.0, 5.0], [2.0, 5.0]]), torch.zeros(2)
    assert metric.finish(metric.update(metric.init(), z, y)) == 1.5
    other = metrics_of("test_metrics:first(column=1)")["first-1"]
    assert other.finish(other.update(other.init(), z, y)) == 5
    assert metrics_of("test_metrics:Own") == {"Own": Own()}
    assert metrics_of("test_metrics:Own(k=2)") == {"Own-2": Own(2)}
    with pytest.raises(FedsimError, match=r"'mean' gives \[\] for 2 examples"):
        metrics_of("test_metrics:mean")["mean"].update(ExactSum(), z, y)


def by_hand_concordance(z: Tensor, y: Tensor) -> float:
    """Harrell's C by its definition, pair by pair."""
    hits = pairs = 0.0
    for i in range(len(z)):
        for j in range(len(z)):
            earlier = y[i, 0] < y[j, 0] or (y[i, 0] == y[j, 0] and not y[j, 1])
            if y[i, 1] and earlier and i != j:
                pairs += 1
                hits += float(z[i, 0] < z[j, 0]) + 0.5 * float(z[i, 0] == z[j, 0])
    return hits / pairs


def test_concordance_is_the_share_of_comparable_pairs_in_order() -> None:
    generator = torch.Generator().manual_seed(3)
    z = torch.randint(-3, 4, (40, 2), generator=generator).float()
    y = torch.stack(
        [torch.randint(1, 12, (40,), generator=generator), torch.arange(40) % 3 > 0], 1
    ).float()
    metric = Concordance()
    whole = metric.finish(metric.update(metric.init(), z, y))
    assert whole == pytest.approx(by_hand_concordance(z, y))
    parts = [metric.update(metric.init(), z[part], y[part]) for part in (slice(17), slice(17, 40))]
    assert metric.finish(metric.merge(*reversed(parts))) == whole
    exact = torch.tensor([[1.0], [2.0], [3.0]])
    assert metric.finish(metric.update((), exact, torch.tensor([[5.0, 1], [7, 0], [8, 1]]))) == 1
    assert math.isnan(metric.finish(metric.update((), exact, torch.zeros(3, 2))))
    with pytest.raises(FedsimError, match="a time and whether the event was seen"):
        metric.update((), exact, torch.zeros(3))
