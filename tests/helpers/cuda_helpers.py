"""What stands in for a GPU where there is none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_cnn, make_data, make_mlp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.clients import SGD, AdadpLR, AdadpNoise, Adam, FedNova, RMSProp, Scaffold
from fedsim.clients.proximal import Proximal
from fedsim.clients.schedules import Schedule
from fedsim.randomness import Randomness
from fedsim.training import Trainer
from fedsim.training.graphs import StepGraphs
from fedsim.training.private_steps import PrivateLoop

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
ALGORITHMS = {
    "sgd": SGD(lr=0.1),
    "scheduled": SGD(lr=0.1, schedule=Schedule("inverse", decay=0.1, over="step")),
    "momentum": SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": Adam(lr=0.01, weight_decay=0.01),
    "rmsprop": RMSProp(lr=0.01, schedule=Schedule("exponential", decay=0.9)),
    "adadp-noise": AdadpNoise(lr=0.01),
    "adadp": AdadpLR(lr=0.1),
    "adadp, mostly discarding": AdadpLR(lr=0.5, tol=0.02),
    "adadp, half": AdadpLR(lr=0.1, keep="half", discard=False, exponent=0.5),
    "adadp, hybrid": AdadpLR(lr=0.1, adapt_rounds=1),
    "proximal sgd": Proximal(SGD(lr=0.1), mu=0.5),
    "proximal adadp": Proximal(AdadpLR(lr=0.1), mu=0.5),
    "fednova": FedNova(lr=0.1, momentum=0.9, schedule=Schedule("inverse", decay=0.1, over="step")),
    "proximal fednova": Proximal(FedNova(lr=0.1, reach=3.0), mu=0.5),
    "scaffold": Scaffold(lr=0.1, momentum=0.9),
    "scaffold, at the start": Scaffold(lr=0.1, control="gradient"),
}

MODELS = {
    "layered": lambda: make_mlp(36, 5, 3, dtype=torch.float64),
    "func": lambda: make_cnn(dtype=torch.float64),
}
"""A small model for each path that is captured."""


def can_fake_a_gpu() -> bool:
    """Whether tensors without data may say that they are on a GPU that is not there.

    torch 2.6 asks CUDA's driver in some of their operations.
    """
    try:
        with FakeTensorMode():
            torch.empty(2, device="cuda").uniform_()
    except RuntimeError:
        return False
    return True


needs_a_fake_gpu = pytest.mark.skipif(
    not can_fake_a_gpu(), reason="this torch cannot pretend that there is a GPU"
)


_no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _no_gpu])]
"""A device, and a CPU that stands in for it: see `on_device`."""


class Reads(SGD):
    """Looks at a number in each of its steps, and promises that they are alike all the same."""

    def phase(self, at):
        return "step"

    def step(self, state, gradient, at):
        if float(state["theta"].sum()) > -1e9:
            super().step(state, gradient, at)


class Pretend(torch.Tensor):
    """A tensor in the CPU's memory that says it is on a GPU: code takes its branches for one."""

    is_cuda = property(lambda self: True)


def pretend(tensor):
    return tensor.as_subclass(Pretend)


class NoReadingBack(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = func in (aten.index.Tensor, aten.index_put_.default) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in READS or masks:
            raise RuntimeError(f"{func} reads a value back")
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Captures as a CUDA graph does: kernels and their tensors, and nothing of Python.

    Playing it does them again, into the same memory.
    """

    def __init__(self):
        super().__init__()
        self.recordings = 0
        self.calls = None

    def record(self, work):
        self.recordings += 1
        work()
        calls = self.calls = []
        with NoReadingBack(), self:
            result = work()
        return lambda: play(calls), result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


@torch.no_grad()
def play(calls):
    for func, args, kwargs, out in calls:
        aliases = [result.alias_info for result in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            continue  # a view: it shows what the kernels before it wrote
        again = func(*args, **kwargs)
        if not any(aliases):
            for one, other in zip(_tensors(out), _tensors(again), strict=True):
                one.copy_(other)


def _tensors(out):
    return [out] if isinstance(out, torch.Tensor) else [one for one in out if one is not None]


def images(sizes):
    """Clients for those models."""
    return make_data(sizes, dtype=torch.float64, features=36, shape=(1, 6, 6))


def make_trainer(model, algorithm, data, path, **settings):
    return Trainer(
        model, algorithm, data, batch_size=4, epochs=3, path=path, randomness=Randomness(0),
        state="client" if isinstance(algorithm, Scaffold) else "reset", **settings,
    )  # fmt: skip


def as_if_on_a_gpu(monkeypatch, trainer):
    """The trainer, whose tensors say that they are on a GPU, on clients in one block."""
    real = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: pretend(real(array)))
    data = trainer.data
    trainer.data = dataclasses.replace(data, x=pretend(data.x), y=pretend(data.y))
    trainer.stepper.data = trainer.data
    trainer.block_size = data.population
    prepare = PrivateLoop._prepare_noise

    def on_it(loop, clients):
        prepare(loop, clients)
        loop.release = {name: pretend(entry) for name, entry in loop.release.items()}

    monkeypatch.setattr(PrivateLoop, "_prepare_noise", on_it)
    return trainer


def on_device(monkeypatch, device, make, *, captured, recorder=None):
    """The trainer ``make(device)``, made to train blocks, and its parameters.

    On a CPU its tensors say that they are on a GPU, and a `Tape`, or another recorder, captures.
    Clients with example-level privacy draw their noise in the step on both.
    """
    for module in ("local_rounds", "trainer"):
        monkeypatch.setattr(f"fedsim.training.{module}.draws_on_device", lambda *_: True)
    trainer = make(device)
    if device == "cuda":
        assert trainer.stepper.captured_step is not None
        trainer.stepper.captured_step.can_capture = captured
        return trainer, trainer.initial()
    vector = pretend(trainer.initial())
    trainer = as_if_on_a_gpu(monkeypatch, trainer)
    stepper = trainer.stepper
    if private := trainer.rounds.private:
        trainer.rounds.releases = None
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *size, **kind: pretend(zeros(*size, **kind)))
    graphs = StepGraphs(private or stepper, recorder or Tape(), trainer.population)
    stepper.captured_step = graphs if captured else None
    return trainer, vector


def assert_captured(trainer):
    """That the trainer's steps have been captured."""
    assert trainer.stepper.captured_step.can_capture
    assert trainer.stepper.captured_step.graphs


def rounds(trainer, vector, cohorts):
    """Rows of some rounds from the same parameters."""
    return [
        joined(trainer.train(vector, np.array(ids), t + 1), np.array(ids))[0]
        .as_subclass(torch.Tensor)
        .cpu()
        for t, ids in enumerate(cohorts)
    ]
