"""CPU time of adaptive methods: `AdadpLR` beside `SGD`, and `AdaptiveNoise` beside `Clipping`.

`python -m benchmarks.adaptive` prints the second.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.example_privacy import BATCH as EXPECTED
from benchmarks.example_privacy import EXAMPLES as OF_ONE
from benchmarks.example_privacy import examples, model_of
from benchmarks.jobs import BATCH, EXAMPLES, JOBS, LR, data_of, make_trainer
from benchmarks.turns import in_turns, ratio
from fedsim.clients import SGD, AdadpLR, AdadpNoise
from fedsim.federation.engines.process import use_one_thread
from fedsim.mechanisms import AdaptiveNoise, Clipping, Mechanism
from fedsim.randomness import Randomness
from fedsim.training import ClientData, ExamplePrivacy, Trainer

STEPS = 10
PHASES: dict[str, Mechanism] = {
    "clipping": Clipping(1.0),
    "first phase": AdaptiveNoise(1.0),
    "second phase": AdaptiveNoise(1.0, threshold=0.0, beta=20.0),
}


def compare_adaptive(clients: int = 25, pairs: int = 15) -> dict[str, Any]:
    """CPU milliseconds per gradient evaluation of each, and their ratio."""
    data = data_of(clients)
    sides = {
        name: partial(_round, make_trainer(JOBS["mlp"], data, algorithm=algorithm), clients)
        for name, algorithm in (
            ("sgd ms", SGD(lr=LR)),
            ("adadp ms", AdadpLR(lr=LR, keep="half", eta_max=10 * LR)),
        )
    }
    seconds = {name: turns[1:] for name, turns in in_turns(sides, pairs + 1).items()}
    gradients = clients * EXAMPLES // BATCH
    return {
        **{name: median(turns) / gradients * 1e3 for name, turns in seconds.items()},
        "ratio": ratio(seconds["adadp ms"], seconds["sgd ms"]),
    }


def _round(trainer: Trainer, clients: int, t: int) -> None:
    for _ in trainer.train(trainer.initial(), np.arange(clients), t):
        pass


def compare_noise(name: str, pairs: int = 7) -> dict[str, Any]:
    """CPU milliseconds per step of private RMSProp with clipping, and ratios of both phases to it.

    One client, Poisson batches of 200 expected examples; ``name`` is softmax or the MLP job.
    """
    model, shape = (nn.Linear(784, 10), (784,)) if name == "softmax" else model_of(name)
    x, y = examples(shape)
    data = ClientData(x, y, [np.arange(OF_ONE)])
    sides = {}
    for phase, mechanism in PHASES.items():
        trainer = Trainer(
            model, AdadpNoise(lr=0.01), data, batch_size=EXPECTED, steps=STEPS,
            randomness=Randomness(0), privacy=ExamplePrivacy(mechanism, 1.0),
        )  # fmt: skip
        sides[phase] = partial(_fit, trainer)
    seconds = {phase: turns[1:] for phase, turns in in_turns(sides, pairs + 1).items()}
    clipping = seconds.pop("clipping")
    return {
        "clipping ms": median(clipping) / STEPS * 1e3,
        **{phase: ratio(turns, clipping) for phase, turns in seconds.items()},
    }


def _fit(trainer: Trainer, t: int) -> None:
    trainer.fit(trainer.initial(), np.array([0]), t)


def main() -> None:
    use_one_thread()
    table = Table(title="A step of private RMSProp, over one with clipping (95 % intervals)")
    for column in ("model", "clipping ms", "first phase", "second phase"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in ("softmax", "mlp"):
        found = compare_noise(name)
        ms = f"{found['clipping ms']:.2f}"
        table.add_row(name, ms, str(found["first phase"]), str(found["second phase"]))
    Console().print(table)


if __name__ == "__main__":
    main()
