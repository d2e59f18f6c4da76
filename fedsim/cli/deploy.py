"""`fedsim deploy`: make a federation's keys and files, run its processes, and rehearse it."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedsim.cli.console import Command, ConfigCommand, Output
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from fedsim.config import RunConfig
    from fedsim.deploy.processes import Processes, Service


deploy = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Make a federation's certificates and keys, run its processes, and rehearse it here.",
)

DIRECTORY = Annotated[Path, typer.Argument(help="The federation's directory.")]


@deploy.command(cls=ConfigCommand)
def init(
    directory: DIRECTORY,
    nodes: Annotated[
        int | None,
        typer.Option(help="How many SuperNodes get keys: with --split its clients, else 2."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address of the SuperLink, for its certificate; may be given several "
            "times, and nodes use the first. 127.0.0.1 by default."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="The SuperLink's port for its operator, on the loopback address.")
    ] = 8000,
    fleet_port: Annotated[int, typer.Option(help="The SuperLink's port for SuperNodes.")] = 9092,
    days: Annotated[
        int, typer.Option(help="Days for which the server's certificate is valid.")
    ] = 365,
    split: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG.toml",
            help="Also write each client's part of this config's data into its node's directory.",
        ),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            help="The directory's path where the operator uses it, if another: in a container, say."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="No TLS and no authentication, for experiments only."),
    ] = False,
) -> None:
    """Make a certificate authority, the server's certificate and a key for each node.

    For example:

        fedsim deploy init fed --nodes 3 --host superlink.example.org

    Give each party its own directory and nothing else: `superlink/` to the server, `node-0/` ...
    to the nodes, `operator/` to the operator, who submits runs. `authority/` stays here.
    """
    from fedsim.config import RunConfig
    from fedsim.deploy.federation import Federation
    from fedsim.deploy.services import Node

    config = None if split is None else RunConfig.load(split)
    if config is not None:
        if nodes not in (None, config.partition.clients):
            raise FedsimError(
                f"--nodes {nodes}, but --split {split} has {config.partition.clients} clients "
                "(partition.clients), each of which gets a node; leave --nodes out."
            )
        from fedsim.apps.node import data_to_write, write_client_data

        nodes = config.partition.clients
        data = data_to_write(config)  # a mistake in the config must not leave half a federation

    def fill(federation: Federation) -> None:
        if config is not None:
            write_client_data(config, data, lambda client: federation.node(client) / "data.npz")
            for number in range(federation.nodes):
                Node.load(federation.node(number)).save({"data": "data.npz"})

    nodes = 2 if nodes is None else nodes
    federation = Federation.create(
        directory,
        hosts=host or ["127.0.0.1", "localhost"],
        nodes=nodes,
        days=days,
        port=port,
        fleet_port=fleet_port,
        insecure=insecure,
        home=home,
        fill=fill,
    )
    console = Output()
    console.print(f"{directory}: a federation of {nodes} nodes around {federation.hosts[0]}.")
    if insecure:
        console.print("It is insecure: anyone can join it, and read and change messages.")
    if config is not None:
        _warn_of_refusal(console, config, federation.node(0) / "node.toml")
    command = f"fedsim deploy up {shlex.quote(str(directory))}"
    console.print(f"`{command}` runs all of it on this machine, to rehearse.")


def _warn_of_refusal(console: Console, config: RunConfig, node: Path) -> None:
    """Say why the nodes, which all have the policy of this file, would refuse a run."""
    from fedsim.deploy.policy import Policy

    try:
        Policy.load(node).check(config)
    except FedsimError as error:
        console.print(
            f"{error} [policy] of each node.toml says what its node allows.", markup=False
        )


@deploy.command(cls=Command)
def renew(
    directory: DIRECTORY,
    days: Annotated[int, typer.Option(help="Days for which the new certificate is valid.")] = 365,
) -> None:
    """Make a new certificate for the server, before the old one expires.

    For example:

        fedsim deploy renew fed

    It is signed by the key in `authority/`, so that nodes and operator need nothing new. Give
    `server.pem` and `server.key` of `superlink/` to the server, and restart `deploy superlink`.
    """
    from fedsim.deploy.certificates import valid_until
    from fedsim.deploy.federation import Federation

    federation = Federation.load(directory)
    federation.renew(days)
    end = valid_until(federation.superlink / "server.pem")
    Output().print(
        f"{directory}/superlink has a certificate that is valid until {end} (server.pem, "
        "server.key); the server uses it once it is restarted."
    )


@deploy.command(cls=Command)
def superlink(
    directory: Annotated[Path, typer.Argument(help="The server's directory, `superlink/`.")],
    host: Annotated[
        str,
        typer.Option(help="The address that nodes connect to; 0.0.0.0 if they are elsewhere."),
    ] = "127.0.0.1",
    state: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the SuperLink's database, for its next start too. DIRECTORY/state "
            "by default."
        ),
    ] = None,
) -> None:
    """Run the server until Ctrl-C, or until one of its processes ends.

    For example:

        fedsim deploy superlink fed/superlink --host 0.0.0.0

    Its processes are started once: if one ends, the command ends the others and says which, with
    status 1. systemd or Docker restarts the command.

    Nodes can reach only the port for SuperNodes. The operator, who has a token, uses this
    machine's loopback address (from elsewhere through `ssh -L 8000:127.0.0.1:8000`). The server
    runs fedsim's own ServerApp and no other code. It writes runs to `$FEDSIM_RUNS`, by default to
    `runs` of the federation that DIRECTORY is in; if it is in none, to STATE/runs.
    """
    from fedsim.deploy.certificates import valid_until
    from fedsim.deploy.federation import runs_of
    from fedsim.deploy.services import SuperLink
    from fedsim.runs.directory import RUNS

    party = SuperLink.load(directory)
    state = (directory / "state" if state is None else state).absolute()
    runs = os.environ.get(RUNS) or str(runs_of(directory) or state / "runs")
    variables = {RUNS: runs}
    services = [service.among(variables) for service in party.services(state, host=host)]
    message = f"The SuperLink is up; nodes reach it on port {party.fleet_port}."
    if not party.insecure:
        message += f" Its certificate is valid until {valid_until(directory / 'server.pem')}."
    message += f" Runs are in {runs}."
    _run_services(services, state / "logs", message)


@deploy.command(cls=Command)
def node(
    directory: Annotated[Path, typer.Argument(help="The node's directory, `node-0/` or so.")],
    state: Annotated[
        Path | None,
        typer.Option(help="Directory of Flower's own files; DIRECTORY/state by default."),
    ] = None,
    port: Annotated[
        int, typer.Option(help="A port on 127.0.0.1 for the node's own processes.")
    ] = 9094,
) -> None:
    """Run one node until Ctrl-C, or until one of its processes ends, as `superlink` does.

    For example:

        fedsim deploy node node-0

    A node asks the server for work and trains on its own data, with the installed fedsim and no
    other code, within the limits of the `[policy]` of its `node.toml`.
    """
    from fedsim.deploy.services import Node

    party = Node.load(directory)
    state = (directory / "state" if state is None else state).absolute()
    services = party.services(state, port=port)
    _run_services(services, state / "logs", f"Client {party.client} is up.")


@deploy.command(cls=Command)
def up(directory: DIRECTORY) -> None:
    """Run the whole federation on this machine until Ctrl-C, to rehearse it.

    Every node is a process of its own, with its own key and, after `init --split`, its own
    data. When it is up, submit runs from another terminal:

        fedsim run CONFIG.toml --set engine.name=deployment --set engine.federation=fed

    If one of its processes ends, all end, and the command says which. However it ends, only logs/
    and runs/ remain.
    """
    from fedsim.deploy.certificates import valid_until
    from fedsim.deploy.federation import Federation
    from fedsim.deploy.rehearsal import Rehearsal
    from fedsim.runs.directory import RUNS

    federation = Federation.load(directory)
    if not federation.insecure:
        valid_until(federation.superlink / "server.pem")
    console = Output()
    with (
        _until_interrupted(console),
        Rehearsal(
            federation,
            variables={RUNS: str(federation.runs)},
            logs=federation.directory / "logs",
        ) as rehearsal,
    ):
        console.print(f"The SuperLink is up; {federation.nodes} SuperNodes are joining.")
        rehearsal.start_all()
        console.print(f"Up. Logs are in {directory}/logs, runs in {directory}/runs.")
        _watch(rehearsal)


def _run_services(services: Sequence[Service], logs: Path, message: str) -> None:
    """Run services until Ctrl-C, SIGTERM or the end of one; their output goes to ``logs``."""
    from fedsim.deploy.processes import Processes

    console = Output()
    with _until_interrupted(console), Processes(logs) as processes:
        for service in services:
            processes.start_service(service)
        console.print(f"{message} Logs are in {logs}.")
        _watch(processes)


def _watch(processes: Processes) -> None:
    while True:
        processes.check()
        time.sleep(0.5)


@contextmanager
def _until_interrupted(console: Console) -> Iterator[None]:
    """Shut down cleanly on Ctrl-C and SIGTERM, which is no failure for these commands."""
    # `fedsim.cli.boundary` turns SIGTERM into a KeyboardInterrupt.
    with suppress(KeyboardInterrupt):
        yield
    console.print("Down.")
