"""A trainer as an ordinary Flower ClientApp, which trains one client a message."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from fedsim.arguments import check_arguments
from fedsim.array_types import Ints
from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.federation.aggregation.client_replies import training_reply
from fedsim.federation.aggregation.shares import (
    STATE_RECORD,
    USABLE,
    Shares,
    share_for_message,
)
from fedsim.federation.exchange import metric_record
from fedsim.federation.flower_internals import BUDGET_SPENT, TIMED_OUT, client_id, error_reply
from fedsim.mechanisms import Mechanism
from fedsim.rows.block import DECLARED_EXAMPLES, RUN
from fedsim.training import Trainer
from fedsim.training.local_rounds import LocalResult, LocalRounds

AGGREGATED_METRICS = ("num-examples", "fresh-state", USABLE)
"""Prefixes of the metrics that a server needs to aggregate an update; others are for display."""


TrainerFor = Callable[[Context], Trainer]
MechanismFor = Callable[[Context], Mechanism]


def client_app(
    trainer_for: TrainerFor,
    mechanism_for: MechanismFor | None = None,
    seconds_for: Callable[[Context], float] | None = None,
    threshold_for: Callable[[Context], int] = lambda _: 0,
) -> ClientApp:
    """A ClientApp that trains and evaluates one client with `Trainer`.

    Parameters
    ----------
    trainer_for : callable
        Returns the trainer for a node's context. It is called once a message, so cache what is
        expensive. The client id is the node's ``partition-id``.
    mechanism_for : callable, optional
        Returns the mechanism with which the client bounds and noises its own row, where the
        strategy asks for shares; without it such a request is refused.
    seconds_for : callable, optional
        Returns the seconds that a message may take, from the client's own start (`time_limit`). A
        client that takes longer replies with the error code `TIMED_OUT`.
    threshold_for : callable, optional
        Returns the fewest clients in a masked sum, by the client's own config (`training_reply`).

    Returns
    -------
    ClientApp
        ``train`` replies all parameters, as ordinary Flower clients do, and ``num-examples``,
        ``loss`` and what the algorithm reports; ``evaluate`` replies ``num-examples``, ``loss``
        and ``accuracy``; ``query`` replies ``client-id``. A client whose own budget does not
        allow a round replies with the error code `BUDGET_SPENT`.
    """
    app = ClientApp(
        mods=[_exit_as_failure, *([_with_time_limit(seconds_for)] if seconds_for else [])]
    )

    @app.train()
    def train(message: Message, context: Context) -> Message:
        def own_share() -> Shares:
            if mechanism_for is None:
                raise FedsimError("this client has no mechanism to noise its own share with.")
            return _trained_share(message, context, trainer_for(context), mechanism_for(context))

        try:
            content = training_reply(
                message,
                context,
                threshold_for(context),
                share=own_share,
                update=lambda: _parameters(message, context, trainer_for(context)),
            )
        except BudgetSpentError as error:
            return error_reply(message, BUDGET_SPENT, str(error))
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        trainer, ids = trainer_for(context), _client_ids(context)
        if isinstance(run := _config(message).get(RUN), str):
            trainer.join(run)
        _, arrays = _arrays(message)
        vector = trainer.layout.flatten(arrays.to_torch_state_dict())
        (block,) = trainer.evaluate(vector, ids, round_of(message))
        metrics = metric_record(_reported(block.metrics))
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"client-id": client_id(context.node_config)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def _parameters(message: Message, context: Context, trainer: Trainer) -> RecordDict:
    """Content of a reply with all parameters and the client's metrics."""
    local, _ = _fit(trainer, message, context)
    # Entries that are not trained are returned unchanged.
    key, arrays = _arrays(message)
    row = trainer.row_layout
    surplus = {entry.name for entry in trainer.received_layout.entries[len(row.entries) :]}
    reply = ArrayRecord({name: array for name, array in arrays.items() if name not in surplus})
    named = row.unflatten(local.theta[0])
    for entry in row.entries:
        reply[entry.name] = Array(named[entry.name].to(entry.dtype).cpu().numpy())
    return RecordDict({key: reply, "metrics": metric_record(_reported(local.metrics))})


def _fit(trainer: Trainer, message: Message, context: Context) -> tuple[LocalResult, Tensor]:
    """Result of local training, and the parameters ``[d]`` from which it started."""
    ids = _client_ids(context)
    vector = trainer.received_layout.flatten(_arrays(message)[1].to_torch_state_dict())
    trainer.receive(_config(message))
    _require_declared(trainer.data.size(int(ids[0])), _config(message))
    return trainer.fit(vector, ids, round_of(message)), vector


def _trained_share(
    message: Message, context: Context, trainer: Trainer, mechanism: Mechanism
) -> Shares:
    """The client's share of the noisy sum.

    Raises
    ------
    FedsimError
        If the client cannot make a share, or the message does not ask for one.
    """
    local, vector = _fit(trainer, message, context)
    layout = trainer.row_layout
    return share_for_message(
        message,
        mechanism,
        local.theta[0] - vector[: layout.d].to(local.theta),
        layout,
        _reported(local.metrics),
        trainer.randomness,
        int(_client_ids(context)[0]),
    )


def _require_declared(examples: int, config: Mapping[str, object]) -> None:
    """Refuse a declared number of examples, the update's weight, that is not the client's own."""
    declared = config.get(DECLARED_EXAMPLES, examples)
    if declared != examples:
        raise FedsimError(
            f"this client has {examples} examples, but {declared} are declared for it, which would "
            "weigh its update; the declared count must be that of its own data, or "
            "mechanism.weighting 'uniform'."
        )


def _exit_as_failure(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Turn `sys.exit` in a client's code into its failure: the process serves other clients too."""
    try:
        return call_next(message, context)
    except SystemExit as ended:
        raise RuntimeError(f"the client's code exited with {ended.code!r}.") from ended


def _with_time_limit(seconds_for: Callable[[Context], float]) -> Mod:
    """Mod that ends a client that hangs, with an error reply: the round would wait for it."""

    def limited(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        seconds = seconds_for(context)
        try:
            with time_limit(seconds):
                return call_next(message, context)
        except TimeIsUp:
            return error_reply(message, TIMED_OUT, f"it has not finished in {seconds:g} s.")

    return limited


@check_arguments
def hold_answers(seconds_for: Callable[[Context], float]) -> Mod:
    """Mod that holds an answer, or an error, until half of the task's declared seconds are over.

    For buffered rounds in real time (``Availability.real_time``): when a node answers then says
    nothing of its data, unless it needs longer. The other half is for the messages' way.

    Parameters
    ----------
    seconds_for : callable
        Returns the declared seconds for a node's context; 0 to hold nothing.
    """

    def hold(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        end = time.monotonic() + seconds_for(context) / 2
        try:
            return call_next(message, context)
        finally:
            time.sleep(max(0.0, end - time.monotonic()))

    return hold


def _client_ids(context: Context) -> Ints:
    return np.array([client_id(context.node_config)], dtype=np.int64)


def _arrays(message: Message) -> tuple[str, ArrayRecord]:
    records = {k: v for k, v in message.content.array_records.items() if k != STATE_RECORD}
    if len(records) != 1:
        raise FedsimError(f"a message carries {len(records)} array records; it must carry one.")
    return next(iter(records.items()))


def _config(message: Message) -> dict[str, object]:
    records: list[ConfigRecord] = list(message.content.config_records.values())
    return {key: value for record in records for key, value in record.items()}


def round_of(message: Message) -> int:
    """The round that a client trains or evaluates in; 0 if the message says none."""
    value = _config(message).get("server-round")
    return value if isinstance(value, int) else 0


def _reported(metrics: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
    """Metrics of the only client of a block."""
    return {name: float(column[0]) for name, column in metrics.items()}


class TimeIsUp(BaseException):
    """Raised in a client's code when it exceeds its time limit.

    Not an `Exception`, so that code that catches its own errors does not catch this one.
    """


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeIsUp` in the enclosed code once it has taken ``seconds``.

    Where a context is being entered or left, or a client's state is being stored, this ends first,
    within a second: what it restores (parameters, random generators) is for the next client.

    Works in the main thread of a POSIX process, where Flower's runtimes run clients; elsewhere no
    limit is set. It interrupts Python code, sleeping and waiting, but not a call into C that never
    returns. A timer that is running already, such as a node's own for its tasks, continues: if it
    expires first, no limit is set; otherwise it is set to its remaining time afterwards.
    """
    start = time.monotonic()
    try:
        handler = signal.getsignal(signal.SIGALRM)
        outer_seconds, outer_interval = signal.getitimer(signal.ITIMER_REAL)
        # None: a handler that was installed from C, which could not be restored. A handler without
        # a timer may wait for an alarm from elsewhere.
        is_foreign = handler is None or (handler != signal.SIG_DFL and not outer_seconds)
        if is_foreign or 0 < outer_seconds <= seconds:
            raise ValueError("SIGALRM is in use")
        signal.signal(signal.SIGALRM, partial(_raise, start + seconds + GRACE))
    except (ValueError, AttributeError):  # not the main thread; no such signal
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # or `_raise` could set the timer once more
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if outer_seconds:
            remaining = outer_seconds - (time.monotonic() - start)
            signal.setitimer(signal.ITIMER_REAL, max(remaining, 1e-6), outer_interval)


GRACE, GRACE_STEP = 1.0, 0.002
"""Seconds that what must not be interrupted has to end, and between looks at whether it has."""


def _raise(latest: float, number: int, frame: FrameType | None) -> None:
    if time.monotonic() < latest and any(map(_is_whole, _frames(frame))):
        signal.setitimer(signal.ITIMER_REAL, GRACE_STEP)
        return
    raise TimeIsUp


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and all that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_whole(frame: FrameType) -> bool:
    """Whether what the frame does must not be left half done."""
    code = frame.f_code
    return code.co_name in ("__enter__", "__exit__") or code is LocalRounds.finish.__code__
