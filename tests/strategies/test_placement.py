from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedsim.clients import SGD
from fedsim.cohorts import FullCohort, PoissonCohort
from fedsim.engines import LocalGrid
from fedsim.engines.arrays import array_record, tensors
from fedsim.engines.client_app import client_app
from fedsim.mechanisms import AdaClip, Clipping, Mechanism, PrivateScalar, QuantileClipping
from fedsim.randomness import Randomness
from fedsim.rows.exchange import Block, TrainerDefaults
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
        def send_and_receive(self, messages, *, timeout=None):  # type: ignore[no-untyped-def]
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

    class Zero(TrainerDefaults):
        population = 40

        def train(self, vector, client_ids, round):  # type: ignore[no-untyped-def]
            # A third of the clients drop out.
            ok = client_ids % 3 != 0
            reasons = dict.fromkeys(client_ids[~ok].tolist(), "raised")
            yield Block(client_ids, torch.zeros(len(client_ids), d), {}, ok, reasons)

        def evaluate(self, vector, client_ids, round):  # type: ignore[no-untyped-def]
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
