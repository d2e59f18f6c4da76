"""Parties of a federation, server and nodes: their settings, and the processes that they run."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import tomli_w

from fedsim import regular_files
from fedsim.allowed_code import AllowedCode, inherited
from fedsim.deploy.bundle import CLIENT_APP, SERVER_APP
from fedsim.deploy.flower_programs import poll_seconds, task_poll_seconds
from fedsim.deploy.flower_replacements import speaks_grpc, warn_of_newer_flower
from fedsim.deploy.party_files import Names, read_party, read_roster, write_party
from fedsim.deploy.policy import NODE, TEMPLATE, Policy
from fedsim.deploy.processes import Service, program
from fedsim.errors import FedsimError
from fedsim.privacy.manifest import LEDGER_KEY
from fedsim.settings import Constraint, Ge

SUPERLINK = "FEDSIM_SUPERLINK"
"""Environment variable with the path of the server's ``superlink.toml``, for a ServerApp."""

CLIENTS = "FEDSIM_CLIENTS"
"""Environment variable with the path of the roster, for a ServerApp; empty if nodes have no keys.

The roster maps registered keys to client ids. It is on the server, where no node can change it.
"""

TASK_POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
"""Flower's environment variable with the seconds between two looks of a SuperExec for a task."""

_SUPERLINK_TOML = "superlink.toml"

_Count = Annotated[int, Ge(0)]
_Words = Annotated[str, Constraint(bool, "a string that is not empty")]


@dataclass(frozen=True)
class SuperLink:
    """The server, which listens for its operator on loopback, and for nodes on another port.

    Attributes
    ----------
    directory : Path
        Contains ``superlink.toml`` (the settings below), ``clients.toml``, ``operator.sha256``,
        ``superexec.secret``, ``ledger.key``, ``ca.crt``, ``server.pem`` and ``server.key``.
    port : int
        Port for the operator and the server's own apps, always on 127.0.0.1.
    fleet_port : int
        Port for nodes.
    insecure : bool
        Whether there is no TLS and no authentication.
    app : str
        The only ServerApp that may run; it must be installed.
    modules : tuple of str
        Installed modules or packages that a run may name as ``module:Name`` on the server.
    """

    directory: Path
    port: _Count = 8000
    fleet_port: _Count = 9092
    insecure: bool = False
    app: _Words = SERVER_APP
    modules: Names = ()

    @classmethod
    def process_allowed_code(cls) -> AllowedCode:
        """Modules that a config may name, in a process that runs ServerApps.

        In a simulation these are the modules that the starting process allowed.
        """
        path = os.environ.get(SUPERLINK)
        if path is not None:
            return AllowedCode(cls.load(Path(path).parent).modules, file=Path(path).name)
        return inherited() or AllowedCode(file=_SUPERLINK_TOML)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read ``superlink.toml``."""
        return cls(directory.absolute(), **read_party(directory / _SUPERLINK_TOML, cls))

    def save(self) -> None:
        """Write ``superlink.toml``."""
        write_party(self.directory / _SUPERLINK_TOML, self)

    def services(self, state: Path, *, host: str = "127.0.0.1") -> list[Service]:
        """The SuperLink, the SuperExec of its apps, and, from Flower 1.40 on, the nodes' proxy.

        Parameters
        ----------
        state : path
            Directory of files that must outlive a restart: the SuperLink's database, and Flower's
            own files.
        host : str
            Address on which to listen for nodes; ``0.0.0.0`` if they are on other machines.

        Raises
        ------
        FedsimError
            If Flower would open its database in another place than ``state``.
        """
        if re.search("[?%]", str(state.resolve())):  # Flower makes a URL of the path
            raise FedsimError(
                f"the state directory is {state.resolve()}; it must have no '?' and no '%' in its "
                "path: Flower would keep its database in another place."
            )
        warn_of_newer_flower()
        files = self.directory
        if not self.insecure:
            read_roster(files / "clients.toml")  # a mistake in it would fail every run
        # Flower stores credentials and apps in its home, so that each party gets its own one.
        home = {"FLWR_HOME": _private(state / "flower")}
        # Always loopback: anyone who can reach the Control API could try to submit runs.
        link = ["--host", "127.0.0.1", "--port", str(self.port), "--isolation", "process"]
        link += ["--database", str(state / "superlink.db")]
        if speaks_grpc():
            link += ["--fleet-api-type", "grpc-rere"]
            link += ["--fleet-api-address", f"{host}:{self.fleet_port}"]
        secret = ["--superexec-auth-secret-file", _file(files / "superexec.secret")]
        execute = ["--runtime-api-address", f"127.0.0.1:{self.port}"]
        if self.insecure:
            command = [program("flower-superlink"), "--insecure", *link]
            execute += ["--insecure"]
        else:
            link += ["--ssl-ca-certfile", _file(files / "ca.crt"), "--enable-supernode-auth"]
            link += ["--ssl-certfile", _file(files / "server.pem")]
            link += ["--ssl-keyfile", _file(files / "server.key"), *secret]
            digest = _file(files / "operator.sha256")
            command = [*module("flower_programs", "superlink"), digest, *link]
            execute += ["--root-certificates", _file(files / "ca.crt"), *secret]
        # Passed by an environment variable, which a run cannot set: otherwise a run's config could
        # replace the mapping from keys to clients.
        roster = {CLIENTS: "" if self.insecure else str(files / "clients.toml")}
        signing = files / "ledger.key"
        keys = {LEDGER_KEY: str(signing)} if signing.is_file() else {}
        execute = [
            *module("flower_programs", "superexec"),
            "server",
            self.app,
            "0",
            *execute,
        ]
        settings = {SUPERLINK: str(files / _SUPERLINK_TOML)}
        services = [
            Service("superlink", tuple(command), home, self.port),
            Service("serverapps", tuple(execute), {**home, **roster, **keys, **settings}),
        ]
        if not speaks_grpc():
            proxy = [*module("fleet_proxy"), host, str(self.fleet_port), str(self.port)]
            proxy += [] if self.insecure else [str(files)]
            services.append(Service("fleet-proxy", tuple(proxy), {}, self.fleet_port, host))
        return services


@dataclass(frozen=True)
class Node:
    """A SuperNode, which polls the server for messages and runs one installed app on its data.

    Attributes
    ----------
    directory : Path
        Contains ``node.toml`` (the settings below, and the table ``policy`` of
        `fedsim.deploy.policy.Policy`), ``superexec.secret``, ``ca.crt`` and ``node.key``.
    superlink : str
        ``host:port`` of the server.
    client, clients : int
        This node's client id, and the number of clients.
    insecure : bool
        As for `SuperLink`.
    app : str
        The only ClientApp that may run; it must be installed.
    task_seconds : float
        Time limit of a task; 0 for no limit.
    """

    directory: Path
    superlink: _Words
    client: _Count
    clients: _Count
    insecure: bool = False
    app: _Words = CLIENT_APP
    task_seconds: Annotated[float, Ge(0)] = 3600.0

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read ``node.toml``, which the node's owner may have edited, and check its policy."""
        path = directory / "node.toml"
        node = cls(directory.absolute(), **read_party(path, cls))
        Policy.load(path)  # with a mistake in it the node would refuse every task
        return node

    def save(self, policy: Mapping[str, Any] | None = None) -> None:
        """Write ``node.toml`` with this policy, or with the default one commented out."""
        path = self.directory / "node.toml"
        policy_text = tomli_w.dumps({"policy": policy}) if policy else TEMPLATE.lstrip()
        write_party(path, self, f"\n{policy_text}")

    def services(self, state: Path, *, port: int = 9094) -> list[Service]:
        """The SuperNode and the SuperExec of its app.

        Parameters
        ----------
        state : path
            Directory for Flower's own files.
        port : int
            Port on 127.0.0.1 through which the app reaches the SuperNode.
        """
        warn_of_newer_flower()
        files, name = self.directory, f"supernode-{self.client}"
        # The node config comes from the node's owner; a run cannot change it.
        settings = f"partition-id={self.client} num-partitions={self.clients}"
        secret = ["--superexec-auth-secret-file", _file(files / "superexec.secret")]
        command = [
            *module("flower_programs", "supernode"),
            f"{poll_seconds(self.clients):g}",
        ]
        command += ["--grpc-rere"] if speaks_grpc() else []
        command += ["--superlink", self.superlink, "--isolation", "process", *secret]
        command += ["--node-config", settings, "--host", "127.0.0.1", "--port", str(port)]
        if self.insecure:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", _file(files / "ca.crt")]
            command += ["--auth-supernode-private-key", _file(files / "node.key")]
        # Insecure, since the SuperNode's own API has no TLS and is on loopback; the secret is not
        # sent but used for signing.
        execute = ["--runtime-api-address", f"127.0.0.1:{port}", "--insecure", *secret]
        limit = f"{self.task_seconds:g}"
        execute = [
            *module("flower_programs", "superexec"),
            "client",
            self.app,
            limit,
            *execute,
        ]
        home = {"FLWR_HOME": _private(state / "flower")}
        app = {NODE: str(files / "node.toml"), TASK_POLL: f"{task_poll_seconds(self.clients):g}"}
        return [
            Service(name, tuple(command), home, port),
            Service(f"{name}-app", tuple(execute), {**home, **app}),
        ]


def module(name: str, *arguments: str) -> list[str]:
    """Command that runs a module of `fedsim.deploy`."""
    # -P: do not import modules from the current directory.
    return [sys.executable, "-P", "-m", f"fedsim.deploy.{name}", *arguments]


def node_arguments(command: Sequence[str]) -> list[str] | None:
    """Arguments of `fedsim.deploy.flower_programs`, if a command runs a node's program."""
    start = module("flower_programs")
    arguments = [*command[len(start) :]]
    is_nodes = arguments[:1] == ["supernode"] or arguments[:2] == ["superexec", "client"]
    return arguments if [*command[: len(start)]] == start and is_nodes else None


def _private(directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return str(directory.absolute())


def _file(path: Path) -> str:
    """Path of a file for another process, which reports the error if the file does not exist."""
    return str(regular_files.require(path) if path.exists() else path)
