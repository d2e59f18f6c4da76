"""A client that is interrupted anywhere leaves nothing behind for the clients after it."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from clients_helpers import make_cnn, make_data, make_mlp
from cuda_helpers import Tape, as_if_on_a_gpu, images, pretend
from slow_cases import slow_but
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedsim
from fedsim.clients import SGD, AdadpLR
from fedsim.clients.schedules import Schedule
from fedsim.federation.engines import client_app
from fedsim.federation.engines.client_app import TimeIsUp, time_limit
from fedsim.mechanisms import Clipping
from fedsim.models.normalization import localise
from fedsim.randomness import Randomness
from fedsim.rows.block import CLIENT_IDS
from fedsim.tasks import CrossEntropy
from fedsim.training import ExamplePrivacy, Trainer
from fedsim.training.client_state import MemoryStore
from fedsim.training.graphs import StepGraphs
from fedsim.training.own_state import OwnState

SIZES = [9, 12, 7]
VICTIM, NEXT = np.array([0]), np.array([1])


class Operations(TorchDispatchMode):
    """Interrupts at one of torch's operations, as memory that runs out does."""

    def __init__(self, number=None):
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.number:
            raise TimeIsUp
        return func(*args, **(kwargs or {}))


class Lines:
    """Interrupts at a line of Python, as a timer does."""

    FOLDERS = tuple(str(Path(fedsim.__file__).parent / part) for part in ("training", "clients"))

    def __init__(self, number=None):
        self.number, self.count = number, 0

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *raised):
        sys.settrace(self.before)

    def _called(self, frame, event, argument):
        name = frame.f_code.co_filename
        return self._line if name.startswith(self.FOLDERS) or "/opacus/" in name else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.count += 1
            if self.number is not None and self.count >= self.number:
                signal.raise_signal(signal.SIGALRM)  # again at the next line, if it is postponed
        return self._line


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x.view(len(x), 3, 4))[0][:, -1])


class Remembers(nn.Module):
    """Notes in an attribute, a list and a buffer what it is given."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.total = nn.Linear(12, 3), [], 0.0
        self.register_buffer("last", torch.zeros(12))

    def forward(self, x):
        if x.shape[1:] == (12,) and not bool((x == x[:1]).all()):  # nothing made up
            self.calls.append(x[0])
            self.total += 1.0
            self.last.copy_(x[0])
        return self.linear(x) + 0.1 * self.total


@dataclass(frozen=True)
class Case:
    model: object
    algorithm: object = SGD(lr=0.1, momentum=0.9)
    private: bool = False
    settings: tuple = ()
    shape: tuple = ()

    def trainer(self):
        torch.manual_seed(3)
        model, settings = self.model(), dict(self.settings)
        data = make_data(SIZES, features=36 if self.shape else 12, shape=self.shape or None)
        if self.private:
            settings["privacy"] = ExamplePrivacy(Clipping(0.5), 0.7)
        if "personal" in settings:
            affine = ["norm.weight", "norm.bias"]
            settings |= {"personal": [*affine, *localise(model, affine)], "state": "client"}
        return Trainer(
            model, self.algorithm, data, batch_size=4, steps=3,
            randomness=Randomness(5, "ab"), **settings,
        )  # fmt: skip


def dropout():
    return nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def path(name, **settings):
    return (("path", name), *settings.items())


def parallel():
    return nn.Sequential(
        nn.Unflatten(1, (3, 4)), nn.Linear(4, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    )


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.norm(x))


CASES = {
    "unrolled gru": Case(lambda: Recurrent(nn.GRU), private=True),
    "plain": Case(lambda: make_mlp(12), settings=path("plain")),
    "plain, convolutions": Case(make_cnn, settings=path("plain"), shape=(1, 6, 6)),
    "plain, dropout": Case(dropout),
    "plain, statistics": Case(Normalised, settings=path("plain", personal=True)),
    "plain, with state": Case(Remembers, settings=path("plain")),
    "func": Case(lambda: make_mlp(12, 16), settings=path("func")),
    "layered": Case(lambda: make_mlp(12), settings=path("layered", kernel="eager")),
    "compiled": Case(lambda: make_mlp(12), settings=path("layered")),
    "layered, convolutions": Case(make_cnn, settings=path("layered"), shape=(1, 6, 6)),
    "adadp": Case(lambda: make_mlp(12), AdadpLR(lr=0.1), settings=path("plain", state="client")),
    "unrolled lstm": Case(lambda: Recurrent(nn.LSTM), private=True),
    "factored": Case(parallel, private=True),
    "program rows": Case(lambda: make_mlp(12), private=True),
    "program rows, convolutions": Case(make_cnn, private=True, shape=(1, 6, 6)),
    "vmapped": Case(lambda: nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 3)), private=True),
    "one by one": Case(dropout, private=True),
}


def update(trainer, clients, round):
    trainer.restore({})
    return trainer.fit(trainer.initial(), clients, round).theta


def interrupted(trainer, interrupt):
    """Whether a client's round is interrupted, and not over before that."""
    try:
        with time_limit(1000.0), interrupt:
            update(trainer, VICTIM, 2)
    except TimeIsUp:
        return True
    return False


@pytest.mark.parametrize("points", slow_but(1, [12, 500]))
@pytest.mark.parametrize("kind", [Operations, Lines])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_an_interrupted_client_leaves_nothing_for_the_next_one(case, kind, points):
    fresh, trainer, counted = case.trainer(), case.trainer(), kind()
    expected = [update(fresh, ids, 2) for ids in (NEXT, VICTIM)]
    warm = case.trainer()
    update(warm, NEXT, 2)
    with counted:
        update(warm, VICTIM, 2)
    assert counted.count > 20
    # A round that is repeated is not charged again, which saves some lines at the end.
    for number in np.unique(np.linspace(1, 0.8 * counted.count, points).astype(int)).tolist():
        assert interrupted(trainer, kind(number)), number
        assert torch.equal(update(trainer, NEXT, 2), expected[0]), number
    assert torch.equal(trainer.initial(), fresh.initial())
    assert torch.equal(update(trainer, VICTIM, 2), expected[1])


@pytest.mark.parametrize("kind", [Operations, Lines])
def test_an_interrupted_captured_step_is_not_replayed(kind, monkeypatch):
    """With a tape in place of a CUDA graph; the rate of a schedule is in the graph's memory."""
    algorithm = SGD(lr=0.1, momentum=0.9, schedule=Schedule("inverse", decay=0.5, over="step"))

    def taped():
        torch.manual_seed(3)
        model = make_mlp(36, 5, 3, dtype=torch.float64)
        trainer = Trainer(
            model, algorithm, images(SIZES), batch_size=4, epochs=2, path="layered",
            randomness=Randomness(0),
        )  # fmt: skip
        vector = pretend(trainer.initial())
        trainer = as_if_on_a_gpu(monkeypatch, trainer)
        trainer.stepper.captured_step = StepGraphs(trainer.stepper, Tape(), 4)
        return trainer, vector

    def rows(trainer, vector, ids, round=2):
        return next(trainer.train(vector, ids, round)).rows.as_subclass(torch.Tensor)

    expected, counted = rows(*taped(), NEXT), kind()
    trainer, vector = taped()
    rows(trainer, vector, NEXT)
    with counted:
        rows(trainer, vector, VICTIM)
    for number in np.unique(np.linspace(1, 0.9 * counted.count, 80).astype(int)).tolist():
        with pytest.raises(TimeIsUp), time_limit(1000.0), kind(number):
            rows(trainer, vector, VICTIM)
        assert torch.equal(rows(trainer, vector, NEXT), expected), number
    assert trainer.stepper.captured_step.can_capture


@pytest.mark.parametrize("kind", [Operations, Lines])
@pytest.mark.parametrize("name", ["plain, with state", "plain, dropout", "plain, statistics"])
def test_an_interrupted_evaluation_leaves_nothing_for_training(name, kind):
    fresh, trainer, counted = CASES[name].trainer(), CASES[name].trainer(), kind()
    vector = trainer.initial()
    evaluated = next(fresh.evaluate(vector, NEXT, 1)).metrics["loss"]
    expected = update(fresh, NEXT, 2)
    next(trainer.evaluate(vector, VICTIM, 1))  # the first one reads the model
    with counted:
        next(trainer.evaluate(vector, VICTIM, 1))
    for number in np.unique(np.linspace(1, 0.8 * counted.count, 12).astype(int)).tolist():
        with pytest.raises(TimeIsUp), time_limit(1000.0), kind(number):
            next(trainer.evaluate(vector, VICTIM, 1))
        assert torch.equal(update(trainer, NEXT, 2), expected), number
        trainer.restore({})
        assert next(trainer.evaluate(vector, NEXT, 1)).metrics["loss"] == evaluated


def test_clients_never_share_a_row_of_state_after_an_interruption():
    states = {
        k: {CLIENT_IDS: torch.tensor([k]), "m": torch.full((1, 3), float(k))} for k in range(4)
    }
    store, counted = MemoryStore(4), Lines()
    with counted:
        store.save(states[0], 1)
    for number in range(1, counted.count + 1):
        store = MemoryStore(4)
        # Nothing postpones it here: the store's own order must do.
        with pytest.raises(TimeIsUp), alarmed(), Lines(number):
            store.save(states[0], 1)
        for k in (1, 2, 3, 0):
            store.save(states[k], 1)
        found = store.load(np.arange(4), None).rows["m"][:, 0]
        assert found.tolist() == [0.0, 1.0, 2.0, 3.0], number


@contextmanager
def alarmed():
    def expired(*_):
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, expired)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


class Slow:
    """A context that takes a while to be left, and notes whether it was left as a whole."""

    def __init__(self, seconds):
        self.seconds, self.left = seconds, False

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            time.sleep(0.01)
        self.left = True


def test_a_context_is_left_before_the_time_is_up():
    context = Slow(0.2)

    def work():
        with context:
            pass
        time.sleep(5)

    with pytest.raises(TimeIsUp), time_limit(0.05):
        work()
    assert context.left
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_context_that_hangs_is_interrupted_all_the_same(monkeypatch):
    monkeypatch.setattr(client_app, "GRACE", 0.1)
    context = Slow(60.0)
    with pytest.raises(TimeIsUp), time_limit(0.05), context:
        pass
    assert not context.left


class Reluctant(nn.Dropout):
    """Is interrupted once as its mode is set."""

    raises = False

    def train(self, mode=True):
        if mode and self.raises:
            self.raises = False
            raise KeyboardInterrupt
        return super().train(mode)


def test_a_mode_that_was_set_in_a_part_of_the_model_is_set_again():
    def trainer():
        torch.manual_seed(3)
        return Case(lambda: nn.Sequential(nn.Linear(12, 3), Reluctant(0.5))).trainer()

    stopped, expected = trainer(), update(trainer(), NEXT, 2)
    list(stopped.evaluate(stopped.initial(), NEXT, 1))
    stopped.model[1].raises = True
    with pytest.raises(KeyboardInterrupt):
        update(stopped, NEXT, 2)
    assert torch.equal(update(stopped, NEXT, 2), expected)


def test_a_restoration_that_was_interrupted_is_made_up_for(monkeypatch):
    model = Remembers()
    state = OwnState(model, CrossEntropy(), strict=False)

    def interrupts(_):
        raise KeyboardInterrupt

    def call():
        with state.restored():
            model.calls.append("a client's")

    with monkeypatch.context() as patched:
        patched.setattr(OwnState, "_restore", interrupts)
        with pytest.raises(KeyboardInterrupt):
            call()
    assert model.calls
    with state.restored():
        assert not model.calls
