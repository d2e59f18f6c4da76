"""`fedsim deploy`: a federation's keys and files, and a rehearsal of it on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from fedsim.cli.console import Command, ConfigCommand, Output

if TYPE_CHECKING:
    from fedsim.deploy.processes import Service


deploy = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Make a federation's certificates and keys, and rehearse it on this machine.",
)

DIRECTORY = Annotated[Path, typer.Argument(help="The federation's directory.")]


@deploy.command(cls=ConfigCommand)
def init(
    directory: DIRECTORY,
    nodes: Annotated[int, typer.Option(help="How many SuperNodes get keys.")] = 2,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address of the SuperLink, for its certificate; several may be "
            "given, and the first is the one that the others use. 127.0.0.1 by default."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="The SuperLink's port for its operator, on loopback.")
    ] = 8000,
    fleet_port: Annotated[int, typer.Option(help="The SuperLink's port for SuperNodes.")] = 9092,
    days: Annotated[int, typer.Option(help="How long the server's certificate lasts.")] = 365,
    split: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG.toml",
            help="Also give each node its part of this config's data set as a file.",
        ),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            help="Where the operator will find the directory, if not here: in a container, say."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="No TLS and no authentication: for trying things out."),
    ] = False,
) -> None:
    """Make a certificate authority, the server's certificate, and a key for every node.

        fedsim deploy init fed --nodes 3 --host superlink.example.org

    Each party then gets its own directory and nothing else: `superlink/` goes to the server,
    `node-0/` ... to the nodes, `operator/` to whoever submits runs; `authority/` stays here.
    """
    from fedsim.config import RunConfig
    from fedsim.deploy.federation import Federation
    from fedsim.deploy.services import Node

    config = None if split is None else RunConfig.load(split)
    if config is not None:
        nodes = config.partition.clients
    federation = Federation.create(
        directory,
        hosts=host or ["127.0.0.1", "localhost"],
        nodes=nodes,
        days=days,
        port=port,
        fleet_port=fleet_port,
        insecure=insecure,
        home=home,
    )
    if config is not None:
        from fedsim.apps.node import write_client_data

        write_client_data(config, lambda client: federation.node(client) / "data.npz")
        for number in range(nodes):
            Node.load(federation.node(number)).save({"data": "data.npz"})
    console = Output()
    console.print(f"{directory}: a federation of {nodes} nodes around {federation.hosts[0]}.")
    if insecure:
        console.print("It is insecure: anybody can join it, listen to it and change what is sent.")
    console.print(f"`fedsim deploy up {directory}` rehearses it on this machine.")


@deploy.command(cls=Command)
def superlink(
    directory: Annotated[Path, typer.Argument(help="The server's directory, `superlink/`.")],
    host: Annotated[
        str,
        typer.Option(help="Address on which nodes are heard; 0.0.0.0 where they are elsewhere."),
    ] = "127.0.0.1",
    state: Annotated[
        Path | None,
        typer.Option(
            help="Where the SuperLink's database and the runs go, to outlive a restart. "
            "DIRECTORY/state by default."
        ),
    ] = None,
) -> None:
    """Run the server, until Ctrl-C, and start again what ends.

        fedsim deploy superlink fed/superlink --host 0.0.0.0

    Nodes reach it on the port for SuperNodes and nothing else there; the operator, who has a
    token, on this machine's loopback address (from elsewhere by `ssh -L 8000:127.0.0.1:8000`). It
    runs fedsim's own ServerApp and no other code. Artefacts go to `$FEDSIM_RUNS`, or STATE/runs.
    """
    from fedsim.deploy.services import SuperLink
    from fedsim.runs.directory import RUNS

    party = SuperLink.load(directory)
    kept = (directory / "state" if state is None else state).absolute()
    variables = {RUNS: os.environ.get(RUNS, str(kept / "runs"))}
    services = [service.among(variables) for service in party.services(kept, host=host)]
    _keep_up(services, kept, f"The SuperLink is up; nodes reach it on port {party.fleet_port}.")


@deploy.command(cls=Command)
def node(
    directory: Annotated[Path, typer.Argument(help="The node's directory, `node-0/` or so.")],
    state: Annotated[
        Path | None, typer.Option(help="Where Flower's own files go. DIRECTORY/state by default.")
    ] = None,
    port: Annotated[int, typer.Option(help="For its own app, on 127.0.0.1.")] = 9094,
) -> None:
    """Run one node, until Ctrl-C, and start again what ends.

        fedsim deploy node node-0

    It asks the server for work and trains on its own data, with the installed fedsim and no
    other code, within the limits of the table `policy` of its `node.toml`.
    """
    from fedsim.deploy.services import Node

    party = Node.load(directory)
    kept = (directory / "state" if state is None else state).absolute()
    _keep_up(party.services(kept, port=port), kept, f"Client {party.client} is up.")


@deploy.command(cls=Command)
def up(
    directory: DIRECTORY,
    state: Annotated[
        Path | None,
        typer.Option(help="Where the SuperLink's database goes, to be found there by the next."),
    ] = None,
) -> None:
    """Bring the whole federation up on this machine, until Ctrl-C.

    Every node is a process of its own, with its own key and, after `init --split`, its own
    data. When it is up, submit runs from elsewhere:

        fedsim run CONFIG.toml --set engine.name=deployment --set engine.federation=fed

    Nothing is left behind when it ends, however it ends, but logs/ and runs/.
    """
    from fedsim.deploy.federation import Federation
    from fedsim.deploy.rehearsal import Rehearsal
    from fedsim.runs.directory import RUNS

    federation = Federation.load(directory)
    console = Output()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with Rehearsal(
            federation,
            variables={RUNS: str(federation.runs)},
            logs=federation.directory / "logs",
            state=None if state is None else state.absolute(),
        ) as rehearsal:
            console.print(f"The SuperLink is up; {federation.nodes} SuperNodes are joining.")
            rehearsal.start_all()
            console.print(f"Up. Logs are in {directory}/logs, runs in {directory}/runs.")
            while True:
                rehearsal.tend()
                time.sleep(0.5)
    except KeyboardInterrupt:
        console.print("Down.")


def _keep_up(services: Sequence[Service], kept: Path, told: str) -> None:
    """Run services until Ctrl-C or SIGTERM; their output goes to ``logs`` in ``kept``."""
    from fedsim.deploy.processes import Processes, Supervisor

    console = Output()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with Processes(kept / "logs") as processes:
            supervisor = Supervisor(processes)
            for service in services:
                supervisor.start(service)
            console.print(f"{told} Logs are in {kept / 'logs'}.")
            while True:
                supervisor.tend()
                time.sleep(0.5)
    except KeyboardInterrupt:
        console.print("Down.")


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt
