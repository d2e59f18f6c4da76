"""Central DP-SGD with fedsim's mechanisms and accounting, in which a row is an example's gradient.

One step is a round of DP-FedAvg in which every client has one example and takes one step of
rate 1: the cohort is the batch, drawn by Poisson sampling, and a row is an example's negative
gradient. The rows of dense layers are never materialised (`OuterRows`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.cohorts import PoissonCohort
from fedsim.mechanisms import Mechanism, NoiseSource, Releaser
from fedsim.privacy import Entry, Independent, Ledger
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Draws, Purpose, Randomness
from fedsim.rows import Layout, LinearPart, OuterRows
from fedsim.strategies import ServerOptimizer

LOOKS = 10  # steps between two measurements of the distortion
BLOCK = 400  # examples in one block of rows; sums are exact, so that no result depends on it


@dataclass(frozen=True)
class DenseNet:
    """Linear layers with biases and ReLUs between them, over vectors, with cross-entropy.

    Parameters
    ----------
    widths : tuple of int
        Inputs, hidden units of every layer, classes.
    """

    widths: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        """``fc1.weight, fc1.bias, fc2.weight, ...`` in float64."""
        arrays = {}
        for k, (inputs, outputs) in enumerate(zip(self.widths, self.widths[1:], strict=False), 1):
            arrays[f"fc{k}.weight"] = torch.empty(outputs, inputs, dtype=torch.float64)
            arrays[f"fc{k}.bias"] = torch.empty(outputs, dtype=torch.float64)
        return Layout.of(arrays)

    def start(self, seed: int) -> Tensor:
        """Initial parameters ``[d]``: zero for one layer, else uniform as in PyTorch's layers."""
        layout = self.layout
        if len(self.widths) == 2:
            return torch.zeros(layout.d, dtype=torch.float64)
        draws = Randomness(seed).generator(Purpose.INIT, level="run")
        parts = []
        for entry in layout.entries:
            inputs = self.widths[int(entry.name[2:].partition(".")[0]) - 1]
            limit = 1 / math.sqrt(inputs)
            parts.append(draws.uniform(-limit, limit, entry.stop - entry.start))
        return torch.from_numpy(np.concatenate(parts))

    def _layers(self, vector: Tensor) -> list[tuple[Tensor, Tensor]]:
        named = self.layout.unflatten(vector)
        return [(named[f"fc{k}.weight"], named[f"fc{k}.bias"]) for k in range(1, len(self.widths))]

    def _forward(self, vector: Tensor, x: Tensor) -> list[Tensor]:
        """Inputs of every layer, and the logits."""
        values = [x]
        for k, (weight, bias) in enumerate(self._layers(vector)):
            h = torch.addmm(bias, values[-1], weight.T)
            values.append(h.relu_() if k < len(self.widths) - 2 else h)
        return values

    def logits(self, vector: Tensor, x: Tensor) -> Tensor:
        """Logits ``[B, K]`` for ``x [B, inputs]``."""
        return self._forward(vector, x)[-1]

    def descents(self, vector: Tensor, x: Tensor, y: Tensor) -> OuterRows:
        """Negative gradients of the examples' losses, ``[B, d]``, not materialised."""
        values = self._forward(vector, x)
        # Backpropagation: delta is the negative gradient of each example's loss with respect to a
        # layer's outputs, and an example's row for the layer is the outer product with its inputs.
        delta = F.one_hot(y, self.widths[-1]) - torch.softmax(values[-1], dim=1)
        parts: list[LinearPart] = []
        for k, (weight, _) in reversed(list(enumerate(self._layers(vector)))):
            parts.insert(0, LinearPart(values[k], delta))
            if k:
                delta = (delta @ weight) * (values[k] > 0)
        return OuterRows(tuple(parts))


@dataclass(frozen=True)
class Run:
    """Result of a training run.

    Attributes
    ----------
    vector : Tensor ``[d]``
        Final parameters.
    accuracy : list of float
        Accuracy on the test examples after every epoch.
    distortion : float
        Mean of ``||g - g~||`` over every tenth step, g being the batch's mean gradient and g~ the
        released one.
    clipped : float
        Share of rows whose norm exceeded the bound.
    ledger : Ledger
        Every release, at example level.
    info : mapping of str to float
        What the mechanism tells of a release, as means over all steps.
    """

    vector: Tensor
    accuracy: list[float]
    distortion: float
    clipped: float
    ledger: Ledger = field(repr=False)
    info: dict[str, float] = field(default_factory=dict)


def train(
    net: DenseNet,
    inputs: Callable[[Tensor], Tensor],
    labels: Tensor,
    test: tuple[Tensor, Tensor],
    *,
    mechanism: Mechanism,
    noise_multiplier: float,
    batch: float,
    epochs: int,
    optimizer: ServerOptimizer,
    seed: int,
    ledger: Ledger,
    randomness: Randomness | None = None,
) -> Run:
    """Private SGD: Poisson batches, one bounded and noisy sum per step, a fixed denominator.

    Parameters
    ----------
    inputs : callable
        Maps indices int64 ``[B]`` to float64 inputs ``[B, d_in]`` of training examples.
    labels : int64 Tensor ``[N]``
    test : inputs ``[M, d_in]`` and labels ``[M]``
    batch : float
        Expected batch size; the sampling rate is ``batch / N``.
    epochs : int
        Number of epochs, of ``N / batch`` steps each.
    optimizer : ServerOptimizer
        Applies the noisy mean of the negative gradients.
    ledger : Ledger
        Records every release before it is made.
    randomness : Randomness, optional
        Source of batches and noise; derived from the seed by default.
    """
    cohort = PoissonCohort(batch / len(labels), len(labels), adjacency="zero-out")
    randomness, layout = randomness or Randomness(seed), net.layout
    draws = Draws(randomness, level="example", amplified=True)
    plan = ReleasePlan(
        level="example", sampler=cohort, mechanism=mechanism, noise=Independent(noise_multiplier)
    )
    releaser = Releaser(plan, layout)
    state, vector = mechanism.init(layout), net.start(seed)
    steps = round(len(labels) / batch)
    accuracy: list[float] = []
    distortions: list[float] = []
    clipped, seen = 0, 0
    info: Counter[str] = Counter()
    for step in range(1, epochs * steps + 1):
        index = torch.from_numpy(cohort.draw(step, draws))
        parts = [index[k : k + BLOCK] for k in range(0, max(len(index), 1), BLOCK)]
        blocks = [net.descents(vector, inputs(part), labels[part]) for part in parts]
        total = releaser.start(state)
        for rows in blocks:
            total.add(rows)
        ledger.record(
            Entry(
                event=plan.charge(step),
                round=step,
                level="example",
                entropy="config",
                mechanism=str(mechanism),
            )
        )
        source = NoiseSource(randomness.generator(Purpose.NOISE, level="example", round=step))
        release = releaser.release(total, source)
        if step % LOOKS == 1:
            sums = [rows.sum(torch.ones(rows.count, dtype=torch.float64)) for rows in blocks]
            plain = torch.stack(sums).sum(0) / cohort.expected_size
            distortions.append(float(torch.linalg.vector_norm(release.mean - plain)))
        clipped, seen = clipped + total.clipped, seen + total.count
        info.update(release.info)
        state = release.state
        vector = optimizer.step(vector, release.mean)
        if step % steps == 0:
            hits = net.logits(vector, test[0]).argmax(1) == test[1]
            accuracy.append(float(hits.double().mean()))
    means = {name: total / step for name, total in info.items()}
    return Run(vector, accuracy, float(np.mean(distortions)), clipped / max(seen, 1), ledger, means)
