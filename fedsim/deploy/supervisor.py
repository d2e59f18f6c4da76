"""Keeping a party's processes up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedsim.deploy.processes import Processes, Running, wait_for_port
from fedsim.errors import FedsimError

__all__ = ["Service", "Supervisor"]

_PAUSE = 5.0
_LASTED = 60.0
_TRIES = 20


@dataclass(frozen=True)
class Service:
    """A process that is to be up.

    Attributes
    ----------
    name : str
    command : tuple of str
        Its words hold no secret: everybody on the machine can read them.
    variables : mapping
        Environment variables beside those of `fedsim.deploy.processes.environment`.
    port : int
        On which it listens, on this machine, when it is up; 0 for one that does not.
    """

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    port: int = 0

    def among(self, variables: Mapping[str, str]) -> Service:
        """The same with more environment variables."""
        return replace(self, variables={**self.variables, **variables})


class Supervisor:
    """Starts services, and starts again those that end.

    Attributes
    ----------
    running : dict of str to Running
        The processes, by the services' names.
    """

    def __init__(self, processes: Processes) -> None:
        self.running: dict[str, Running] = {}
        self._processes = processes
        # How to start each, when that was done last, and how often it has ended early.
        self._services: dict[str, tuple[Service, float, int]] = {}

    def start(self, service: Service, *, wait: bool = True) -> Running:
        """Start a service, again if it is there, and wait until it listens.

        Raises
        ------
        FedsimError
            If it ends before, with the end of its log.
        """
        self.stop(service.name)
        running = self._start(service, 0)
        if wait and service.port:
            wait_for_port(running, service.port)
        return running

    def stop(self, name: str) -> None:
        """End a service for good; nothing if there is none of this name."""
        self._services.pop(name, None)
        running = self.running.pop(name, None)
        if running is not None:
            self._processes.stop(running)

    def tend(self) -> None:
        """Start again what has ended.

        A SuperNode that was killed is taken back when the SuperLink has missed its heartbeat,
        which takes up to a minute; until then it is refused, and ends again.

        Raises
        ------
        FedsimError
            If a service ends again and again, with the end of its log.
        """
        for name, (service, started, ended) in list(self._services.items()):
            running = self.running[name]
            if running.alive() or time.monotonic() - started < _PAUSE:
                continue
            # One that has lasted had been let in: it is a new failure.
            ended = 0 if time.monotonic() - started > _LASTED else ended + 1
            if ended > _TRIES:
                raise FedsimError(f"{name} keeps ending:\n{running.tail()}")
            self._processes.stop(running)
            self._start(service, ended)

    def _start(self, service: Service, ended: int) -> Running:
        running = self._processes.start(service.name, service.command, service.variables)
        self.running[service.name] = running
        self._services[service.name] = (service, time.monotonic(), ended)
        return running
