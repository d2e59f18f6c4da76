from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from fixed_clients import Fixed
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedsim.cohorts import Cohort, FixedCohort, FullCohort, PoissonCohort
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record, tensors
from fedsim.mechanisms import Clipping, Mechanism, NoPrivacy, Normalization
from fedsim.privacy import Independent, Ledger, epsilon
from fedsim.privacy.plan import ReleasePlan
from fedsim.strategies import ClientMetrics, DPFedAvg, adam, sgd


def start(
    trainer: Fixed | ClientApp,
    strategy: DPFedAvg,
    initial: Tensor,
    rounds: int = 1,
    num_nodes: int | None = None,
) -> Tensor:
    grid = LocalGrid(trainer, num_nodes=num_nodes)
    result = strategy.start(grid, array_record({"w": initial}), num_rounds=rounds)
    return tensors(result.arrays)["w"]


ORACLE = torch.tensor([[-0.3, -0.4], [0.03, 0.04]], dtype=torch.float64)
"""Updates w_E - w = -eta u of ALGORITHMS' worked round: eta = 0.1, u = (3,4) and (-.3,-.4)."""


@pytest.mark.parametrize(
    ("mechanism", "expected"),
    [
        (Clipping(0.1), (0.985, 0.98)),
        (Normalization(0.1), (1.0, 1.0)),
        (NoPrivacy("uniform"), (0.865, 0.82)),
    ],
)
def test_one_round_gives_the_closed_form(
    mechanism: Mechanism, expected: tuple[float, float]
) -> None:
    # In terms of the update, C is eta C = 0.1 and beta/eta = 1 is the server's rate.
    strategy = DPFedAvg(
        mechanism=mechanism, noise_multiplier=0.0, cohort=FullCohort(population=2), seed=1
    )
    reached = start(Fixed(ORACLE), strategy, torch.ones(2, dtype=torch.float64))
    np.testing.assert_allclose(reached.numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("cohort", [PoissonCohort(0.5, 40), FixedCohort(13, 40), FullCohort(40)])
def test_results_do_not_depend_on_the_block_size(cohort: Cohort) -> None:
    updates = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))

    def run(block_size: int) -> bytes:
        strategy = DPFedAvg(mechanism=Clipping(1.0), cohort=cohort, noise_multiplier=1.0, seed=3)
        reached = start(Fixed(updates, block_size=block_size), strategy, torch.zeros(300), 3)
        return reached.numpy().tobytes()

    assert run(1) == run(7) == run(40)


def test_runs_with_one_seed_give_the_same_bytes_and_with_another_seed_do_not() -> None:
    updates = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))

    def run(seed: int | None) -> bytes:
        strategy = DPFedAvg(
            mechanism=Clipping(1.0),
            cohort=PoissonCohort(0.5, 20),
            noise_multiplier=1.0,
            seed=seed,
        )
        return start(Fixed(updates), strategy, torch.zeros(30), 2).numpy().tobytes()

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(None) != run(None)


@given(seed=st.integers(0, 2**32), scale=st.floats(1e-3, 1e3))
def test_one_more_client_moves_the_noise_free_sum_by_at_most_c(seed: int, scale: float) -> None:
    updates = scale * torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))

    def total(population: int, cohort: Cohort) -> Tensor:
        strategy = DPFedAvg(mechanism=Clipping(1.0), noise_multiplier=0.0, cohort=cohort, seed=seed)
        start_ = torch.zeros(5, dtype=torch.float32)
        return cohort.expected_size * start(Fixed(updates[:population]), strategy, start_).double()

    for make in (lambda n: PoissonCohort(0.5, n), lambda n: FullCohort(n)):
        moved = torch.linalg.vector_norm(total(8, make(8)) - total(7, make(7)))
        assert moved <= 1 + 1e-4


@given(seed=st.integers(0, 2**32), scale=st.floats(1e-3, 1e3))
def test_another_client_in_ones_place_moves_a_fixed_sum_by_at_most_2c(
    seed: int, scale: float
) -> None:
    updates = scale * torch.randn(9, 5, generator=torch.Generator().manual_seed(seed))

    def total(members: list[int]) -> Tensor:
        strategy = DPFedAvg(
            mechanism=Clipping(1.0), noise_multiplier=0.0, cohort=FixedCohort(4, 8), seed=seed
        )
        return 4 * start(Fixed(updates[members]), strategy, torch.zeros(5)).double()

    moved = total([0, 1, 2, 3, 4, 5, 6, 7]) - total([0, 1, 2, 8, 4, 5, 6, 7])
    assert torch.linalg.vector_norm(moved) <= 2 + 1e-4


def test_the_denominator_is_declared_and_does_not_count_replies() -> None:
    updates = torch.ones(4, 1)
    strategy = DPFedAvg(
        mechanism=Clipping(1.0), noise_multiplier=0.0, cohort=FullCohort(population=10), seed=1
    )
    assert start(Fixed(updates), strategy, torch.zeros(1)).item() == pytest.approx(0.4)


def test_example_counts_never_weigh_a_private_sum() -> None:
    updates = torch.tensor([[1.0], [0.0]])
    for examples in ([1, 1], [991, 9]):
        strategy = DPFedAvg(
            mechanism=Clipping(1.0), noise_multiplier=0.0, cohort=FullCohort(2), seed=1
        )
        trainer = Fixed(updates, examples=examples)
        assert start(trainer, strategy, torch.zeros(1)).item() == pytest.approx(0.5)


def test_no_privacy_is_flowers_fedavg() -> None:
    app = _app()
    initial = torch.zeros(3, dtype=torch.float64)
    ours = start(
        app,
        DPFedAvg(mechanism=NoPrivacy("num-examples"), cohort=FullCohort(5), seed=1),
        initial,
        3,
        num_nodes=5,
    )
    fedavg = FedAvg(fraction_evaluate=0.0)
    theirs = fedavg.start(LocalGrid(app, num_nodes=5), array_record({"w": initial}), 3)
    np.testing.assert_allclose(ours, tensors(theirs.arrays)["w"], rtol=1e-12)


def test_a_failed_or_malformed_client_contributes_nothing_and_is_counted() -> None:
    updates = torch.eye(4)
    updates[2] = torch.nan
    strategy = DPFedAvg(
        mechanism=Normalization(1.0), noise_multiplier=0.0, cohort=FullCohort(4), seed=1
    )
    reached = start(Fixed(updates, failing=(1,)), strategy, torch.zeros(4))
    np.testing.assert_allclose(reached, [0.25, 0, 0, 0.25], atol=1e-8)
    assert strategy.report is not None
    assert (strategy.report.usable, strategy.report.failed) == (2, 2)


@pytest.mark.parametrize("fault", ["raise", "nan", "shape", "key", "surplus", "garbage", "integer"])
def test_a_flower_client_with_any_fault_contributes_nothing(fault: str) -> None:
    strategy = DPFedAvg(
        mechanism=Clipping(10.0), noise_multiplier=0.0, cohort=FullCohort(4), seed=1
    )
    reached = start(_app(fault), strategy, torch.zeros(3, dtype=torch.float64), num_nodes=4)
    # Clients 1, 2, 3 move every coordinate by their id; client 0 has the fault.
    np.testing.assert_allclose(reached, np.full(3, (1 + 2 + 3) / 4), rtol=1e-8)
    assert strategy.report is not None
    assert strategy.report.failed == 1


def test_a_client_that_answers_twice_counts_once() -> None:
    strategy = DPFedAvg(mechanism=Clipping(1.0), noise_multiplier=0.0, cohort=FullCohort(2), seed=1)
    grid = LocalGrid(_app(), num_nodes=2)
    initial = array_record({"w": torch.zeros(3, dtype=torch.float64)})
    asked = strategy.configure_train(1, initial, ConfigRecord(), grid)
    replies = list(grid.send_and_receive(list(asked)))
    arrays, _ = strategy.aggregate_train(1, [*replies, *replies])
    assert arrays is not None
    # Client 0 sends zero; client 1 sends (1, 1, 1), clipped to norm 1.
    np.testing.assert_allclose(tensors(arrays)["w"], np.full(3, 1 / 3**0.5 / 2), rtol=1e-8)


def test_an_empty_poisson_cohort_releases_noise_and_is_charged() -> None:
    strategy = DPFedAvg(
        mechanism=Clipping(1.0), cohort=PoissonCohort(1e-9, 5), noise_multiplier=1.0, seed=1
    )
    reached = start(Fixed(torch.ones(5, 4)), strategy, torch.zeros(4))
    assert (reached != 0).all()
    assert strategy.privacy_spent().num_releases == 1


def test_a_cohort_of_clients_that_are_not_there_releases_noise_as_an_empty_one_does() -> None:
    strategy = DPFedAvg(
        mechanism=Clipping(1.0), cohort=PoissonCohort(0.9, 4), noise_multiplier=1.0, seed=1
    )
    grid = LocalGrid(_app(), num_nodes=1)
    # Client 0, the only one that exists, is not drawn in this round, and others are.
    asked = next(
        t
        for t in range(1, 200)
        if 0 not in (drawn := strategy.participants.cohort(t)) and len(drawn)
    )
    initial = array_record({"w": torch.zeros(3, dtype=torch.float64)})
    messages = strategy.configure_train(asked, initial, ConfigRecord(), grid)
    arrays, _ = strategy.aggregate_train(asked, grid.send_and_receive(messages))
    assert arrays is not None
    assert (tensors(arrays)["w"] != 0).all()


def test_the_ledger_line_is_on_disk_before_the_release(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"

    class Watching(Clipping):
        lines: list[int] = []  # noqa: RUF012

        def restore(self, w, round_state):
            self.lines.append(path.read_text().count('"round"'))
            return super().restore(w, round_state)

    strategy = DPFedAvg(
        mechanism=Watching(1.0),
        cohort=FullCohort(3),
        noise_multiplier=1.0,
        ledger=path,
        seed=1,
    )
    start(Fixed(torch.ones(3, 2)), strategy, torch.zeros(2), 3)
    assert Watching.lines == [1, 2, 3]


def test_the_ledgers_epsilon_is_the_accountants(tmp_path: Path) -> None:
    cohort = PoissonCohort(0.3, 10)
    strategy = DPFedAvg(
        mechanism=Clipping(1.0),
        cohort=cohort,
        noise_multiplier=1.3,
        delta=1e-5,
        ledger=tmp_path / "ledger.jsonl",
        seed=1,
    )
    start(Fixed(torch.ones(10, 2)), strategy, torch.zeros(2), 7)
    expected = epsilon(noise_multiplier=1.3, cohort=cohort, rounds=7, delta=1e-5)
    assert strategy.privacy_spent().epsilon == pytest.approx(expected, rel=1e-6)
    assert Ledger(tmp_path / "ledger.jsonl").epsilon(1e-5) == pytest.approx(expected, rel=1e-6)


def test_the_budget_stops_the_run_before_the_release_that_would_exceed_it() -> None:
    cohort = PoissonCohort(0.8, 10)
    budget = epsilon(noise_multiplier=1.3, cohort=cohort, rounds=5, delta=1e-5) * 1.001
    strategy = DPFedAvg(
        mechanism=Clipping(1.0),
        cohort=cohort,
        noise_multiplier=1.3,
        delta=1e-5,
        max_epsilon=budget,
        seed=1,
    )
    trainer = Fixed(torch.ones(10, 2))
    reached = start(trainer, strategy, torch.zeros(2), 50)
    assert strategy.privacy_spent().num_releases == 5
    # Nobody trains for a round that will not be released.
    assert len(trainer.rounds) == 5
    assert strategy.stopped is not None
    assert "round 6" in strategy.stopped
    assert strategy.privacy_spent().epsilon <= budget
    assert (reached != 0).all()


def test_the_budget_of_a_given_ledger_stops_the_run_before_clients_train() -> None:
    budget = epsilon(noise_multiplier=1.3, cohort=FullCohort(10), rounds=2, delta=1e-5) * 1.001
    strategy = DPFedAvg(
        mechanism=Clipping(1.0),
        cohort=FullCohort(10),
        noise_multiplier=1.3,
        delta=1e-5,
        ledger=Ledger(max_epsilon=budget),
        seed=1,
    )
    trainer = Fixed(torch.ones(10, 2))
    start(trainer, strategy, torch.zeros(2), 5)
    assert len(trainer.rounds) == 2
    assert strategy.stopped == f"round 3 would exceed max-epsilon = {budget} at delta = 1e-05"


def test_the_budget_holds_in_flowers_own_loop_too() -> None:
    cohort = PoissonCohort(0.3, 10)
    budget = epsilon(noise_multiplier=1.3, cohort=cohort, rounds=5, delta=1e-5) * 1.001
    strategy = DPFedAvg(
        mechanism=Clipping(1.0), cohort=cohort, noise_multiplier=1.3, max_epsilon=budget, seed=1
    )
    result: Result = super(DPFedAvg, strategy).start(
        LocalGrid(Fixed(torch.ones(10, 2))), array_record({"w": torch.zeros(2)}), 8
    )
    assert strategy.privacy_spent().num_releases == 5
    assert (tensors(result.arrays)["w"] != 0).all()


def test_a_round_is_aggregated_once_and_only_after_it_was_configured() -> None:
    strategy = DPFedAvg(mechanism=Clipping(1.0), noise_multiplier=0.0, cohort=FullCohort(3), seed=1)
    with pytest.raises(ValueError, match="round 1 was not configured"):
        strategy.aggregate_train(1, [])


def test_integer_entries_keep_the_servers_value() -> None:
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        moved = {"w": Array(arrays["w"].numpy() + 1), "steps": Array(arrays["steps"].numpy() + 7)}
        content = RecordDict(
            {
                "arrays": ArrayRecord(moved),
                "metrics": MetricRecord({"num-examples": 1}),
            }
        )
        return Message(content, reply_to=message)

    app = ClientApp()
    app.train()(train)
    strategy = DPFedAvg(
        mechanism=Clipping(10.0), noise_multiplier=0.0, cohort=FullCohort(2), seed=1
    )
    initial = array_record({"w": torch.zeros(2), "steps": torch.tensor([5])})
    result = strategy.start(LocalGrid(app, num_nodes=2), initial, 1)
    arrays = tensors(result.arrays)
    assert arrays["steps"].tolist() == [5]
    assert arrays["steps"].dtype == torch.int64
    assert arrays["w"].tolist() == pytest.approx([1.0, 1.0])


def test_the_callers_config_is_left_alone_and_the_round_is_sent() -> None:
    seen: list[int] = []

    def train(message: Message, context: Context) -> Message:
        seen.append(int(message.content.config_records["config"]["server-round"]))
        message.content["metrics"] = MetricRecord({"num-examples": 1})
        return Message(message.content, reply_to=message)

    app = ClientApp()
    app.train()(train)
    config = ConfigRecord({"lr": 0.1})
    strategy = DPFedAvg(mechanism=Clipping(1.0), noise_multiplier=0.0, cohort=FullCohort(1), seed=1)
    grid = LocalGrid(app, num_nodes=1)
    strategy.start(grid, array_record({"w": torch.zeros(1)}), 2, train_config=config)
    assert seen == [1, 2]
    assert dict(config) == {"lr": 0.1}


def test_metrics_of_clients_stay_with_them_in_a_private_run() -> None:
    def metrics(**settings: object) -> Result:
        strategy = DPFedAvg(
            mechanism=Clipping(1.0),
            cohort=FullCohort(3),
            seed=1,
            **settings,
        )
        initial = array_record({"w": torch.zeros(2)})
        return strategy.start(LocalGrid(Fixed(torch.ones(3, 2), examples=[1, 1, 2])), initial, 1)

    private = metrics(noise_multiplier=1.0)
    assert private.train_metrics_clientapp == {}
    assert private.evaluate_metrics_clientapp == {}
    shown = metrics(noise_multiplier=1.0, metrics=ClientMetrics(unprotected=True))
    assert shown.train_metrics_clientapp[1]["loss"] == pytest.approx((1 + 1 + 2 * 2) / 4)
    assert shown.evaluate_metrics_clientapp[1]["loss"] == 2.0
    assert metrics(noise_multiplier=0.0).train_metrics_clientapp[1]["num-examples"] == 4


def test_noise_is_left_out_only_where_that_is_said_or_nobody_is_protected() -> None:
    with pytest.raises(FedsimError, match=r"noise_multiplier is not given; with Clipping it must"):
        DPFedAvg(mechanism=Clipping(1.0), cohort=FullCohort(3))
    assert not DPFedAvg(mechanism=NoPrivacy("uniform"), cohort=FullCohort(3)).private
    said = DPFedAvg(mechanism=Clipping(1.0), cohort=FullCohort(3), noise_multiplier=0.0)
    assert not said.private


def test_settings_that_void_the_guarantee_are_refused() -> None:
    with pytest.raises(FedsimError, match="has no population"):
        DPFedAvg(mechanism=Clipping(1.0), cohort=PoissonCohort(0.1), noise_multiplier=1.0)
    with pytest.raises(FedsimError, match="without noise"):
        DPFedAvg(
            mechanism=Clipping(1.0),
            cohort=FullCohort(3),
            noise_multiplier=1.0,
            fraction_evaluate=0.5,
        )
    with pytest.raises(FedsimError, match=r"max_epsilon=None\) in a run without a mechanism"):
        DPFedAvg(mechanism=NoPrivacy("uniform"), cohort=FullCohort(3), max_epsilon=1.0)


@pytest.mark.parametrize(
    ("mechanism", "cohort"),
    [
        (Clipping(1.0), FullCohort(2**22 + 1)),
        (Clipping(1.0), PoissonCohort(0.42, 10**7)),
        (NoPrivacy("uniform"), FullCohort(2**20 + 1)),
    ],
)
def test_a_cohort_that_no_exact_sum_has_room_for_is_refused_before_anybody_is_drawn(
    mechanism: Mechanism, cohort: Cohort
) -> None:
    strategy = DPFedAvg(mechanism=mechanism, noise_multiplier=0.0, cohort=cohort, seed=1)
    with pytest.raises(FedsimError, match="one exact sum has room for"):
        strategy.check(array_record({"w": torch.zeros(3)}))


def test_a_cohort_as_large_as_an_exact_sum_is_let_in() -> None:
    for mechanism, cohort in (
        (Clipping(1.0), FullCohort(2**22)),
        (Clipping(1.0), PoissonCohort(0.41, 10**7)),
        (NoPrivacy("uniform"), FullCohort(2**20)),
    ):
        strategy = DPFedAvg(mechanism=mechanism, noise_multiplier=0.0, cohort=cohort, seed=1)
        strategy.check(array_record({"w": torch.zeros(3)}))


def test_a_grid_with_more_clients_than_declared_is_refused() -> None:
    strategy = DPFedAvg(mechanism=Clipping(1.0), noise_multiplier=0.0, cohort=FullCohort(2), seed=1)
    with pytest.raises(FedsimError, match="population = 2"):
        start(Fixed(torch.ones(3, 2)), strategy, torch.zeros(2))


def test_server_optimizers_see_the_negative_mean_as_gradient() -> None:
    updates = torch.tensor([[2.0, -4.0]])
    clipped = updates[0] / torch.linalg.vector_norm(updates[0])

    def reached(optimizer: object, rounds: int) -> Tensor:
        strategy = DPFedAvg(
            mechanism=Clipping(1.0),
            noise_multiplier=0.0,
            cohort=FullCohort(1),
            seed=1,
            server_optimizer=optimizer,
        )
        return start(Fixed(updates), strategy, torch.zeros(2), rounds)

    torch.testing.assert_close(reached(sgd(lr=0.5), 1), 0.5 * clipped, atol=1e-6, rtol=0)
    # Momentum: 1 + (1 + 0.9) steps of the same size.
    torch.testing.assert_close(reached(sgd(1.0, 0.9), 2), 2.9 * clipped, atol=1e-6, rtol=0)
    torch.testing.assert_close(reached(adam(lr=0.1), 1), 0.1 * clipped.sign(), atol=1e-5, rtol=0)


def test_runs_that_are_given_one_server_optimizer_share_no_momentum() -> None:
    optimizer = adam(lr=0.1)

    def strategy() -> DPFedAvg:
        mechanism, cohort = Clipping(1.0), FullCohort(2)
        return DPFedAvg(mechanism=mechanism, noise_multiplier=1.0, cohort=cohort, seed=1,
                        server_optimizer=optimizer)  # fmt: skip

    both = [strategy(), strategy()]
    reached = [start(Fixed(torch.ones(2, 2)), one, torch.zeros(2), 3) for one in both]
    assert torch.equal(*reached)
    assert optimizer.state() == {}


def test_on_round_is_called_after_each_round() -> None:
    rounds: list[int] = []
    strategy = DPFedAvg(mechanism=Clipping(1.0), noise_multiplier=0.0, cohort=FullCohort(2), seed=4)
    initial = array_record({"w": torch.zeros(2)})
    grid = LocalGrid(Fixed(torch.ones(2, 2)))
    strategy.start(grid, initial, 4, on_round=lambda t, _: rounds.append(t))
    assert rounds == [1, 2, 3, 4]


def _app(fault: str = "") -> ClientApp:
    """Clients that move every coordinate by their id; client 0 has the fault."""

    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        arrays = message.content.array_records["arrays"]
        moved = arrays["w"].numpy() + client
        record = {"w": Array(moved)}
        if client == 0 and fault:
            if fault == "raise":
                raise RuntimeError("no data")
            garbage = Array(dtype="float64", shape=(3,), stype="numpy.ndarray", data=b"\x00garbage")
            record = {
                "nan": {"w": Array(np.full(3, np.nan))},
                "shape": {"w": Array(np.zeros(4))},
                "key": {"v": Array(np.zeros(3))},
                "surplus": {"w": Array(np.ones(3)), "v": Array(np.zeros(3))},
                "garbage": {"w": garbage},
                "integer": {"w": Array(np.zeros(3, dtype=np.int64))},
            }[fault]
        content = RecordDict(
            {
                "arrays": ArrayRecord(record),
                "metrics": MetricRecord({"num-examples": client + 1}),
            }
        )
        return Message(content, reply_to=message)

    app = ClientApp()
    app.train()(train)
    return app


def test_a_plan_and_the_keywords_that_make_it_give_the_same_bytes_and_ledger() -> None:
    updates = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    cohort, noise = PoissonCohort(0.5, 20), Independent(1.0, hardened=False)
    plan = ReleasePlan(
        level="client", sampler=cohort, mechanism=Clipping(1.0), noise=noise, rounds=2
    )
    strategies = [
        DPFedAvg(plan=plan, seed=3),
        DPFedAvg(
            mechanism=Clipping(1.0),
            cohort=cohort,
            noise_multiplier=1.0,
            hardened_noise=False,
            seed=3,
        ),
    ]
    by_plan, by_keywords = (start(Fixed(updates), s, torch.zeros(30), 2) for s in strategies)
    assert torch.equal(by_plan, by_keywords)
    assert strategies[0].ledger.head == strategies[1].ledger.head
    assert [entry.event for entry in strategies[0].ledger.entries] == [
        plan.charge(number) for number in (1, 2)
    ]


def test_a_plan_beside_a_keyword_that_makes_one_is_refused() -> None:
    plan = ReleasePlan(
        level="client", sampler=FullCohort(3), mechanism=Clipping(1.0), noise=Independent(1.0)
    )
    for keyword in (
        {"mechanism": Clipping(1.0)},
        {"cohort": FullCohort(3)},
        {"noise_multiplier": 1.0},
        {"hardened_noise": True},
    ):
        with pytest.raises(
            FedsimError, match=f"{next(iter(keyword))} is given together with plan="
        ):
            DPFedAvg(plan=plan, **keyword)  # type: ignore[arg-type]
    with pytest.raises(FedsimError, match=r"plan\.level"):
        DPFedAvg(plan=dataclasses.replace(plan, level="example"))
    with pytest.raises(FedsimError, match=r"^cohort must be given"):
        DPFedAvg(mechanism=Clipping(1.0), noise_multiplier=1.0)
    with pytest.raises(FedsimError, match=r"^mechanism and cohort and noise_multiplier must be"):
        DPFedAvg()


def test_all_keywords_of_flowers_strategies_are_refused_at_once() -> None:
    with pytest.raises(FedsimError) as caught:
        DPFedAvg(fraction_train=0.5, clipping_norm=1.0, noise_multiplier=1.0)  # type: ignore[call-overload]
    assert str(caught.value) == (
        "fraction_train = 0.5 and clipping_norm = 1.0 are not arguments of DPFedAvg; use "
        "cohort=PoissonCohort(rate=fraction_train, population=...), whose draws are accounted for; "
        "and mechanism=Clipping(clip_norm=clipping_norm)."
    )
