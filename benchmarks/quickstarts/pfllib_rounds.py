"""Run PFLlib's `main.py` and its data script unchanged, timing its server from outside.

It runs in PFLlib's environment, in a folder next to the data that PFLlib reads as ../dataset.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

from benchmarks.quickstarts.stamps import Stamps


def run(checkout: Path, *arguments: str) -> None:
    """Run a script of the checkout with its folder first on the path, as Python runs scripts."""
    sys.path.insert(0, str(checkout.parent))
    sys.argv = [str(checkout), *arguments]
    runpy.run_path(str(checkout), run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pfllib", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--split", nargs=3, help="make the data, with these arguments")
    given = parser.parse_args()
    if given.split:
        run(given.pfllib / "dataset" / "generate_MNIST.py", *given.split)
        return
    stamps = Stamps()
    sys.path.insert(0, str(given.pfllib / "system"))
    server = importlib.import_module("flcore.servers.serverbase").Server
    select, save = server.select_clients, server.save_results

    def select_clients(self: Any) -> Any:
        stamps.boundary()
        return select(self)

    def save_results(self: Any) -> None:
        stamps.stop()
        stamps.report(accuracy=self.rs_test_acc, loss=self.rs_train_loss)
        save(self)

    # A round of PFLlib's loop begins with `select_clients`; `save_results` follows the last one.
    server.select_clients, server.save_results = select_clients, save_results
    server.evaluate = stamps.evaluation(server.evaluate)
    # PFLlib runs one round more than -gr says.
    rounds = ["-gr", str(given.rounds - 1)]
    command = ["-data", "MNIST", "-m", "CNN", "-algo", "FedAvg", "-dev", "cpu"]
    run(given.pfllib / "system" / "main.py", *command, *rounds)


if __name__ == "__main__":
    main()
