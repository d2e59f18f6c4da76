"""A whole federation on this machine: the SuperLink and all SuperNodes as processes."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from fedsim.deploy.federation import CONNECTION, Federation
from fedsim.deploy.flwr_cli import Operator
from fedsim.deploy.processes import Processes, Running, free_ports, wait_for_port
from fedsim.errors import FedsimError

__all__ = ["Rehearsal"]

_PAUSE = 5.0
_LASTED = 60.0
_TRIES = 20


class Rehearsal:
    """Processes of a federation, on loopback, that end with this one.

    Parameters
    ----------
    federation : Federation
        Its keys and certificates; its ports must be free.
    variables : mapping, optional
        Environment variables of the SuperLink and its ServerApps.
    logs : path, optional
        Where the processes' output and Flower's own files go; temporary by default.
    database : path, optional
        Keeps the SuperLink's state, so that it can be restarted.

    Attributes
    ----------
    superlink : Running
    supernodes : dict of int to Running
    operator : Operator
    """

    def __init__(
        self,
        federation: Federation,
        *,
        variables: Mapping[str, str] | None = None,
        logs: Path | None = None,
        database: str = "",
    ) -> None:
        self.federation = federation
        self.operator = Operator(federation.operator, CONNECTION)
        self.supernodes: dict[int, Running] = {}
        # When each was started last, how often it has ended early, and how to start it again.
        self._starts: dict[int, tuple[float, int, Callable[[], None]]] = {}
        self._variables = {**federation.superlink_variables, **(variables or {})}
        self._database = database
        self._processes = Processes(logs)
        self._homes = Path(tempfile.mkdtemp(prefix="fedsim-flower-"))
        self._processes.remove_at_end(self._homes)
        try:
            self.superlink = self.start_superlink()
        except BaseException:
            self.close()
            raise

    @classmethod
    def temporary(
        cls,
        nodes: int,
        *,
        variables: Mapping[str, str] | None = None,
        logs: Path | None = None,
        database: bool = False,
    ) -> Rehearsal:
        """A federation made for one occasion, on free ports, removed with its processes.

        Parameters
        ----------
        nodes : int
            How many SuperNodes to make keys for; none is started yet.
        variables, logs
            As for `Rehearsal`.
        database : bool
            Whether the SuperLink keeps its state in a file, so that it can be restarted.
        """
        port, fleet_port = free_ports(2)
        directory = Path(tempfile.mkdtemp(prefix="fedsim-federation-"))
        federation = Federation.create(
            directory, nodes=nodes, days=2, port=port, fleet_port=fleet_port
        )
        state = str(directory / "superlink.db") if database else ""
        rehearsal = cls(federation, variables=variables, logs=logs, database=state)
        rehearsal._processes.remove_at_end(directory)
        return rehearsal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start_superlink(self) -> Running:
        """Start the SuperLink and wait until it listens on its ports."""
        self._check_ports()
        running = self.start(
            "superlink",
            self.federation.superlink_command(database=self._database),
            self._variables,
        )
        for port in {self.federation.port, self.federation.nodes_port}:
            wait_for_port(running, port)
        self.superlink = running
        return running

    def register(self, nodes: Iterable[int] | None = None) -> None:
        """Let SuperNodes in; all of them by default. Flower refuses a key that it knows."""
        chosen = range(self.federation.nodes) if nodes is None else nodes
        if not self.federation.insecure:
            self.operator.register([self.federation.public_key(node) for node in chosen])

    def start_node(
        self,
        node: int,
        *,
        client: int | None = None,
        config: Mapping[str, str | int] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Running:
        """Start one SuperNode; it goes on trying until the SuperLink answers."""
        (port,) = free_ports(1)
        command = self.federation.supernode_command(node, client=client, port=port, config=config)

        def again() -> None:
            self.supernodes[node] = self.start(f"supernode-{node}", command, variables)

        again()
        self._starts[node] = (time.monotonic(), 0, again)
        return self.supernodes[node]

    def start(
        self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> Running:
        """Start any other process that ends with the rest."""
        return self._processes.start(
            name, command, {"FLWR_HOME": self._home(name), **(variables or {})}
        )

    def start_all(self) -> None:
        """Register every SuperNode that the SuperLink does not know yet, and start them all."""
        if not self.operator.nodes():
            self.register()
        for node in range(self.federation.nodes):
            self.start_node(node)

    def stop(self, running: Running) -> None:
        """End one process."""
        self._processes.stop(running)

    def tend(self) -> None:
        """See that the SuperLink is alive, and start again SuperNodes that have ended.

        One that was killed is taken back when the SuperLink has missed its heartbeat, which
        takes up to a minute; until then it is refused, and ends again.

        Raises
        ------
        FedsimError
            If the SuperLink has ended, or a SuperNode does so again and again, with the end
            of its log.
        """
        if not self.superlink.alive():
            raise FedsimError(f"the SuperLink ended:\n{self.superlink.tail()}")
        for node, running in list(self.supernodes.items()):
            if running.alive():
                continue
            started, ended, again = self._starts[node]
            if time.monotonic() - started < _PAUSE:
                continue
            # One that has lasted had been let in: it is a new failure.
            ended = 0 if time.monotonic() - started > _LASTED else ended + 1
            if ended > _TRIES:
                raise FedsimError(f"SuperNode {node} keeps ending:\n{running.tail()}")
            again()
            self._starts[node] = (time.monotonic(), ended, again)

    def close(self) -> None:
        """End everything."""
        self._processes.close()

    def _home(self, name: str) -> str:
        home = self._homes / name
        home.mkdir(exist_ok=True)
        return str(home)

    def _check_ports(self) -> None:
        taken = busy_port([self.federation.port, self.federation.nodes_port])
        if taken is not None:
            raise FedsimError(
                f"port {taken} is in use; end what listens there, or make a federation with other "
                "ports (fedsim deploy init --port --fleet-port)."
            )


def busy_port(ports: list[int]) -> int | None:
    """The first of these ports on which somebody listens."""
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return port
    return None
