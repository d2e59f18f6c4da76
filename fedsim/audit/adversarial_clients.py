"""What clients may try: what they send, report, or fail to do, alone or together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedsim.audit.checks import Floats
from fedsim.audit.worlds import ALONE, OPPOSED, Canaries, ScriptedClients, World
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import array_record, tensors
from fedsim.rows import Layout
from fedsim.rows.block import Block, Ids, Reason

LENGTHS = np.arange(0.5, 5.01, 0.25)
"""Of rows, in units of their bound."""
DENSE_LENGTHS = (0.5, 0.9, 1.1, 1.4, 1.6, 1.8, 2.0, 3.0, 5.0)
NUMBERS = (1, 2, 3, 4, 5, 7, 10, 15, 25, 1_000_000)
"""How many canaries take part, or clients fail, at once; the last is all of them."""

Change = Callable[[Canaries], Canaries]


@dataclass(frozen=True)
class Behaviour:
    """What a canary does in a world.

    Attributes
    ----------
    name : str
        Follows "a canary that".
    world : World
    change : callable
        From the world's federation to one in which the canary does it.
    harmless : bool
        Whether its row can be used as it is: then its share of noise is used too.
    adds : "something", "zeros" or "nothing"
        To the sum: zeros count as a client that replied, and nothing is what one that fails adds.
    """

    name: str
    world: World
    change: Change
    harmless: bool = True
    adds: Literal["something", "zeros", "nothing"] = "something"


def behaviours(layers: Mapping[str, slice], scale: float, bounded: Tensor) -> list[Behaviour]:
    """All of them, for a model of these layers.

    Parameters
    ----------
    layers : mapping of name to slice
        Columns of each layer.
    scale : float
        Length of a coordinate that every bound shortens.
    bounded : float64 ``[d]``
        A row that is just as long as its bound, or as each of its bounds.
    """

    def full(value: float) -> Tensor:
        return torch.full_like(bounded, value)

    last = full(0)
    last[-1] = 1
    # A little elsewhere: where a norm leaves a layer out, the rest must not be nothing.
    nearly = scale * last + 1e-3 * scale * (1 - last)
    one_layer = {name: full(1e-3 * scale) for name in layers}
    for name, columns in layers.items():
        one_layer[name][columns] = scale
    sent = {
        "moves one coordinate": scale * last,
        "moves one coordinate most": nearly,
        **{f"sends {length:g} C": length * bounded for length in DENSE_LENGTHS},
        "sends 1e200": full(1e200),
        "sends 1e-200": full(1e-200),
    }
    infinity = torch.where(last > 0, torch.inf, last)
    return [
        Behaviour("sends its longest row", ALONE, Canaries.changed),
        Behaviour("sends the opposite of all others", OPPOSED, Canaries.changed),
        *(Behaviour(f"moves {name} most", ALONE, _sends(row)) for name, row in one_layer.items()),
        *(Behaviour(name, OPPOSED, _sends(row)) for name, row in sent.items()),
        Behaviour("sends zeros", OPPOSED, _sends(full(0)), adds="zeros"),
        Behaviour("sends NaN", OPPOSED, _sends(full(torch.nan)), harmless=False, adds="nothing"),
        Behaviour("sends one infinity", OPPOSED, _sends(infinity), harmless=False, adds="nothing"),
        Behaviour(
            "raises an exception", OPPOSED, lambda canaries: canaries.changed(raises=True),
            harmless=False, adds="nothing",
        ),
        *(
            Behaviour(f"reports {value:g}", OPPOSED, _reports(value), harmless=False)
            for value in (0.0, -1e9, 1e300, float("nan"))
        ),
    ]  # fmt: skip


def _sends(row: Tensor) -> Change:
    def change(canaries: Canaries) -> Canaries:
        rows = canaries.rows.clone()
        rows[-1] = row
        return canaries.changed(rows=rows)

    return change


def _reports(value: float) -> Change:
    def change(canaries: Canaries) -> Canaries:
        metrics = {name: values.copy() for name, values in canaries.metrics.items()}
        for values in metrics.values():
            values[-1] = value
        return canaries.changed(metrics=metrics)

    return change


def _some(m: int, turn: int) -> Ids:
    """Positions in a cohort of ``m``: other ones, and another number of them, in every round."""
    return np.roll(np.arange(m), turn)[: NUMBERS[turn % len(NUMBERS)]]


def _metrics(m: int, sides: Iterable[str], examples: float = 1.0) -> dict[str, Floats]:
    return {"num-examples": np.full(m, examples), **{name: np.zeros(m) for name in sides}}


def several_canaries(
    population: int, half: Floats, sides: tuple[str, ...], offset: int = 0
) -> ScriptedClients:
    """Several canaries at once, each on the coordinate of its own id; the others send zeros.

    Their number changes from round to round and their lengths run over `LENGTHS`; every second
    pass over the numbers is in float32.

    Parameters
    ----------
    half : float64 ``[d]``
        Length of a row along each coordinate that is just its bound; only clients with ids
        below ``d`` are canaries.
    offset : int
        Which round of the script comes first.
    """
    d = len(half)

    def script(ids: Ids, round: int) -> Block:
        turn = round + offset
        rows = torch.zeros(len(ids), d, dtype=torch.float64)
        for position in _some(len(ids), turn):
            client = int(ids[position])
            if client < d:
                length = LENGTHS[(7 * client + turn) % len(LENGTHS)]
                rows[position, client] = length * half[client]
        if turn // len(NUMBERS) % 2:
            rows = rows.float()
        return Block.sent(ids, rows, _metrics(len(ids), sides))

    return ScriptedClients(population, script)


def failing_clients(
    population: int, d: int, sides: tuple[str, ...], row: float | None
) -> ScriptedClients:
    """Several clients that fail at once, another number each round; the others send zeros.

    Parameters
    ----------
    row : float or None
        Entries of what they send; None: they raise an exception and send nothing.
    """

    def script(ids: Ids, round: int) -> Block:
        positions = _some(len(ids), round)
        rows = torch.zeros(len(ids), d, dtype=torch.float64)
        ok = np.ones(len(ids), dtype=np.bool_)
        if row is None:
            ok[positions] = False
        else:
            rows[torch.from_numpy(positions)] = row
        reasons: dict[int, Reason] = dict.fromkeys(ids[~ok].tolist(), "raised")
        return Block(ids, rows, _metrics(len(ids), sides), ok, reasons)

    return ScriptedClients(population, script)


def equal_sums(
    population: int, bounded: Tensor, sides: tuple[str, ...], *, longer: bool
) -> tuple[ScriptedClients, ScriptedClients]:
    """Two federations whose bounded rows have the same sum, and whose clients differ otherwise.

    In the second, the rows of a cohort are sent in the opposite order, clients report other
    numbers than scalars that are released, and with ``longer`` all rows are four times as long:
    beyond their bound in both.
    """
    signs = torch.from_numpy(np.random.default_rng(1).choice([-1.0, 1.0], (64, len(bounded))))

    def script(second: bool) -> Callable[[Ids, int], Block]:
        def send(ids: Ids, round: int) -> Block:
            positions = np.arange(len(ids))[:: -1 if second else 1].copy()
            rows = 4.0 * bounded * signs[torch.from_numpy(positions % len(signs))]
            metrics = _metrics(len(ids), sides, 7.0 if second else 1.0)
            if "loss" not in sides:
                metrics["loss"] = np.full(len(ids), 3.0 if second else 2.0)
            return Block.sent(ids, rows * (4.0 if second and longer else 1.0), metrics)

        return send

    return ScriptedClients(population, script(False)), ScriptedClients(population, script(True))


Reply = Callable[[], RecordDict]


def _report() -> MetricRecord:
    return MetricRecord({"num-examples": 1.0})


def _arrays(*sizes: int) -> RecordDict:
    arrays = ArrayRecord({f"entry{k}": Array(np.zeros(size)) for k, size in enumerate(sizes)})
    return RecordDict({"arrays": arrays, "metrics": _report()})


REPLIES: Mapping[str, Reply] = {
    "replies nothing at all": lambda: RecordDict(),
    "replies no parameters": lambda: RecordDict({"metrics": _report()}),
    "replies other parameters": lambda: _arrays(3, 1),
    "replies empty parameters": lambda: _arrays(),
    "replies a setting": lambda: RecordDict({"config": ConfigRecord({"num-examples": "many"})}),
}
"""What a client may send instead of its parameters."""


class _TwiceGrid(LocalGrid):
    """Brings every reply twice."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Each reply, and all of them once more."""
        replies = list(super().send_and_receive(messages, timeout=timeout))
        return [*replies, *replies]


def message_grid(
    population: int,
    rows: Tensor | None = None,
    *,
    last: Reply | Literal["rows", "fails"] = "rows",
    twice: bool = False,
) -> LocalGrid:
    """A federation of ordinary Flower clients, whose updates come as messages.

    Parameters
    ----------
    rows : Tensor ``[population, d]``, optional
        Their updates; zeros if left out.
    last : callable, "rows" or "fails"
        What the last client does: replies this, what the others do, or fails.
    twice : bool
        Whether every reply comes twice.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        if client == population - 1 and last != "rows":
            if last == "fails":
                raise RuntimeError("the canary has no answer")
            return Message(last(), reply_to=message)
        arrays = next(iter(message.content.array_records.values()))
        if rows is not None:
            server = tensors(arrays)
            layout = Layout.of(server)
            arrays = array_record(layout.unflatten(layout.flatten(server) + rows[client]))
        return Message(RecordDict({"arrays": arrays, "metrics": _report()}), reply_to=message)

    grid = _TwiceGrid if twice else LocalGrid
    return grid(app, num_nodes=population)
