"""Load a user's Flower app (its ServerApp, ClientApp and config) and run it in this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedsim import regular_files
from fedsim.config.values import read_value
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError

Scalar = bool | int | float | str

_SERVER_NODE_ID = 0


@dataclass(frozen=True)
class FlowerApp:
    """A Flower app loaded from a directory.

    Attributes
    ----------
    server : ServerApp
    client : ClientApp
    run_config : mapping of str to bool, int, float or str
        ``[tool.flwr.app.config]``, flattened with dots, with overrides applied.
    """

    server: ServerApp
    client: ClientApp
    run_config: Mapping[str, Scalar]

    @classmethod
    def load(cls, directory: Path, overrides: Iterable[str] = ()) -> FlowerApp:
        """Import the components that the directory's pyproject.toml names.

        The directory is put first on the import path, as Flower does with an installed app.

        Parameters
        ----------
        overrides : iterable of ``key=value``
            Overrides of keys in the app's config, as with Flower's ``--run-config``.

        Raises
        ------
        FedsimError
            If it is no Flower app, a component cannot be found, or an override has an unknown key.
        """
        table = _app_table(directory)
        run_config = _overridden(_flattened(table.get("config", {})), overrides)
        sys.path.insert(0, str(directory.resolve()))
        importlib.invalidate_caches()
        server, client = (
            _component(directory, table, name, component_type)
            for name, component_type in (("serverapp", ServerApp), ("clientapp", ClientApp))
        )
        return cls(server, client, run_config)


def run_app(app: FlowerApp, nodes: int) -> None:
    """Run the ServerApp over a `LocalGrid` of ``nodes`` ClientApps.

    Node ``i`` has ``partition-id`` i and ``num-partitions`` in its node config, as in Flower's
    simulation. Exceptions of the ServerApp are passed on.
    """
    run_config = dict(app.run_config)
    grid = LocalGrid(app.client, num_nodes=nodes, run_config=run_config)
    context = Context(grid.run.run_id, _SERVER_NODE_ID, {}, RecordDict(), run_config)
    app.server(grid, context)


def _app_table(directory: Path) -> dict[str, Any]:
    path = directory / "pyproject.toml"
    try:
        table = regular_files.read_toml(path)["tool"]["flwr"]["app"]
    except OSError as error:
        raise FedsimError(f"cannot read {path}: {error.strerror}.") from None
    except ValueError as error:
        raise FedsimError(f"{path} is not valid TOML: {error}.") from None
    except (KeyError, TypeError):
        table = None
    if not isinstance(table, dict) or not isinstance(table.get("components"), dict):
        raise FedsimError(
            f"{path} has no table [tool.flwr.app.components]; a Flower app names its serverapp "
            "and its clientapp there."
        )
    return table


def _component(
    directory: Path,
    table: Mapping[str, Any],
    name: str,
    component_type: type[ServerApp] | type[ClientApp],
) -> Any:
    reference = table["components"].get(name)
    key = f"tool.flwr.app.components.{name}"
    module, _, attribute = str(reference).partition(":")
    if not isinstance(reference, str) or not module or not attribute:
        raise FedsimError(f"{key} = {reference!r}; it must be written module:attribute.")
    try:
        component: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise FedsimError(
                f"{key} = '{reference}', but there is no module '{module}' in {directory}."
            ) from None
        raise FedsimError(
            f"{key} = '{reference}' needs the module '{error.name}', which is not installed here."
        ) from error
    for part in attribute.split("."):
        component = getattr(component, part, None)
    if not isinstance(component, component_type):
        raise FedsimError(f"{key} = '{reference}'; it must name a {component_type.__name__}.")
    return component


def _flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flattened(value, f"{prefix}{key}.")
        elif isinstance(value, Scalar):
            flat[f"{prefix}{key}"] = value
        else:
            raise FedsimError(
                f"tool.flwr.app.config.{prefix}{key} = {value!r}; it must be a bool, a number or "
                "a string."
            )
    return flat


def _overridden(run_config: dict[str, Scalar], overrides: Iterable[str]) -> dict[str, Scalar]:
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise FedsimError(f"--set {override!r} is not of the form key=value.")
        if key not in run_config:
            known = ", ".join(sorted(run_config)) or "none"
            raise FedsimError(f"--set {override!r}: the app's config has the keys {known}.")
        run_config[key] = read_value(text)
    return run_config
