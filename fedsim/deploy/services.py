"""What each party of a federation runs: the server, and each node, from its own directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import tomli_w

from fedsim import regular_files
from fedsim.allowed_code import AllowedCode, inherited
from fedsim.deploy.bundle import CLIENT_APP, SERVER_APP
from fedsim.deploy.flower_programs import poll_seconds
from fedsim.deploy.flower_replacements import speaks_grpc, warn_of_newer_flower
from fedsim.deploy.party_files import Names, read_party, write_party
from fedsim.deploy.policy import NODE
from fedsim.deploy.processes import Service, program
from fedsim.privacy.manifest import LEDGER_KEY
from fedsim.settings import Constraint, Ge

SUPERLINK = "FEDSIM_SUPERLINK"
"""Environment variable: where a ServerApp finds its server's ``superlink.toml``."""

CLIENTS = "FEDSIM_CLIENTS"
"""Environment variable: where a ServerApp finds its roster, a file on the operator's side that says
which registered key is which client, and that no node can change; empty where nodes have no keys.
"""

_SUPERLINK_TOML = "superlink.toml"

_POLICY = """
# [policy]
# data = "data.npz"                     # this client's own examples, from this directory
# state-dir = "state"                   # where its ledger and its state are
# modules = []                          # what a run may name as module:Name
# files = []                            # directories from which a run may name files
# least-noise-multiplier = 0.0          # of the updates' release
# least-share-noise-multiplier = 0.0    # of this node's own share of that noise, over the bound
# largest-clip-norm = inf               # of updates
# least-example-noise-multiplier = 0.0  # of this client's own releases
# largest-epsilon = inf                 # of this client's own ledger, at example level
# delta = 1e-5                          # at which that epsilon is computed
# least-population = 1                  # clients that the run declares
# most-rounds = 0                       # rounds that it joins, over all runs; 0: any number
# evaluation = true                     # whether metrics leave the node; false where a floor is set
# secure-aggregation = false            # whether shares leave under masks alone, in sums
"""
"""The table `policy` of a new ``node.toml``, in comments, every key at its default."""


_Count = Annotated[int, Ge(0)]
_Words = Annotated[str, Constraint(bool, "a string that is not empty")]


@dataclass(frozen=True)
class SuperLink:
    """The server: it answers its operator on loopback, and nodes on a port of their own.

    Attributes
    ----------
    directory : Path
        With ``superlink.toml`` (the settings below), ``clients.toml``, ``operator.sha256``,
        ``superexec.secret``, ``ledger.key``, ``ca.crt``, ``server.pem`` and ``server.key``.
    port : int
        For the operator and the server's own apps, on 127.0.0.1 whatever the host.
    fleet_port : int
        For nodes.
    insecure : bool
        No TLS and no authentication; only where it is asked for.
    app : str
        The installed ServerApp that is run, and no other.
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
    def code_here(cls) -> AllowedCode:
        """What configs may name where this process runs ServerApps; its own where it simulates."""
        path = os.environ.get(SUPERLINK)
        if path is not None:
            return AllowedCode(cls.load(Path(path).parent).modules, file=Path(path).name)
        return inherited() or AllowedCode(file=_SUPERLINK_TOML)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read what `save` wrote."""
        return cls(directory.absolute(), **read_party(directory / _SUPERLINK_TOML, cls))

    def save(self) -> None:
        """Write the settings."""
        write_party(self.directory / _SUPERLINK_TOML, self)

    def services(self, state: Path, *, host: str = "127.0.0.1") -> list[Service]:
        """The SuperLink, the SuperExec of its apps, and, from Flower 1.40 on, the nodes' proxy.

        Parameters
        ----------
        state : path
            What must outlive a restart: the SuperLink's database, and Flower's own files.
        host : str
            Address on which nodes are heard; ``0.0.0.0`` where they are elsewhere.
        """
        warn_of_newer_flower()
        files = self.directory
        # Flower keeps credentials and apps in its home: each party has its own, and not the user's.
        home = {"FLWR_HOME": _private(state / "flower")}
        # Loopback, whatever the host: who reaches the Control API could submit runs.
        link = ["--host", "127.0.0.1", "--port", str(self.port), "--isolation", "process"]
        link += ["--database", str(state / "superlink.db")]
        link += ["--disable-runtime-dependency-installation"]
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
            command = [*_module("flower_programs", "superlink"), digest, *link]
            execute += ["--root-certificates", _file(files / "ca.crt"), *secret]
        # By an environment variable, which no run can set: a node's key decides which client it is.
        roster = {CLIENTS: "" if self.insecure else str(files / "clients.toml")}
        signing = files / "ledger.key"
        keys = {LEDGER_KEY: str(signing)} if signing.is_file() else {}
        execute = [*_module("flower_programs", "superexec"), "server", self.app, "0", *execute]
        settings = {SUPERLINK: str(files / _SUPERLINK_TOML)}
        services = [
            Service("superlink", tuple(command), home, self.port),
            Service("serverapps", tuple(execute), {**home, **roster, **keys, **settings}),
        ]
        if not speaks_grpc():
            proxy = [*_module("fleet_proxy"), host, str(self.fleet_port), str(self.port)]
            proxy += [] if self.insecure else [str(files)]
            services.append(Service("fleet-proxy", tuple(proxy), {}, self.fleet_port))
        return services


@dataclass(frozen=True)
class Node:
    """A SuperNode: it asks the server for work, and runs one installed app on its own data.

    Attributes
    ----------
    directory : Path
        With ``node.toml`` (the settings below, and the table ``policy`` of
        `fedsim.deploy.policy.Policy`), ``superexec.secret``, ``ca.crt`` and ``node.key``.
    superlink : str
        ``host:port`` of the server.
    client, clients : int
        Which client it is, and of how many.
    insecure : bool
        As for `SuperLink`.
    app : str
        The installed ClientApp that is run, and no other.
    task_seconds : float
        A task that takes longer is ended; 0 for no limit.
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
        """Read what `save` wrote, or the node's owner has edited."""
        return cls(directory.absolute(), **read_party(directory / "node.toml", cls))

    def save(self, policy: Mapping[str, Any] | None = None) -> None:
        """Write the settings, and beside them the policy, or what it may say."""
        path = self.directory / "node.toml"
        written = tomli_w.dumps({"policy": policy}) if policy else _POLICY.lstrip()
        write_party(path, self, f"\n{written}")

    def services(self, state: Path, *, port: int = 9094) -> list[Service]:
        """The SuperNode and the SuperExec of its app.

        Parameters
        ----------
        state : path
            Flower's own files.
        port : int
            On which its app reaches it, on 127.0.0.1.
        """
        warn_of_newer_flower()
        files, name = self.directory, f"supernode-{self.client}"
        # A node's own settings are its owner's; no run can change them.
        settings = f"partition-id={self.client} num-partitions={self.clients}"
        secret = ["--superexec-auth-secret-file", _file(files / "superexec.secret")]
        command = [*_module("flower_programs", "supernode"), f"{poll_seconds(self.clients):g}"]
        command += ["--grpc-rere"] if speaks_grpc() else []
        command += ["--superlink", self.superlink, "--isolation", "process", *secret]
        command += ["--node-config", settings, "--host", "127.0.0.1", "--port", str(port)]
        if self.insecure:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", _file(files / "ca.crt")]
            command += ["--auth-supernode-private-key", _file(files / "node.key")]
        # The SuperNode's own API is plaintext on loopback; the secret is never sent, it signs.
        execute = ["--runtime-api-address", f"127.0.0.1:{port}", "--insecure", *secret]
        limit = f"{self.task_seconds:g}"
        execute = [*_module("flower_programs", "superexec"), "client", self.app, limit, *execute]
        home = {"FLWR_HOME": _private(state / "flower")}
        return [
            Service(name, tuple(command), home, port),
            Service(f"{name}-app", tuple(execute), {**home, NODE: str(files / "node.toml")}),
        ]


def _module(name: str, *arguments: str) -> list[str]:
    # -P: what lies in the current directory is no module.
    return [sys.executable, "-P", "-m", f"fedsim.deploy.{name}", *arguments]


def _private(directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return str(directory.absolute())


def _file(path: Path) -> str:
    """A file that another process opens; one that lacks is that process's to name."""
    return str(regular_files.require(path) if path.exists() else path)
