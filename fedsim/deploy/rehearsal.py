"""Flower on this machine: a whole federation as local processes, or its simulation runtime."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from fedsim.deploy.bundle import CLIENT_APP, SERVER_APP
from fedsim.deploy.federation import CONNECTION, Federation
from fedsim.deploy.fork_server import ForkServer
from fedsim.deploy.operator import Operator
from fedsim.deploy.ports import free_ports, is_busy
from fedsim.deploy.processes import Child, Processes, Service, program
from fedsim.deploy.services import Node, SuperLink, module, node_arguments
from fedsim.errors import FedsimError


class Rehearsal(Processes):
    """All processes of a federation, on loopback; they are started once, and end with this process.

    Parameters
    ----------
    federation : Federation
        Federation whose keys, certificates and ports are used; the ports must be free.
    variables : mapping, optional
        Environment variables of the ServerApps.
    logs : path, optional
        Directory for the processes' output; temporary by default.

    Attributes
    ----------
    operator : Operator
    """

    def __init__(
        self,
        federation: Federation,
        *,
        variables: Mapping[str, str] | None = None,
        logs: Path | None = None,
    ) -> None:
        super().__init__(logs)
        self.federation = federation
        self.operator = Operator(federation.operator, CONNECTION)
        self._variables = dict(variables or {})
        self._homes = Path(tempfile.mkdtemp(prefix="fedsim-flower-"))
        self.remove_at_end(self._homes)
        self._fork_server = ForkServer()
        try:
            self._check_ports()
            self._start_fork_server()
            self._start_server()
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
        apps: tuple[str, str] | None = None,
        policy: Mapping[str, Any] | None = None,
        modules: Sequence[str] = (),
    ) -> Rehearsal:
        """Create a temporary federation, on free ports; it is removed with its processes.

        Parameters
        ----------
        nodes : int
            Number of SuperNodes to make keys for; none is started yet.
        variables, logs
            As for `Rehearsal`.
        apps : pair of str, optional
            The installed ServerApp and ClientApp to run in place of fedsim's.
        policy : mapping, optional
            Policy of every node, as in ``node.toml``.
        modules : sequence of str
            Modules that runs may name on the server, as in ``superlink.toml``.
        """
        port, fleet_port = free_ports(2)
        directory = Path(tempfile.mkdtemp(prefix="fedsim-federation-"))
        try:
            federation = Federation.create(
                directory, nodes=nodes, days=2, port=port, fleet_port=fleet_port
            )
            server_app, client_app = apps or (SERVER_APP, CLIENT_APP)
            superlink = SuperLink.load(federation.superlink)
            replace(superlink, app=server_app, modules=tuple(modules)).save()
            for node in range(nodes):
                replace(Node.load(federation.node(node)), app=client_app).save(policy)
            rehearsal = cls(federation, variables=variables, logs=logs)
            rehearsal.remove_at_end(directory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)  # it has private keys
            raise
        return rehearsal

    def register(self, nodes: Sequence[int] | None = None) -> None:
        """Register SuperNodes, by default all; Flower refuses a key that is registered already."""
        node_ids = range(self.federation.nodes) if nodes is None else nodes
        if node_ids and not self.federation.insecure:
            self.operator.register([self.federation.public_key(node) for node in node_ids])

    def start_node(self, node: int, *, port: int | None = None) -> None:
        """Start one SuperNode, which retries until the SuperLink answers."""
        port = free_ports(1)[0] if port is None else port
        party, federation = Node.load(self.federation.node(node)), self.federation
        # The SuperLink's public name may belong to another machine; here it is on loopback.
        if party.superlink == f"{federation.hosts[0]}:{federation.fleet_port}":
            party = replace(party, superlink=f"127.0.0.1:{federation.fleet_port}")
        for service in party.services(self._homes / f"node-{node}", port=port):
            self.start_service(service, wait=False)

    def start_all(self) -> None:
        """Register all SuperNodes, and start them."""
        self.register()
        for node in range(self.federation.nodes):
            self.start_node(node)

    def launch(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        descriptors: Sequence[int],
    ) -> Child:
        """Start a process; those of nodes are forks of one that has imported all their modules."""
        arguments = node_arguments(command)
        if arguments is None:
            return super().launch(command, variables, log, descriptors)
        return self._fork_server.fork(arguments, variables, log)

    def close(self) -> None:
        """End all processes, and wait until they have ended."""
        super().close()
        self._fork_server.close()

    def _start_fork_server(self) -> None:
        with self._fork_server.server_end as end:
            command = module("fork_server", str(end.fileno()))
            self.running["fork-server"] = self.start(
                "fork-server", command, descriptors=[end.fileno()]
            )

    def _start_server(self) -> None:
        """Start the server's services, and wait until they listen."""
        party = SuperLink.load(self.federation.superlink)
        for service in party.services(self._homes / "superlink"):
            self.start_service(service.among(self._variables))

    def _check_ports(self) -> None:
        for port in (self.federation.port, self.federation.fleet_port):
            if is_busy(port):
                raise FedsimError(
                    f"port {port} is in use; end what listens there, or make a federation with "
                    "other ports (fedsim deploy init --port --fleet-port)."
                )


class Simulation(Processes):
    """A SuperLink on loopback that runs apps with virtual clients, and ends with this process.

    The SuperLink that Flower would start by itself outlives the run, and keeps the environment
    variables of its first start.

    Parameters
    ----------
    variables : mapping, optional
        Environment variables of the apps.

    Attributes
    ----------
    operator : Operator
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        super().__init__()
        try:
            (port,) = free_ports(1)
            home = self.directory / "operator"
            home.mkdir()
            link = {"address": f"127.0.0.1:{port}", "insecure": True}
            connection = {"superlink": {"default": CONNECTION, CONNECTION: link}}
            (home / "config.toml").write_text(tomli_w.dumps(connection), encoding="utf-8")
            self.operator = Operator(home, CONNECTION)
            command = (
                *(program("flower-superlink"), "--simulation", "--insecure"),
                *("--host", "127.0.0.1", "--port", str(port)),
            )
            home_variable = {"FLWR_HOME": str(self.directory)}
            service = Service("superlink", command, {**(variables or {}), **home_variable}, port)
            self.start_service(service)
        except BaseException:
            self.close()
            raise

    def start_all(self) -> None:
        """Do nothing: Flower starts the virtual clients with the run."""


def federation_config(clients: int, cpus: float, gpus: float) -> str:
    """Flower's federation config for this number of virtual clients.

    Parameters
    ----------
    cpus, gpus : float
        Resources that Ray reserves for each running client.
    """
    return (
        f"num-supernodes={clients} client-resources-num-cpus={cpus:g} "
        f"client-resources-num-gpus={gpus:g}"
    )
