"""The right behaviour for each defect of Flower's own DP wrappers (1.39 to 1.42)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedsim.cohorts import FixedCohort, FullCohort, PoissonCohort
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import array_record, tensors
from fedsim.mechanisms import Clipping, Mechanism, Normalization
from fedsim.privacy import Accountant, Event, epsilon
from fedsim.strategies import DPFedAvg


def after_one_round(
    updates: list[dict[str, Tensor]],
    mechanism: Mechanism,
    *,
    noise_multiplier: float = 0.0,
    examples: list[int] | None = None,
    failing: tuple[int, ...] = (),
    seed: int = 1,
) -> dict[str, Tensor]:
    """The model, started at zero, after a round in which client i sends ``updates[i]``."""

    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        if client in failing:
            raise RuntimeError("out of memory")
        arrays = message.content.array_records["arrays"]
        moved = {
            name: Array(np.asarray(arrays[name].numpy() + update.numpy(), arrays[name].dtype))
            for name, update in updates[client].items()
        }
        metrics = MetricRecord({"num-examples": (examples or [1] * len(updates))[client]})
        content = RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics})
        return Message(content, reply_to=message)

    app = ClientApp()
    app.train()(train)
    strategy = DPFedAvg(
        mechanism=mechanism,
        cohort=FullCohort(len(updates)),
        noise_multiplier=noise_multiplier,
        seed=seed,
    )
    zeros = {name: torch.zeros_like(update) for name, update in updates[0].items()}
    result = strategy.start(LocalGrid(app, num_nodes=len(updates)), array_record(zeros), 1)
    return tensors(result.arrays)


def test_3_a_client_with_many_examples_moves_the_mean_no_further_than_the_noise_assumes() -> None:
    updates = [{"w": torch.ones(1)}, *({"w": torch.zeros(1)} for _ in range(9))]
    moved = after_one_round(updates, Clipping(1.0), examples=[991] + [1] * 9)
    assert moved["w"].item() == pytest.approx(0.1, abs=1e-8)


def test_4_zero_dimensional_parameters_are_bounded_with_the_others() -> None:
    update = {"w": torch.tensor([3.0]), "scale": torch.tensor(4.0)}
    moved = after_one_round([update], Clipping(1.0))
    assert moved["w"].item() == pytest.approx(0.6, abs=1e-6)
    assert moved["scale"].item() == pytest.approx(0.8, abs=1e-6)
    assert moved["scale"].shape == ()


@pytest.mark.parametrize("size", [0.01, 100.0])
def test_5_integer_arrays_are_left_alone_whether_or_not_the_update_is_clipped(size: float) -> None:
    update = {"w": torch.tensor([size]), "steps": torch.tensor([7])}
    moved = after_one_round([update], Clipping(1.0))
    assert moved["steps"].tolist() == [0]
    assert moved["w"].item() == pytest.approx(min(size, 1.0), abs=1e-6)


@pytest.mark.parametrize("mechanism", [Clipping(1.0), Normalization(1.0)])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -float("inf")])
def test_6_a_zero_or_non_finite_update_contributes_nothing(
    mechanism: Mechanism, value: float
) -> None:
    moved = after_one_round([{"w": torch.full((3,), value)}, {"w": torch.eye(3)[0]}], mechanism)
    np.testing.assert_allclose(moved["w"], [0.5, 0.0, 0.0], atol=1e-8)


def test_7_arrays_are_matched_by_their_keys() -> None:
    update = {"a": torch.tensor([0.3]), "b": torch.tensor([0.4])}
    other = dict(reversed(update.items()))
    moved = after_one_round([update, other], Clipping(1.0))
    assert moved["a"].item() == pytest.approx(0.3, abs=1e-6)
    assert moved["b"].item() == pytest.approx(0.4, abs=1e-6)


def test_8_one_failed_client_does_not_drop_the_round() -> None:
    updates = [{"w": torch.ones(1)} for _ in range(4)]
    moved = after_one_round(updates, Clipping(1.0), failing=(2,))
    assert moved["w"].item() == pytest.approx(0.75, abs=1e-8)


def test_10_noise_does_not_come_from_a_global_generator() -> None:
    def noisy(seed: int) -> Tensor:
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        return after_one_round([{"w": torch.zeros(50)}], Clipping(1.0), noise_multiplier=1.0)["w"]

    assert torch.equal(noisy(1), noisy(2))


def test_11_sampling_amplifies() -> None:
    event = Event.of(PoissonCohort(rate=0.05), 1.0)
    cost = Accountant([event.times(100)]).cost(1e-5)
    assert cost.rdp_epsilon == pytest.approx(4.04, abs=0.01)
    assert cost.epsilon == pytest.approx(3.50, abs=0.01)


@pytest.mark.parametrize(("size", "population"), [(1, 2), (19, 20)])
def test_12_a_fixed_size_cohort_is_charged_at_least_its_true_cost(
    size: int, population: int
) -> None:
    """One of two clients at z = 1: the true delta at epsilon 4.38 is 1.5e-2, of 19, 5e-2."""
    cohort = FixedCohort(size, population)
    spent = epsilon(noise_multiplier=1.0, cohort=cohort, rounds=1, delta=1e-5)
    strategy = DPFedAvg(mechanism=Clipping(1.0), cohort=cohort, noise_multiplier=1.0)
    assert strategy.plan.event().adjacency == "replace-one"
    assert spent > 1.5 * 4.38
