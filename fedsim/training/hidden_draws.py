"""Random numbers that a model draws by itself: dropout, noise layers, `torch.rand` in a forward.

They come from torch's global generator. A model that draws is found out when its trainer is
built, and then trained with that generator lent and seeded for one client and step at a time,
from the client's own keyed stream: so its bits depend on nobody else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim.errors import FedsimError
from fedsim.models.local_norm import statistics_of
from fedsim.randomness import Purpose, Randomness, Stream

__all__ = ["EVALUATION", "HiddenDraws", "Seeds", "hidden_draws", "left_as_it_was", "seeded"]

Ints = npt.NDArray[np.int64]

EVALUATION = 2**40
"""The part of an evaluation's address, where a training step has its number."""

# Modules of which it is known that they neither draw nor change their buffers.
QUIET = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten,
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.GroupNorm,
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU,
)  # fmt: skip


@dataclass(frozen=True)
class HiddenDraws:
    """Whether a model draws in training, and whether in evaluation."""

    training: bool
    evaluation: bool


def hidden_draws(model: nn.Module, x: Tensor | None) -> HiddenDraws:
    """Run a model, and watch the generators.

    Parameters
    ----------
    model : nn.Module
        Left as it was, but for its mode.
    x : Tensor ``[B, ...]`` or None
        Some inputs; without any, or where the model does not take them, what its modules are
        known to draw decides.

    Raises
    ------
    FedsimError
        If it draws from numpy's or Python's generator, changes its buffers in training, or keeps
        anything else from one call to the next that its outputs follow from.
    """
    if all(type(module) in QUIET for module in model.modules()):
        return HiddenDraws(training=False, evaluation=False)
    known = any(_known_to_draw(module) for module in model.modules())
    if x is None:
        return HiddenDraws(training=known, evaluation=False)
    try:
        return HiddenDraws(
            training=_draws(model.train(), x) or known, evaluation=_draws(model.eval(), x)
        )
    except FedsimError:
        raise
    except (Exception, SystemExit):  # zeros need not suit a user's model
        return HiddenDraws(training=known, evaluation=False)


def _known_to_draw(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, nn.RReLU)


@torch.no_grad()
def _draws(model: nn.Module, x: Tensor) -> bool:
    elsewhere = _elsewhere()
    with left_as_it_was(model, x.device) as buffers:
        before = _states(x.device)
        model(x)
        drawn = before != _states(x.device)
        remembers = _remembers(model, x)
        changed = [
            name
            for name, buffer in model.named_buffers()
            if not torch.allclose(buffer, buffers[name], rtol=0, atol=0, equal_nan=True)
        ]
    if changed:
        raise FedsimError(
            f"the model changes its buffers {', '.join(changed)} as it runs, which no client's "
            "update carries; it must leave them as they are."
        )
    if elsewhere != _elsewhere():
        raise FedsimError(
            "the model draws from numpy's or Python's global generator, so that its draws could "
            "not be repeated; it must draw from torch's."
        )
    if remembers:
        raise FedsimError(
            "the model gives other outputs for the same inputs once it has seen others: what it "
            "keeps in between would carry one client's data into another's update; it must be a "
            "function of its inputs, parameters and buffers."
        )
    return drawn


@contextmanager
def left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Put back a model's buffers, its statistics and torch's generators after it has run.

    Yields
    ------
    dict of str to Tensor
        The buffers, as they were before.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    statistics = {name: model.get_parameter(name).clone() for name in statistics_of(model)}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield buffers
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
                for name, values in statistics.items():
                    model.get_parameter(name).copy_(values)


def _remembers(model: nn.Module, x: Tensor) -> bool:
    """Whether the same inputs, with the same draws, give others outputs after other inputs."""
    outputs: list[Tensor] = []
    for seen_before in ([], [x + 1], [x]):
        for others in seen_before:
            with suppress(Exception):  # they may be none that it takes
                model(others)
        with seeded(0, x.device):
            output = model(x)
        if isinstance(output, Tensor):
            outputs.append(output.clone())
    # Not to the bit: a GPU may add in any order.
    return any(
        output.shape != outputs[0].shape
        or not torch.allclose(output, outputs[0], rtol=1e-5, atol=1e-6, equal_nan=True)
        for output in outputs[1:]
    )


def _states(device: torch.device) -> list[bytes]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]


def _elsewhere() -> tuple[object, ...]:
    name, keys, *position = np.random.get_state(legacy=True)  # noqa: NPY002
    return random.getstate(), name, np.asarray(keys).tobytes(), *position


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Lend torch's global generators of the CPU and this device, seeded; or without a seed, not."""
    if seed is None:
        yield
        return
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Seeds:
    """Of what the models of ``n`` clients draw in a round.

    Parameters
    ----------
    randomness : sequence of n Randomness
    client_ids : int64 ``[n]``
    round : int
    """

    randomness: Sequence[Randomness]
    client_ids: Ints
    round: int

    def of_client(self, position: int) -> Seeds:
        """Those of one of the clients."""
        client = slice(position, position + 1)
        return Seeds(self.randomness[client], self.client_ids[client], self.round)

    def of_step(self, step: int, active: int, count: int = 1) -> Ints:
        """Seeds for a step of each of the first ``active`` clients, ``[active, count]``."""
        seeds = np.empty((active, count), dtype=np.int64)
        stream = Stream()
        for position, client in enumerate(self.client_ids[:active].tolist()):
            draws = self.randomness[position].generator(
                Purpose.DROPOUT,
                level="example",
                round=self.round,
                client=client,
                part=step,
                stream=stream,
            )
            seeds[position] = draws.integers(2**63, size=count, dtype=np.uint64).astype(np.int64)
        return seeds
