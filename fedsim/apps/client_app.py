"""The ClientApp that Flower's runtimes load."""

from __future__ import annotations

from flwr.app import Context

from fedsim.apps.node import trainer_for
from fedsim.build import mechanism
from fedsim.clients.flower import client_app
from fedsim.config import RunConfig
from fedsim.mechanisms import Mechanism

__all__ = ["app"]


def _mechanism_for(context: Context) -> Mechanism:
    return mechanism(RunConfig.from_run_config(context.run_config).mechanism)


app = client_app(trainer_for, _mechanism_for)
