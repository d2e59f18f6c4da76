from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_helpers import needs_a_fake_gpu
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from release_helpers import plan_of, source
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedsim.clients import SGD
from fedsim.cohorts import FullCohort, PoissonCohort
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.aggregation.share_sums import add_shares
from fedsim.federation.aggregation.shares import SHARE_ARRAY, ShareRequest, make_shares
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.engines.client_app import client_app
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    Mechanism,
    NoiseSource,
    Normalization,
    PerLayer,
    PrivateScalar,
    QuantileClipping,
    Releaser,
    State,
)
from fedsim.privacy import Accountant, Event, Ledger
from fedsim.privacy.noise import Independent
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.rows.block import Block, BlockTrainer
from fedsim.rows.exact import grid_unit
from fedsim.strategies import DPFedAvg
from fedsim.training import ClientData, Trainer

CLIENTS = 12


def trainer() -> Trainer:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 4, generator=generator)
    y = torch.randint(0, 3, (60,), generator=generator)
    parts = [np.arange(5 * i, 5 * i + 5) for i in range(CLIENTS)]
    return Trainer(
        nn.Sequential(nn.Linear(4, 3)),
        SGD(lr=0.5),
        ClientData(x, y, parts),
        batch_size=5,
        randomness=Randomness(1),
    )


def reached(
    client: Trainer | ClientApp, mechanism: Mechanism, noise_multiplier: float = 1.0
) -> Tensor:
    strategy = DPFedAvg(
        mechanism=mechanism,
        cohort=PoissonCohort(0.6, CLIENTS),
        noise_multiplier=noise_multiplier,
        placement="client",
        seed=1,
    )
    initial = dict(trainer().model.named_parameters())
    grid = LocalGrid(client, num_nodes=CLIENTS)
    result = strategy.start(grid, array_record(initial), 3)
    return torch.cat([value.reshape(-1) for value in tensors(result.arrays).values()])


@pytest.mark.parametrize(
    "mechanism",
    [
        Clipping(0.1),
        QuantileClipping(initial_clip_norm=0.2, bit_noise=0.2),
        AdaClip(clip_norm=0.2),
        PrivateScalar(Clipping(0.1), name="loss", high=2.0),
    ],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_flower_clients_send_the_shares_that_an_engine_would_have_made(
    mechanism: Mechanism,
) -> None:
    shared = trainer()
    app = client_app(lambda _: shared, lambda _: mechanism)
    assert torch.equal(reached(trainer(), mechanism), reached(app, mechanism))


def test_clients_that_do_not_noise_their_rows_contribute_nothing() -> None:
    shared = trainer()
    quiet = client_app(lambda _: shared)
    assert torch.equal(reached(quiet, Clipping(0.1)), reached(raising_app(), Clipping(0.1)))


def raising_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        raise RuntimeError("no data")

    return app


def test_a_share_tells_the_server_no_loss_and_no_example_count() -> None:
    seen: list[set[str]] = []

    class Watching(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            for reply in (replies := list(super().send_and_receive(messages, timeout=timeout))):
                seen.append(_metric_names(reply))
            return replies

    shared = trainer()
    strategy = DPFedAvg(
        mechanism=Clipping(0.1),
        cohort=FullCohort(CLIENTS),
        noise_multiplier=1.0,
        placement="client",
        seed=1,
    )
    initial = array_record(dict(trainer().model.named_parameters()))
    app = client_app(lambda _: shared, lambda _: Clipping(0.1))
    strategy.start(Watching(app, num_nodes=CLIENTS), initial, 1)
    assert seen == [{"share-usable"}] * CLIENTS


@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
def test_the_noise_on_the_sum_does_not_depend_on_how_many_took_part(rate: float) -> None:
    d = 4000

    class Zero(BlockTrainer):
        population = 40

        def train(self, vector, client_ids, round):
            # A third of the clients drop out.
            ok = client_ids % 3 != 0
            reasons = dict.fromkeys(client_ids[~ok].tolist(), "raised")
            yield Block(client_ids, torch.zeros(len(client_ids), d), {}, ok, reasons)

        def evaluate(self, vector, client_ids, round):
            raise NotImplementedError

    cohort = PoissonCohort(rate, 40)
    strategy = DPFedAvg(
        mechanism=Clipping(2.0),
        cohort=cohort,
        noise_multiplier=1.5,
        placement="client",
        seed=5,
    )
    result = strategy.start(LocalGrid(Zero()), array_record({"w": torch.zeros(d).double()}), 1)
    total = tensors(result.arrays)["w"] * cohort.expected_size
    # Chi-square with 4000 degrees of freedom: five standard errors are 5.6 %.
    assert total.std().item() == pytest.approx(3.0, rel=0.056)


def _metric_names(reply: Message) -> set[str]:
    return {name for record in reply.content.metric_records.values() for name in record}


def one_round(
    mechanism: Mechanism,
    z: float,
    change: Callable[[np.ndarray], np.ndarray],
    name: str = SHARE_ARRAY,
):
    """A round in which client 0 changes the share that it would have sent."""
    shared = trainer()
    strategy = DPFedAvg(
        mechanism=mechanism,
        cohort=FullCohort(CLIENTS),
        noise_multiplier=z,
        placement="client",
        seed=1,
    )
    grid = LocalGrid(client_app(lambda _: shared, lambda _: mechanism), num_nodes=CLIENTS)
    initial = array_record(dict(shared.model.named_parameters()))
    asked = list(strategy.configure_train(1, initial, ConfigRecord(), grid))
    replies = list(grid.send_and_receive(asked))
    sent, unit = replies[0].content.array_records["arrays"][SHARE_ARRAY].numpy(), grid_unit(C)
    with np.errstate(over="ignore"):
        replies[0].content["arrays"] = ArrayRecord({name: Array(change(sent * unit) / unit)})
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert strategy.report is not None
    moved = [
        (tensors(arrays)[name] - tensors(initial)[name]).reshape(-1).double()
        for name in tensors(initial)
    ]
    return torch.cat(moved), strategy.report.reasons["malformed"]


C, Z = 0.1, 2.0
STD = Z * C / CLIENTS**0.5


def at(value: float, position: int = 3) -> Callable[[np.ndarray], np.ndarray]:
    def put(share: np.ndarray) -> np.ndarray:
        share[position] = value
        return share

    return put


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("value", [1e200, -1e200, 1e308, C + 41 * STD, -C - 41 * STD])
def test_a_share_that_its_bound_and_noise_cannot_have_made_is_malformed(value, layers):
    mechanism: Mechanism = PerLayer(Clipping(C)) if layers else Clipping(C)
    # Two layers share the noise: each has sqrt(2) of it.
    value *= 2**0.5 if layers else 1.0
    moved, malformed = one_round(mechanism, Z, at(value))
    assert malformed == 1
    assert moved.norm() < 1.0


def test_entries_that_are_each_possible_are_not_together():
    d = 15
    malformed = one_round(Clipping(C), Z, lambda share: np.full(d, 20 * STD))[1]
    assert malformed == 1
    # What passes moves the mean no further than its norm allows.
    furthest = C + STD * (d**0.5 + 80**0.5)
    honest, _ = one_round(Clipping(C), Z, lambda share: np.zeros(d))
    pushed, malformed = one_round(
        Clipping(C), Z, lambda share: np.full(d, 0.999 * furthest / d**0.5)
    )
    assert malformed == 0
    assert (pushed - honest).norm() <= 1.001 * furthest / CLIENTS


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("share", lambda share: share),  # as numbers, which an earlier version sent under this name
        (SHARE_ARRAY, lambda share: share[:-1]),
        (SHARE_ARRAY, lambda share: np.append(share, 0.0)),
    ],
)
def test_a_share_of_another_form_or_size_is_malformed(name, change):
    assert one_round(Clipping(C), Z, change, name)[1] == 1


def test_without_noise_a_share_is_no_longer_than_its_bound():
    assert one_round(Clipping(C), 0.0, lambda share: np.full(15, 0.0))[1] == 0
    assert one_round(Clipping(C), 0.0, lambda share: np.full(15, 1.001 * C / 15**0.5))[1] == 1


@pytest.mark.parametrize("asked", [1, 40])
@pytest.mark.parametrize("z", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("d", [1, 7, 3000])
def test_no_honest_share_is_ever_refused(asked, z, d):
    mechanism, layout = Normalization(2.0), Layout.of({"w": torch.zeros(d)})
    n = 400 if d < 3000 else 20
    rng = np.random.default_rng([asked, d])
    noise = Independent(z)
    shares = make_shares(
        ShareRequest(mechanism, noise, 10.0, asked),
        torch.from_numpy(rng.normal(size=(n, d))),
        mechanism.bounding_state(mechanism.init(layout), layout),
        layout,
        sources=[
            NoiseSource(np.random.default_rng([asked, d, k]), hardened=True) for k in range(n)
        ],
    )
    releaser = Releaser(plan_of(mechanism, noise, 10.0), layout)
    assert add_shares(releaser.start(mechanism.init(layout)), shares, asked=asked).all()


def test_no_state_that_a_server_sends_takes_a_row_out_of_its_ball():
    mechanism, layout = AdaptiveNoise(threshold=0.0), Layout.of({"w": torch.zeros(4)})
    honest = {
        "adaptive": torch.tensor([True]),
        "shrink": torch.full((4,), 10.0),
        "stretch": torch.full((4,), 0.5),
    }

    def shared(bounding: State) -> None:
        make_shares(
            ShareRequest(mechanism, Independent(1.0), 10.0, 10),
            torch.full((1, 4), 0.3, dtype=torch.float64),
            {name: tensor.clone() for name, tensor in bounding.items()},
            layout,
            sources=[NoiseSource(np.random.default_rng(1))],
        )

    shared(honest)
    for factor in (1.01, 1e6):
        with pytest.raises(FedsimError, match="makes rows longer than the bound"):
            shared({**honest, "stretch": honest["stretch"] * factor})


def test_a_message_without_the_mechanisms_state_is_refused_in_a_sentence():
    mechanism, layout = AdaClip(), Layout.of({"w": torch.zeros(4)})
    own = mechanism.bounding_state(mechanism.init(layout), layout)
    for bounding, told in [
        ({}, "lacks 'scale'"),
        ({"scale": own["scale"]}, "lacks 'm'"),
        ({**own, "m": torch.zeros(7)}, r"has the shape \(7,\) for 'm'"),
    ]:
        with pytest.raises(FedsimError, match=f"mechanism-state of the message {told}"):
            make_shares(
                ShareRequest(mechanism, Independent(1.0), 10.0, share_count=10),
                torch.ones(1, 4),
                bounding,
                layout,
                sources=[NoiseSource(np.random.default_rng(1))],
            )


@needs_a_fake_gpu
def test_noise_multipliers_of_shares_on_a_gpu_are_computed_on_the_cpu(monkeypatch) -> None:
    def drawn_multiplier(z: float | Tensor) -> float | Tensor:
        assert not isinstance(z, Tensor) or z.device.type == "cpu"
        return z / 3.0

    monkeypatch.setattr(
        "fedsim.mechanisms.releaser.normals",
        lambda noise, sizes, device: torch.zeros(len(noise), sum(sizes), device=device).double(),
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        plans = [plan_of(Clipping(1.0), Independent(1.0), 1.0)] * 2
        releaser = Releaser(plans, Layout.of({"w": torch.zeros(5)}), device="cuda")
        noise = [source(1), source(2)]
        units, _ = releaser.add_noise(releaser.start({}), noise, drawn_multiplier)
    assert units["sum"].device.type == "cuda"


def test_a_rounds_line_is_on_disk_before_its_messages_exist(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    initial = array_record(dict(trainer().model.named_parameters()))
    once = Event.of(PoissonCohort(0.6, CLIENTS), 1.0)
    strategy = DPFedAvg(
        mechanism=Clipping(0.1),
        cohort=PoissonCohort(0.6, CLIENTS),
        noise_multiplier=1.0,
        placement="client",
        seed=1,
        ledger=path,
        delta=1e-5,
        max_epsilon=1.01 * Accountant([once.over_rounds(2)]).epsilon(1e-5),
    )
    grid = LocalGrid(trainer(), num_nodes=CLIENTS)
    for number in (1, 2):
        # Messages may be made as they are asked for; none has been, and the round is charged.
        messages = strategy.configure_train(number, initial, ConfigRecord(), grid)
        assert [entry.round for entry in Ledger.read(path).entries] == [*range(1, number + 1)]
        strategy.aggregate_train(number, grid.send_and_receive(messages))
        assert len(Ledger.read(path).entries) == number
    assert list(strategy.configure_train(3, initial, ConfigRecord(), grid)) == []
    assert len(Ledger.read(path).entries) == 2
