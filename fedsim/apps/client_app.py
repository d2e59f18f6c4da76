"""The ClientApp that Flower's runtimes load."""

from __future__ import annotations

from fedsim.apps.node import trainer_for
from fedsim.clients.flower import client_app

__all__ = ["app"]

app = client_app(trainer_for)
