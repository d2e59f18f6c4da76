"""Everything that clients may try: what they send, report, or leave undone, alone or together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedsim.audit.checks import Floats
from fedsim.audit.observation import Parameters, columns
from fedsim.audit.worlds import ALONE, OPPOSED, Canaries, World
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import array_record, tensors
from fedsim.rows import Layout
from fedsim.rows.block import Block, Ids, Reason, TrainerDefaults

Change = Callable[[Canaries], Canaries]
Script = Callable[[Ids, int], Block]

LENGTHS = np.arange(0.5, 5.01, 0.25)
"""Of rows, in units of their bound."""
DENSE_LENGTHS = (0.5, 0.9, 1.1, 1.4, 1.6, 1.8, 2.0, 3.0, 5.0)
NUMBERS = (1, 2, 3, 4, 5, 7, 10, 15, 25, 1_000_000)
"""How many canaries come, or clients fail, at once; the last is all of them."""


@dataclass(frozen=True)
class Behaviour:
    """What a canary does in a world.

    Attributes
    ----------
    name : str
        Goes on "a canary that".
    world : World
    change : callable
        From the world's federation to one in which the canary does it.
    harmless : bool
        Whether its row can be used as it is: then its share of noise is there too.
    adds : "something", "zeros" or "nothing"
        To the sum: zeros count as a client that replied, and nothing is what one that fails adds.
    """

    name: str
    world: World
    change: Change
    harmless: bool = True
    adds: Literal["something", "zeros", "nothing"] = "something"


def behaviours(start: Parameters, scale: float, bounded: Tensor) -> list[Behaviour]:
    """All of them, for a model of these parameters.

    Parameters
    ----------
    scale : float
        Length of a coordinate that every bound shortens.
    bounded : float64 ``[d]``
        A row that is just as long as its bound, or as each of its bounds.
    """
    d = sum(tensor.numel() for tensor in start.values())

    def full(value: float) -> Tensor:
        return torch.full((d,), value, dtype=torch.float64)

    last = torch.zeros(d, dtype=torch.float64)
    last[-1] = 1
    nearly = scale * last + 1e-3 * scale * (1 - last)
    layers = []
    for name, layer_columns in zip(start, columns(start), strict=True):
        # A little elsewhere: where a norm leaves this layer out, the rest must not be nothing.
        row = torch.full((d,), 1e-3 * scale, dtype=torch.float64)
        row[layer_columns] = scale
        layers.append(Behaviour(f"moves {name} most", ALONE, _sends(row)))
    return [
        Behaviour("pulls as hard as it can", ALONE, _unchanged),
        Behaviour("pulls against all others", OPPOSED, _unchanged),
        Behaviour("moves one coordinate", OPPOSED, _sends(scale * last)),
        Behaviour("moves one coordinate most", OPPOSED, _sends(nearly)),
        *layers,
        *(
            Behaviour(f"sends {length:g} C", OPPOSED, _sends(length * bounded))
            for length in DENSE_LENGTHS
        ),
        Behaviour("sends 1e200", OPPOSED, _sends(full(1e200))),
        Behaviour("sends 1e-200", OPPOSED, _sends(full(1e-200))),
        Behaviour("sends zeros", OPPOSED, _sends(full(0.0)), adds="zeros"),
        Behaviour("sends NaN", OPPOSED, _sends(full(torch.nan)), harmless=False, adds="nothing"),
        Behaviour(
            "sends one infinity", OPPOSED, _sends(torch.where(last > 0, torch.inf, last)),
            harmless=False, adds="nothing",
        ),
        Behaviour("raises an exception", OPPOSED, _raises, harmless=False, adds="nothing"),
        *(
            Behaviour(f"reports {value:g}", OPPOSED, _reports(value), harmless=False)
            for value in (0.0, -1e9, 1e300, float("nan"))
        ),
    ]  # fmt: skip


def _unchanged(canaries: Canaries) -> Canaries:
    return canaries


def _sends(row: Tensor) -> Change:
    def change(canaries: Canaries) -> Canaries:
        rows = canaries.rows.clone()
        rows[-1] = row
        return canaries.changed(rows=rows)

    return change


def _raises(canaries: Canaries) -> Canaries:
    return canaries.changed(raises=True)


def _reports(value: float) -> Change:
    def change(canaries: Canaries) -> Canaries:
        metrics = {name: values.copy() for name, values in canaries.metrics.items()}
        for values in metrics.values():
            values[-1] = value
        return canaries.changed(metrics=metrics)

    return change


@dataclass(frozen=True)
class ScriptedClients(TrainerDefaults):
    """A block trainer whose clients do in each round what a script says of those sampled.

    Attributes
    ----------
    population : int
    script : callable
        From the ids ``[m]`` of a cohort and the round to the clients' block.
    answered : dict of int to list of int64 arrays
        See `Canaries`.
    """

    population: int
    script: Script
    answered: dict[int, list[Ids]] = field(default_factory=dict, compare=False, repr=False)

    def train(self, vector: Tensor, client_ids: Ids, round: int) -> Iterator[Block]:
        """What the script says, whatever the global parameters are."""
        self.answered.setdefault(round, []).append(client_ids)
        yield self.script(client_ids, round)

    def evaluate(self, vector: Tensor, client_ids: Ids, round: int) -> Iterator[Block]:
        """They have no data."""
        yield Block.sent(client_ids, None, {"num-examples": np.ones(len(client_ids))})


def _some(m: int, turn: int) -> Ids:
    """Places in a cohort of ``m``: another number of them, and others, in every round."""
    number = NUMBERS[turn % len(NUMBERS)]
    return np.roll(np.arange(m), turn)[:number]


def _metrics(m: int, sides: Iterable[str], examples: float = 1.0) -> dict[str, Floats]:
    return {"num-examples": np.full(m, examples), **{name: np.zeros(m) for name in sides}}


def several_canaries(
    population: int, half: Floats, sides: tuple[str, ...], offset: int = 0
) -> ScriptedClients:
    """Several canaries at once, each on the coordinate of its own id, the others silent.

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
        for place in _some(len(ids), turn):
            client = int(ids[place])
            if client < d:
                length = LENGTHS[(7 * client + turn) % len(LENGTHS)]
                rows[place, client] = length * half[client]
        if turn // len(NUMBERS) % 2:
            rows = rows.float()
        return Block.sent(ids, rows, _metrics(len(ids), sides))

    return ScriptedClients(population, script)


def failing_clients(
    population: int, d: int, sides: tuple[str, ...], row: float | None
) -> ScriptedClients:
    """Several clients that fail at once, as many as the round says; the others send zeros.

    Parameters
    ----------
    row : float or None
        Entries of what they send; None: they raise an exception and send nothing.
    """

    def script(ids: Ids, round: int) -> Block:
        places = _some(len(ids), round)
        rows = torch.zeros(len(ids), d, dtype=torch.float64)
        ok = np.ones(len(ids), dtype=np.bool_)
        reasons: dict[int, Reason] = {}
        if row is None:
            ok[places] = False
            reasons = dict.fromkeys(ids[places].tolist(), "raised")
        else:
            rows[torch.from_numpy(places)] = row
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

    def script(second: bool) -> Script:
        def send(ids: Ids, round: int) -> Block:
            places = np.arange(len(ids))[:: -1 if second else 1].copy()
            rows = 4.0 * bounded * signs[torch.from_numpy(places % len(signs))]
            metrics = _metrics(len(ids), sides, 7.0 if second else 1.0)
            if "loss" not in sides:
                metrics["loss"] = np.full(len(ids), 3.0 if second else 2.0)
            return Block.sent(ids, rows * (4.0 if second and longer else 1.0), metrics)

        return send

    first, second = (ScriptedClients(population, script(number)) for number in (False, True))
    return first, second


Reply = Callable[[], RecordDict]


def _report() -> MetricRecord:
    return MetricRecord({"num-examples": 1.0})


def _arrays(*sizes: int) -> ArrayRecord:
    return ArrayRecord({f"entry{k}": Array(np.zeros(size)) for k, size in enumerate(sizes)})


REPLIES: Mapping[str, Reply] = {
    "replies nothing at all": lambda: RecordDict(),
    "replies no parameters": lambda: RecordDict({"metrics": _report()}),
    "replies other parameters": lambda: RecordDict({"arrays": _arrays(3, 1), "metrics": _report()}),
    "replies empty parameters": lambda: RecordDict({"arrays": ArrayRecord(), "metrics": _report()}),
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
