"""Cost of secure aggregation: seconds of a client, and of the server that unmasks a sum.

Only the protocol's own work is measured, without training and network, in one process and thread;
a client's seconds are the median over all clients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedsim.federation.aggregation.secagg.client import answer
from fedsim.federation.aggregation.secagg.protocol import RECORD
from fedsim.federation.aggregation.secagg.server import unmasked
from fedsim.federation.flower_internals import ensure_identity

CLIENTS, WEIGHTS = (10, 50, 100, 200), (10_000, 100_000, 1_000_000)
ROUND = b"benchmark"


class TimedClient:
    """A client that answers stage by stage, and its seconds of work."""

    def __init__(self, client: int, threshold: int, weights: int) -> None:
        self._client, self._threshold = client, threshold
        self._vector = np.full(weights, client, dtype=np.uint64)
        self._context = Context(1, client + 2, {}, RecordDict(), {})
        self.seconds = 0.0

    def ask(self, stage: str, **entries: Any) -> dict[str, Any]:
        """Its answer to one stage's message."""
        record = ConfigRecord({"stage": stage, "context": ROUND, **entries})
        message = Message(RecordDict({RECORD: record}), self._client + 2, "train")
        began = time.perf_counter()
        reply = answer(message, self._context, self._client, self._threshold, lambda: self._vector)
        self.seconds += time.perf_counter() - began
        return dict(reply[RECORD])


def measure(clients: int, weights: int, gone: int) -> tuple[float, float]:
    """Median seconds of a client, and the server's seconds to unmask, with ``gone`` dropouts."""
    threshold = 2 * clients // 3 + 1
    parties = [TimedClient(k, threshold, weights) for k in range(clients)]
    keys = [party.ask("keys") for party in parties]
    mask_keys = [key["mask-key"] for key in keys]
    listed = {"clients": [*range(clients)], "mask-keys": mask_keys}
    listed["channel-keys"] = [key["channel-key"] for key in keys]
    sealed = [party.ask("shares", **listed)["sealed"] for party in parties]
    survivors = [*range(clients - gone)]
    masked = {}
    for k in survivors:
        others = [other for other in range(clients) if other != k]
        received = [sealed[other][k] for other in others]
        words = parties[k].ask("masked", senders=others, sealed=received)["masked"]
        masked[k] = np.frombuffer(words, dtype="<u8")
    answers = [parties[k].ask("unmask", survivors=survivors)["shares"] for k in survivors]
    began = time.perf_counter()
    shares = {
        other: {k + 1: int.from_bytes(answers[k][other]) for k in survivors[:threshold]}
        for other in range(clients)
    }
    total = unmasked(masked, shares, dict(enumerate(mask_keys)), ROUND)
    seconds = time.perf_counter() - began
    if not (total == sum(survivors)).all():
        raise RuntimeError("the unmasked sum is not the sum")
    return statistics.median(parties[k].seconds for k in survivors), seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of costs as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--weights", type=int, nargs="+", default=WEIGHTS)
    options = parser.parse_args(argv)
    ensure_identity(1)
    for clients in options.clients:
        for weights in options.weights:
            one, whole = measure(clients, weights, 0)
            _, less = measure(clients, weights, clients // 10)
            print(
                f"| {clients} | {weights:,} | {one:.3g} s | {whole:.3g} s | {less:.3g} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
