"""`fedsim app`: run any Flower app in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]


def app(
    directory: Annotated[Path, typer.Argument(help="A Flower app: it has a pyproject.toml.")],
    nodes: Annotated[int, typer.Option(min=1, help="How many clients there are.")] = 10,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the app's config."),
    ] = None,
) -> None:
    """Run a Flower app as it is, in this process: no SuperLink, no Ray, nothing serialised.

        fedsim app examples/plugin --nodes 4 --set num-server-rounds=3

    The app's ServerApp, ClientApp and `[tool.flwr.app.config]` are those that `flwr run` would
    use, and client i is told its `partition-id` and `num-partitions` as there. Clients run one
    after another. The app's dependencies must be installed.
    """
    from fedsim.apps.user_app import FlowerApp, run_app

    run_app(FlowerApp.load(directory, set_ or []), nodes)
