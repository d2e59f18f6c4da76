"""A federation on disk: the files of each party, and the commands that they run.

::

    DIR/federation.toml     host names, ports, number of nodes
    DIR/authority/          ca.key, ca.crt: stays with whoever lets nodes in
    DIR/superlink/          ca.crt, server.pem, server.key
    DIR/node-0/ ...         ca.crt, node.key: one directory for each SuperNode
    DIR/operator/           ca.crt, config.toml, node-0.pub ...: a FLWR_HOME, for whoever lets
                            nodes in and submits runs
    DIR/runs/               what runs leave, on the SuperLink's machine
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tomli_w

from fedsim.deploy.certificates import Authority, node_key, write_private, write_public
from fedsim.deploy.processes import program
from fedsim.deploy.roster import CLIENTS, write_roster
from fedsim.engines.directory import key_digest
from fedsim.engines.messages import speaks_grpc
from fedsim.errors import FedsimError

__all__ = ["CONNECTION", "Federation"]

CONNECTION = "federation"
"""What the SuperLink is called in the operator's Flower configuration."""


@dataclass(frozen=True)
class Federation:
    """Where a federation's files are, and how its parties reach each other.

    Attributes
    ----------
    directory : Path
    hosts : tuple of str
        Names and addresses of the SuperLink, all in its certificate; the first is the one
        that the nodes and the operator use.
    nodes : int
        Number of SuperNodes that have keys.
    port, fleet_port : int
        Of the SuperLink: for the operator and its own apps, and for SuperNodes that speak
        gRPC. Newer ones use the first.
    insecure : bool
        No TLS and no authentication, where somebody has asked for that.
    """

    directory: Path
    hosts: tuple[str, ...]
    nodes: int
    port: int = 8000
    fleet_port: int = 9092
    insecure: bool = False

    @classmethod
    def create(
        cls,
        directory: Path,
        *,
        hosts: Sequence[str] = ("127.0.0.1", "localhost"),
        nodes: int = 2,
        days: int = 365,
        port: int = 8000,
        fleet_port: int = 9092,
        insecure: bool = False,
        home: Path | None = None,
    ) -> Federation:
        """Make the authority, the certificate, the nodes' keys, and everybody's files.

        Parameters
        ----------
        hosts, nodes, port, fleet_port, insecure
            As for the class.
        days : int
            Until the server's certificate expires.
        home : path, optional
            Where the operator will find this directory, if not here: in a container, say.

        Raises
        ------
        FedsimError
            If the directory holds a federation already, or there is nobody to make it for.
        """
        if (directory / "federation.toml").exists():
            raise FedsimError(f"{directory} already holds a federation; choose another directory.")
        if nodes < 1:
            raise FedsimError(f"--nodes is {nodes}; it must be at least 1.")
        if not hosts:
            raise FedsimError("--host is missing; the server's certificate needs a name.")
        made = cls(directory.absolute(), tuple(hosts), nodes, port, fleet_port, insecure)
        directory.mkdir(parents=True, exist_ok=True)
        made.directory.chmod(0o700)
        if not insecure:
            made._make_certificates(days)
        roster = {made._make_node(node): node for node in range(nodes if not insecure else 0)}
        write_roster(made.roster, roster)
        connection = made._connection((home or made.directory) / "operator")
        write_public(made.operator / "config.toml", connection.encode())
        made.runs.mkdir()
        description = {k: v for k, v in asdict(made).items() if k != "directory"}
        content = tomli_w.dumps({**description, "hosts": list(hosts)})
        write_public(directory / "federation.toml", content.encode())
        return made

    @classmethod
    def load(cls, directory: Path) -> Federation:
        """Read what `create` wrote.

        Raises
        ------
        FedsimError
            If there is no federation.
        """
        try:
            tree = tomllib.loads((directory / "federation.toml").read_text(encoding="utf-8"))
        except OSError:
            raise FedsimError(
                f"{directory} holds no federation; make one with `fedsim deploy init`."
            ) from None
        return cls(directory.absolute(), **{**tree, "hosts": tuple(tree["hosts"])})

    @property
    def operator(self) -> Path:
        """FLWR_HOME of whoever submits runs."""
        return self.directory / "operator"

    @property
    def runs(self) -> Path:
        """Where the ServerApp writes, when this machine is the SuperLink's."""
        return self.directory / "runs"

    @property
    def roster(self) -> Path:
        """Which key is which client."""
        return self.directory / "superlink" / "clients.toml"

    def node(self, number: int) -> Path:
        """Directory of one SuperNode."""
        return self.directory / f"node-{number}"

    def public_key(self, node: int) -> Path:
        """The key by which the SuperLink knows a node."""
        return self.operator / f"node-{node}.pub"

    def issue(self, days: int = 365) -> None:
        """Make a new certificate for the SuperLink."""
        authority = Authority.load(self.directory / "authority")
        # The SuperLink's own apps reach it on loopback.
        names = dict.fromkeys([*self.hosts, "127.0.0.1", "localhost"])
        certificate, key = authority.issue(list(names), days)
        write_public(self.directory / "superlink" / "server.pem", certificate)
        write_private(self.directory / "superlink" / "server.key", key)

    def superlink_command(self, *, host: str = "127.0.0.1", database: str = "") -> list[str]:
        """Command of the SuperLink.

        Parameters
        ----------
        host : str
            Address to listen on; ``0.0.0.0`` where nodes are elsewhere.
        database : path, optional
            Keeps the SuperLink's state over a restart; in memory by default.
        """
        command = [program("flower-superlink"), "--host", host, "--port", str(self.port)]
        if speaks_grpc():
            command += ["--fleet-api-type", "grpc-rere"]
            command += ["--fleet-api-address", f"{host}:{self.fleet_port}"]
        if self.insecure:
            command += ["--insecure"]
        else:
            files = self.directory / "superlink"
            command += ["--ssl-ca-certfile", str(files / "ca.crt")]
            command += ["--ssl-certfile", str(files / "server.pem")]
            command += ["--ssl-keyfile", str(files / "server.key"), "--enable-supernode-auth"]
        if database:
            command += ["--database", database]
        return [*command, "--disable-runtime-dependency-installation"]

    def supernode_command(
        self,
        node: int,
        *,
        client: int | None = None,
        port: int = 9094,
        config: Mapping[str, str | int] | None = None,
    ) -> list[str]:
        """Command of one SuperNode.

        Parameters
        ----------
        node : int
            Whose key it uses.
        client : int, optional
            Which client it is; its own number by default.
        port : int
            On which its apps reach it, on its own machine.
        config : mapping, optional
            Further node config, such as ``data``: a path to the client's own examples.
        """
        settings: dict[str, str | int] = {
            "partition-id": node if client is None else client,
            "num-partitions": self.nodes,
            **(config or {}),
        }
        if (self.node(node) / "data.npz").exists():
            settings.setdefault("data", str(self.node(node) / "data.npz"))
        command = [program("flower-supernode")]
        if speaks_grpc():
            command += ["--grpc-rere"]
        command += ["--superlink", f"{self.hosts[0]}:{self.nodes_port}"]
        if self.insecure:
            command += ["--insecure"]
        else:
            files = self.node(node)
            command += ["--root-certificates", str(files / "ca.crt")]
            command += ["--auth-supernode-private-key", str(files / "node.key")]
        written = " ".join(f"{key}={_toml(value)}" for key, value in settings.items())
        return [*command, "--node-config", written, "--host", "127.0.0.1", "--port", str(port)]

    @property
    def superlink_variables(self) -> dict[str, str]:
        """Environment of the SuperLink: where its ServerApps find whose key is which client's."""
        return {CLIENTS: "" if self.insecure else str(self.roster)}

    @property
    def nodes_port(self) -> int:
        """The SuperLink's port for SuperNodes."""
        return self.fleet_port if speaks_grpc() else self.port

    def _make_certificates(self, days: int) -> None:
        authority = Authority.create(days=max(days, 3650))
        authority.save(self.directory / "authority")
        certificate = (self.directory / "authority" / "ca.crt").read_bytes()
        for party in (self.directory / "superlink", self.operator):
            write_public(party / "ca.crt", certificate)
        self.issue(days)

    def _make_node(self, node: int) -> str:
        """Make a node's files; the digest of its key."""
        private, public = node_key()
        write_private(self.node(node) / "node.key", private)
        write_public(self.public_key(node), public)
        authority = self.directory / "authority" / "ca.crt"
        write_public(self.node(node) / "ca.crt", authority.read_bytes())
        digest = key_digest(public)
        assert digest is not None
        return digest

    def _connection(self, operator: Path) -> str:
        link: dict[str, str | bool] = {"address": f"{self.hosts[0]}:{self.port}"}
        if self.insecure:
            link["insecure"] = True
        else:
            link["root-certificates"] = str(operator / "ca.crt")
        return tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: link}})


def _toml(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
