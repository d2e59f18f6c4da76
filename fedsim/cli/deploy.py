"""`fedsim deploy`: a federation's keys and files, and a rehearsal of it on this machine."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from fedsim.cli.command import Command

__all__ = ["deploy"]

deploy = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Make a federation's certificates and keys, and rehearse it on this machine.",
)

DIRECTORY = Annotated[Path, typer.Argument(help="The federation's directory.")]


@deploy.command(cls=Command)
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
    port: Annotated[int, typer.Option(help="The SuperLink's port.")] = 8000,
    fleet_port: Annotated[
        int, typer.Option(help="The SuperLink's port for SuperNodes that speak gRPC.")
    ] = 9092,
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
        from fedsim.apps.split import split_data

        split_data(config, lambda client: federation.node(client) / "data.npz")
    console = Console()
    console.print(f"{directory}: a federation of {nodes} nodes around {federation.hosts[0]}.")
    if insecure:
        console.print("It is insecure: anybody can join it, listen to it and change what is sent.")
    console.print(f"`fedsim deploy up {directory}` rehearses it on this machine.")


@deploy.command(cls=Command)
def up(
    directory: DIRECTORY,
    database: Annotated[
        Path | None, typer.Option(help="Keeps the SuperLink's state over a restart.")
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
    from fedsim.runs.artefacts import RUNS

    federation = Federation.load(directory)
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with Rehearsal(
            federation,
            variables={RUNS: str(federation.runs)},
            logs=federation.directory / "logs",
            database="" if database is None else str(database.absolute()),
        ) as rehearsal:
            console.print(f"The SuperLink is up; {federation.nodes} SuperNodes are joining.")
            rehearsal.start_all()
            console.print(f"Up. Logs are in {directory}/logs, runs in {directory}/runs.")
            while True:
                rehearsal.tend()
                time.sleep(0.5)
    except KeyboardInterrupt:
        console.print("Down.")


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt
