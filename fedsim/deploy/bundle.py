"""App bundles that contain only a config, and the check that refuses all others.

Every machine runs its installed fedsim. Flower would run any code in a bundle, so that without the
check anyone who can submit a run could run code on the server and on every node.
"""

from __future__ import annotations

import io
import re
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedsim.errors import FedsimError

CLIENT_APP = "fedsim.apps.client_app:app"
SERVER_APP = "fedsim.apps.server_app:app"

_NAME = "fedsim-run"
_PUBLISHER = "fedsim"
_NAMES = "[A-Za-z0-9_-]{1,64}"
_VERSIONS = r"\d{1,4}(\.\d{1,4}){0,3}"
_PROJECT = "pyproject.toml"
_MANIFEST = ".info/CONTENT"
_LARGEST = 1 << 20


def write_app(
    directory: Path,
    run_config: Mapping[str, Any],
    *,
    server_app: str = SERVER_APP,
    client_app: str = CLIENT_APP,
) -> Path:
    """Write an app bundle that contains only a config.

    Parameters
    ----------
    run_config : mapping
        Nested config with kebab-case keys.
    server_app, client_app : str
        The installed apps that will run it, as ``module:name``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    project = {
        "project": {
            "name": _NAME,
            "version": "1.0.0",
            "description": "A fedsim run",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": _PUBLISHER,
                    "components": {"serverapp": server_app, "clientapp": client_app},
                    "config": dict(run_config),
                }
            }
        },
    }
    (directory / _PROJECT).write_text(tomli_w.dumps(project), encoding="utf-8")
    return directory


def check_bundle(content: bytes, component: str, app: str) -> None:
    """Refuse a bundle that is more than a config for the installed app.

    No file is extracted to disk, and file sizes are limited.

    Parameters
    ----------
    content : bytes
        The bundle, a zip file.
    component : "serverapp" or "clientapp"
    app : str
        The only app, ``module:name``, that may run here.

    Raises
    ------
    FedsimError
        If it has files other than Flower's manifest and a ``pyproject.toml``, names another app,
        or has dependencies to install.
    """
    project = _project_of(content)
    flower, metadata = _table(project, "tool", "flwr", "app"), _table(project, "project")
    declared = _table(flower, "components").get(component)
    if declared != app:
        raise FedsimError(
            f"the bundle's {component} is {str(declared)[:80]!r}; here only {app!r} is run."
        )
    # Flower builds a directory name from these three.
    for key, text, form in (
        ("publisher", flower.get("publisher"), _NAMES),
        ("name", metadata.get("name"), _NAMES),
        ("version", metadata.get("version"), _VERSIONS),
    ):
        if not isinstance(text, str) or re.fullmatch(form, text) is None:
            raise FedsimError(f"the bundle's {key} is {str(text)[:80]!r}; it must match {form}.")
    if metadata.get("dependencies") or metadata.get("optional-dependencies"):
        raise FedsimError("the bundle asks for packages; here nothing is installed for a run.")


def _project_of(content: bytes) -> dict[str, Any]:
    if len(content) > _LARGEST:
        raise FedsimError(f"the bundle has {len(content)} bytes; it may have at most {_LARGEST}.")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = sorted(entry.filename for entry in archive.infolist())
            if names != sorted([_PROJECT, _MANIFEST]):
                raise FedsimError(
                    f"the bundle has the files {str(names)[:200]}; here it may contain no code, "
                    f"only {_PROJECT}."
                )
            if any(entry.file_size > _LARGEST for entry in archive.infolist()):
                raise FedsimError(f"the bundle's files are larger than {_LARGEST} bytes.")
            with archive.open(_PROJECT) as file:
                text = file.read(_LARGEST + 1)
        return tomllib.loads(text.decode("utf-8"))
    except FedsimError:
        raise
    except Exception as error:  # untrusted bytes may make a parser raise any exception
        raise FedsimError(f"the bundle cannot be read ({type(error).__name__}).") from None


def _table(tree: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        tree = tree.get(key, {})
        if not isinstance(tree, dict):
            raise FedsimError(f"the bundle's {_PROJECT} has no table {'.'.join(keys)}.")
    return tree
