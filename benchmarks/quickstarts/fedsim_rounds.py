"""The quick starts' federations as fedsim configs, run by `fedsim.run` as by `fedsim run`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedsim
from benchmarks.quickstarts import networks
from benchmarks.quickstarts.stamps import Stamps
from fedsim.engines import tensors
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.resolve import CentralEvaluation

CONFIGS: dict[str, dict[str, Any]] = {
    "pfllib": {
        "partition": {"name": "by-owner", "clients": 20},
        "client": {"lr": 0.005, "batch-size": 10, "epochs": 1},
        "task": {"metrics": "accuracy,auc"},
    },
    "flower": {
        "partition": {"name": "by-owner", "clients": 10},
        "client": {"lr": 0.1, "momentum": 0.9, "batch-size": 32, "epochs": 1},
        "evaluate": {"clients-every": 1, "fraction": 0.5},
    },
}
DATA: dict[str, dict[str, Any]] = {"pfllib": {}, "flower": {"normalize": True}}
NETWORKS = {"pfllib": networks.mnist, "flower": networks.cifar}


class Turns(Callback):
    """Waits for its turn between rounds; its own evaluation of the model is in no round's time."""

    def __init__(self, stamps: Stamps, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self._stamps, self._model, self._x, self._y = stamps, model, x, y
        self.accuracies: list[float] = []

    def on_round(self, status: RunStatus) -> None:
        """End the round and, unless it was the last, wait for the next turn."""
        self._stamps.stop()
        self.accuracies.append(self._accuracy(tensors(status.arrays)))
        if status.round < status.config.rounds:
            self._stamps.wait()

    @torch.no_grad()
    def _accuracy(self, parameters: dict[str, Tensor]) -> float:
        self._model.load_state_dict(parameters)
        pairs = zip(torch.split(self._x, 500), torch.split(self._y, 500), strict=True)
        correct = sum(int((self._model(x).argmax(1) == y).sum()) for x, y in pairs)
        return correct / len(self._y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("quickstart", choices=list(CONFIGS))
    parser.add_argument(
        "data", type=Path, help="a folder that `benchmarks.quickstarts.examples` made"
    )
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    stamps = Stamps()
    config = fedsim.RunConfig.parse(
        {
            "rounds": given.rounds,
            "engine": {"workers": given.workers, "device": "cpu"},
            **CONFIGS[given.quickstart],
            "data": DATA[given.quickstart] | {"name": str(given.data / "clients.npz")},
        }
    )
    with np.load(given.data / "judged.npz") as file:
        x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    model = NETWORKS[given.quickstart]
    turns = Turns(stamps, model(), x, y)
    CentralEvaluation.__call__ = stamps.evaluation(CentralEvaluation.__call__)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as out:
        fedsim.run(config, model=model(), out=Path(out) / "run", callbacks=turns)
    stamps.report(accuracy=turns.accuracies)


if __name__ == "__main__":
    main()
