"""Each loop to its budget's end: `python examples/ledger/run.py build/charged` from the root."""

import sys
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from loops import Charged, ChargedNode, opacus_loop

from fedsim.cohorts import FullCohort
from fedsim.engines import LocalGrid
from fedsim.errors import BudgetSpentError
from fedsim.privacy import DeclaredMechanism, Independent, Ledger, ReleasePlan

CLIENTS, ROUNDS = 20, 10


class Mine(Charged, DifferentialPrivacyServerSideFixedClipping):
    """Flower's strategy, with the declared plan of its releases."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(FedAvg(fraction_evaluate=0.0), 4.0, 1.0, CLIENTS)
        self.ledger = ledger
        self.plan = ReleasePlan(
            level="client",
            sampler=FullCohort(CLIENTS, adjacency="zero-out"),
            mechanism=DeclaredMechanism("clipping by Flower's strategy", 1.0),
            noise=Independent(4.0),
        )


def clients(*mods) -> LocalGrid:
    """Clients that each move a model of eight numbers towards their own."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        own = 1.0 + float(
            context.node_config["partition-id"]
        )  # an update of zero ends Flower's round
        ((name, sent),) = message.content.array_records.items()
        moved = {key: Array(sent[key].numpy() + 0.1 * (own - sent[key].numpy())) for key in sent}
        metrics = MetricRecord({"num-examples": 1.0})
        return Message(RecordDict({name: ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    return LocalGrid(app, num_nodes=CLIENTS)


def run(title: str, path: Path, loop) -> None:
    """Run a loop to its end or its budget's, and print what its ledger says."""
    try:
        loop()
    except BudgetSpentError as error:
        print(error)
    ledger = Ledger.read(path, delta=1e-5)
    print(f"{title}: {len(ledger.entries)} releases, epsilon {ledger.epsilon():.2f}")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True)
    start = ArrayRecord([np.zeros(8)])

    path = out / "server.jsonl"
    server = Mine(Ledger(path, delta=1e-5, max_epsilon=3.0))
    run("Strategy", path, lambda: server.start(clients(), start, ROUNDS))

    nodes = [
        ChargedNode(out / f"node-{n}.jsonl", 1.0, 8.0, max_epsilon=3.0) for n in range(CLIENTS)
    ]

    def mod(message: Message, context: Context, call_next) -> Message:
        return nodes[context.node_config["partition-id"]](message, context, call_next)

    # A node whose budget is spent refuses, and the strategy goes on without it.
    federated = FedAvg(min_available_nodes=CLIENTS)
    run("Node 0", out / "node-0.jsonl", lambda: federated.start(clients(mod), start, ROUNDS))

    path = out / "opacus.jsonl"
    run("Opacus", path, lambda: opacus_loop(path, 50, max_epsilon=3.0))
