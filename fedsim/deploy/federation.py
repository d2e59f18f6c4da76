"""A federation's directory, with the files of each party.

::

    DIR/federation.toml     host names, ports, number of nodes
    DIR/authority/          ca.key, ca.crt: stays with the operator, who registers nodes
    DIR/superlink/          for the server: superlink.toml, its certificate and key, clients.toml
                            (the client id of each registered key), the operator token's digest
    DIR/node-0/ ...         one for each SuperNode: node.toml (with its policy), ca.crt, node.key
    DIR/operator/           a FLWR_HOME, to register nodes and submit runs: ca.crt,
                            config.toml, credentials.yaml (the operator's token), node-0.pub ...
    DIR/runs/               artefacts of runs, on the SuperLink's machine
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
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
"""Name of the SuperLink in the operator's Flower configuration."""

_FEDERATION_TOML = "federation.toml"


@dataclass(frozen=True)
class Federation:
    """A federation's directory, and the addresses of its parties.

    Attributes
    ----------
    directory : Path
    hosts : tuple of str
        Names and addresses of the SuperLink, all in its certificate; nodes use the first.
    nodes : int
        Number of SuperNodes that have keys.
    port, fleet_port : int
        Ports of the SuperLink: on loopback for the operator and the server's apps, and for nodes.
    insecure : bool
        Whether there is no TLS and no authentication.
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
        fill: Callable[[Federation], None] = lambda federation: None,
    ) -> Federation:
        """Create the authority, the certificate, the nodes' keys, and the files of all parties.

        Parameters
        ----------
        hosts, nodes, port, fleet_port, insecure
            As for the class.
        days : int
            Days until the server's certificate expires.
        home : path, optional
            Path of this directory as the operator will see it, for example in a container.
        fill : callable
            Writes further files into the parties' directories, once these are complete.

        Raises
        ------
        FedsimError
            If an argument is not allowed, or the directory already contains a federation or a file
            that a federation would write to.
        OSError
            If a file cannot be written. In both cases nothing of a federation is left.
        """
        federation = cls(directory.absolute(), tuple(hosts), nodes, port, fleet_port, insecure)
        federation._check_settings(days)
        federation._check_free()
        is_new = not directory.exists()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            federation.directory.chmod(0o700)
            federation._make_parties(days, (home or federation.directory) / "operator")
            fill(federation)
            write_party(directory / _FEDERATION_TOML, federation)
        except BaseException:
            for path in federation._folders():  # `_check_free` has seen that none existed
                shutil.rmtree(path, ignore_errors=True)
            if is_new:
                with suppress(OSError):
                    directory.rmdir()
            raise
        return federation

    @classmethod
    def load(cls, directory: Path) -> Federation:
        """Load a federation that `create` wrote.

        Raises
        ------
        FedsimError
            If the directory holds no federation.
        """
        if not (directory / _FEDERATION_TOML).is_file():
            raise FedsimError(
                f"{directory} contains no federation; make one with `fedsim deploy init`."
            )
        return cls(directory.absolute(), **read_party(directory / _FEDERATION_TOML, cls))

    @property
    def operator(self) -> Path:
        """The operator's FLWR_HOME, for submitting runs."""
        return self.directory / "operator"

    @property
    def runs(self) -> Path:
        """Directory of runs' artefacts, if this machine runs the SuperLink."""
        return self.directory / "runs"

    @property
    def superlink(self) -> Path:
        """The server's directory."""
        return self.directory / "superlink"

    @property
    def roster(self) -> Path:
        """File with the client id of each registered key."""
        return self.superlink / "clients.toml"

    def node(self, number: int) -> Path:
        """The directory of one SuperNode."""
        return self.directory / f"node-{number}"

    def public_key(self, node: int) -> Path:
        """File with a node's public key, to register at the SuperLink."""
        return self.operator / f"node-{node}.pub"

    def renew(self, days: int = 365) -> None:
        """Issue a new certificate for the SuperLink, which nodes and operator trust at once.

        Raises
        ------
        FedsimError
            If ``days`` is not allowed, or the federation has no authority here.
        """
        self._check_settings(days)
        if not (self.directory / "authority").is_dir():
            raise FedsimError(
                f"{self.directory} has no 'authority', which signs certificates: it is insecure, "
                "or its authority is elsewhere."
            )
        self.issue(days)

    def issue(self, days: int = 365) -> None:
        """Issue a new certificate for the SuperLink."""
        authority = Authority.load(self.directory / "authority")
        # Also for loopback, on which the server's own apps connect.
        names = dict.fromkeys([*self.hosts, "127.0.0.1", "localhost"])
        certificate, key = authority.issue(list(names), days)
        write_public(self.superlink / "server.pem", certificate)
        write_private(self.superlink / "server.key", key)

    def _check_settings(self, days: int) -> None:
        """Refuse values that no certificate or process could use."""
        if self.nodes < 1:
            raise FedsimError(f"--nodes is {self.nodes}; it must be at least 1.")
        if not self.hosts:
            raise FedsimError("--host is missing; the server's certificate needs a name.")
        for host in self.hosts:
            if not _is_host(host):
                raise FedsimError(
                    f"--host is {host!r}; it must be an IP address, or a name of letters a to z, "
                    "digits, '-', '_' and '.', without a port."
                )
        for flag, value, limit in (
            ("--port", self.port, 65535),
            ("--fleet-port", self.fleet_port, 65535),
            ("--days", days, 36500),
        ):
            if not 1 <= value <= limit:
                raise FedsimError(f"{flag} is {value}; it must be from 1 to {limit}.")
        if self.port == self.fleet_port:
            raise FedsimError(f"--port and --fleet-port are both {self.port}; they must differ.")

    def _check_free(self) -> None:
        """Refuse a directory that contains anything that a federation would overwrite."""
        directory = self.directory
        try:
            str(directory).encode()
        except UnicodeEncodeError:  # TOML files, which are in UTF-8, could not contain it
            raise FedsimError(f"the path {str(directory)!r} is not valid UTF-8.") from None
        if directory.exists() and not directory.is_dir():
            raise FedsimError(f"{directory} is a file; a federation is a directory.")
        if (directory / _FEDERATION_TOML).exists():
            raise FedsimError(
                f"{directory} already contains a federation; choose another directory."
            )
        for path in self._folders():
            if os.path.lexists(path):
                raise FedsimError(
                    f"{directory} contains '{path.name}', which a federation would write to; "
                    "choose another directory."
                )

    def _folders(self) -> list[Path]:
        """All directories in a federation's directory."""
        folders = [self.directory / "authority", self.superlink, self.operator, self.runs]
        return [*folders, *map(self.node, range(self.nodes))]

    def _make_parties(self, days: int, operator: Path) -> None:
        """Write all files of the parties; ``operator`` is the path of the operator's when used."""
        nodes = range(self.nodes)
        if not self.insecure:
            self._make_certificates(days)
        SuperLink(self.superlink, self.port, self.fleet_port, self.insecure).save()
        write_private(self.superlink / "superexec.secret", secrets.token_hex(32).encode())
        ledger_key, ledger_public = key_pair()
        write_private(self.superlink / "ledger.key", ledger_key)
        roster = {} if self.insecure else {self._make_key(node): node for node in nodes}
        write_roster(self.roster, roster)
        for node in nodes:
            self._make_node(node)
        self._make_operator(operator)
        write_public(self.operator / "ledger.pub", ledger_public)
        self.runs.mkdir()
        for party in (self.superlink, *map(self.node, nodes)):
            (party / "state").mkdir(mode=0o700)

    def _make_certificates(self, days: int) -> None:
        authority = Authority.create(days=max(days + 1, 3650))
        authority.save(self.directory / "authority")
        certificate = regular_files.read_bytes(self.directory / "authority" / "ca.crt")
        for party in (self.superlink, self.operator):
            write_public(party / "ca.crt", certificate)
        self.issue(days)

    def _make_key(self, node: int) -> str:
        """Generate a node's key pair; return the public key's digest."""
        private, public = node_key()
        write_private(self.node(node) / "node.key", private)
        write_public(self.public_key(node), public)
        digest = key_digest(public)
        assert digest is not None
        return digest

    def _make_node(self, node: int) -> None:
        """Write a node's other files: its secret, the authority's certificate, and node.toml."""
        files = self.node(node)
        write_private(files / "superexec.secret", secrets.token_hex(32).encode())
        if not self.insecure:
            authority = self.directory / "authority" / "ca.crt"
            write_public(files / "ca.crt", regular_files.read_bytes(authority))
        address = f"{self.hosts[0]}:{self.fleet_port}"
        Node(files, address, node, self.nodes, self.insecure).save()

    def _make_operator(self, operator: Path) -> None:
        """Write the operator's FLWR_HOME, whose path will be ``operator`` when it is used."""
        # Always loopback: an operator elsewhere uses a tunnel to the SuperLink's machine.
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


def runs_of(superlink: Path) -> Path | None:
    """Directory of runs of the federation that a server's directory is in; None if in none."""
    directory = superlink.absolute().parent
    is_federation = (directory / _FEDERATION_TOML).is_file()
    return Federation.load(directory).runs if is_federation else None


def _is_host(host: str) -> bool:
    """Whether this is an IP address, or could be the name of a host."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_.-]{1,253}", host) is not None
    return True
