"""A federation on disk: the files of each party.

::

    DIR/federation.toml     host names, ports, number of nodes
    DIR/authority/          ca.key, ca.crt: stays with the operator who lets nodes in
    DIR/superlink/          for the server: superlink.toml, its certificate and key, clients.toml
                            (whose key is which client's), what it knows of the operator's token
    DIR/node-0/ ...         one for each SuperNode: node.toml (with its policy), ca.crt, node.key
    DIR/operator/           a FLWR_HOME, to let nodes in and submit runs: ca.crt,
                            config.toml, credentials.yaml (the operator's token), node-0.pub ...
    DIR/runs/               what runs leave, on the SuperLink's machine
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tomli_w

from fedsim import regular_files
from fedsim.deploy.certificates import Authority, node_key, write_private, write_public
from fedsim.deploy.flower_programs import credentials, new_token, token_digest
from fedsim.deploy.party_files import Names, read_party, write_party, write_roster
from fedsim.deploy.services import Node, SuperLink
from fedsim.errors import FedsimError
from fedsim.federation.engines.directory import key_digest
from fedsim.privacy.manifest import key_pair
from fedsim.settings import Ge

CONNECTION = "federation"
"""What the SuperLink is called in the operator's Flower configuration."""

_FEDERATION_TOML = "federation.toml"


@dataclass(frozen=True)
class Federation:
    """Where a federation's files are, and how its parties reach each other.

    Attributes
    ----------
    directory : Path
    hosts : tuple of str
        Names and addresses of the SuperLink, all in its certificate; the first is the one
        that the nodes use.
    nodes : int
        Number of SuperNodes that have keys.
    port, fleet_port : int
        Of the SuperLink: for the operator and its own apps, on its loopback address, and for
        SuperNodes.
    insecure : bool
        No TLS and no authentication; only where it is asked for.
    """

    directory: Path
    hosts: Names
    nodes: Annotated[int, Ge(1)]
    port: Annotated[int, Ge(0)] = 8000
    fleet_port: Annotated[int, Ge(0)] = 9092
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
            If the directory holds a federation already, or no node or host is given.
        """
        if directory.exists() and not directory.is_dir():
            raise FedsimError(f"{directory} is a file; a federation is a directory.")
        if (directory / _FEDERATION_TOML).exists():
            raise FedsimError(f"{directory} already holds a federation; choose another directory.")
        if nodes < 1:
            raise FedsimError(f"--nodes is {nodes}; it must be at least 1.")
        if not hosts:
            raise FedsimError("--host is missing; the server's certificate needs a name.")
        federation = cls(directory.absolute(), tuple(hosts), nodes, port, fleet_port, insecure)
        directory.mkdir(parents=True, exist_ok=True)
        federation.directory.chmod(0o700)
        if not insecure:
            federation._make_certificates(days)
        SuperLink(federation.superlink, port, fleet_port, insecure).save()
        write_private(federation.superlink / "superexec.secret", secrets.token_hex(32).encode())
        ledger_key, ledger_public = key_pair()
        write_private(federation.superlink / "ledger.key", ledger_key)
        roster = {federation._make_key(node): node for node in range(0 if insecure else nodes)}
        write_roster(federation.roster, roster)
        for node in range(nodes):
            federation._make_node(node)
        federation._make_operator((home or federation.directory) / "operator")
        write_public(federation.operator / "ledger.pub", ledger_public)
        federation.runs.mkdir()
        for party in (federation.superlink, *(federation.node(node) for node in range(nodes))):
            (party / "state").mkdir(mode=0o700)
        write_party(directory / _FEDERATION_TOML, federation)
        return federation

    @classmethod
    def load(cls, directory: Path) -> Federation:
        """Read what `create` wrote.

        Raises
        ------
        FedsimError
            If there is no federation.
        """
        if not (directory / _FEDERATION_TOML).is_file():
            raise FedsimError(
                f"{directory} holds no federation; make one with `fedsim deploy init`."
            )
        return cls(directory.absolute(), **read_party(directory / _FEDERATION_TOML, cls))

    @property
    def operator(self) -> Path:
        """FLWR_HOME with which runs are submitted."""
        return self.directory / "operator"

    @property
    def runs(self) -> Path:
        """Where the ServerApp writes, when this machine is the SuperLink's."""
        return self.directory / "runs"

    @property
    def superlink(self) -> Path:
        """Directory of the server."""
        return self.directory / "superlink"

    @property
    def roster(self) -> Path:
        """Which key is which client."""
        return self.superlink / "clients.toml"

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
        write_public(self.superlink / "server.pem", certificate)
        write_private(self.superlink / "server.key", key)

    def _make_certificates(self, days: int) -> None:
        authority = Authority.create(days=max(days, 3650))
        authority.save(self.directory / "authority")
        certificate = regular_files.read_bytes(self.directory / "authority" / "ca.crt")
        for party in (self.superlink, self.operator):
            write_public(party / "ca.crt", certificate)
        self.issue(days)

    def _make_key(self, node: int) -> str:
        """Make a node's key; its digest."""
        private, public = node_key()
        write_private(self.node(node) / "node.key", private)
        write_public(self.public_key(node), public)
        digest = key_digest(public)
        assert digest is not None
        return digest

    def _make_node(self, node: int) -> None:
        """Make the rest of what a node needs."""
        files = self.node(node)
        write_private(files / "superexec.secret", secrets.token_hex(32).encode())
        if not self.insecure:
            authority = self.directory / "authority" / "ca.crt"
            write_public(files / "ca.crt", regular_files.read_bytes(authority))
        address = f"{self.hosts[0]}:{self.fleet_port}"
        Node(files, address, node, self.nodes, self.insecure).save()

    def _make_operator(self, operator: Path) -> None:
        """Make a FLWR_HOME that will be found at ``operator``."""
        # Wherever the operator is: from elsewhere through a tunnel to the SuperLink's machine.
        address = f"127.0.0.1:{self.port}"
        link: dict[str, str | bool] = {"address": address}
        if self.insecure:
            link["insecure"] = True
        else:
            link["root-certificates"] = str(operator / "ca.crt")
            token = new_token()
            write_private(self.operator / "credentials.yaml", credentials(token, address))
            write_public(self.superlink / "operator.sha256", token_digest(token).encode())
        connection = tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: link}})
        write_public(self.operator / "config.toml", connection.encode())
