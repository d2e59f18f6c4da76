"""Checks that a resumed run's relative paths still lead to the files that it began with.

Their absolute paths are noted in a file of the run's directory and not in config.toml, which is
hashed and must be the same wherever the run is made. Their content is not noted, since no digest of
data may be written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection
from pathlib import Path

from fedsim import regular_files
from fedsim.arguments import shown
from fedsim.config import RunConfig
from fedsim.datasets.load import kind_of
from fedsim.errors import FedsimError
from fedsim.privacy import durable
from fedsim.runs.directory import NAMED_FILES

PATHS = ("data.name", "model.weights", "adapter.weights", "client.work", "devices.trace")
"""Keys whose values may be paths on the operator's machine."""

_log = logging.getLogger("fedsim")


def note_files(directory: Path, config: RunConfig) -> None:
    """Write to a run's directory where the files of its config's relative paths are."""
    files = {key: str(path) for key in PATHS if (path := _file(config, key)) is not None}
    if files:
        noted = {"directory": os.getcwd(), "files": files}
        durable.replace(directory / NAMED_FILES, json.dumps(noted, indent=1).encode() + b"\n")


def refuse_other_files(directory: Path, config: RunConfig, keys: Collection[str] = PATHS) -> None:
    """Refuse to resume a run if its config's relative paths now lead to other files.

    If a file that the run began with no longer exists, perhaps because everything was moved, the
    other one is used with a warning.

    Raises
    ------
    FedsimError
        If a path leads to another file (the message names its key), or the note is damaged.
    """
    path = directory / NAMED_FILES
    try:
        noted = json.loads(regular_files.read_text(path))
        origin, files = str(noted["directory"]), {k: Path(v) for k, v in noted["files"].items()}
    except FileNotFoundError:
        return  # no relative paths, or an earlier version's run
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FedsimError(f"{path} is damaged ({error}); restore what the run wrote.") from None
    flat = config.to_run_config()
    for key in sorted(files.keys() & set(keys)):
        if Path(str(flat.get(key, ""))).is_absolute():
            continue
        original, current = files[key], _file(config, key)
        if not original.exists():
            if current is not None:
                _log.warning(
                    "%s = %s is %s here; %s, with which the run in %s began, is gone.",
                    key, shown(flat[key]), current, original, directory,
                )  # fmt: skip
        elif current is None or not current.samefile(original):
            actual = "no such file is" if current is None else f"{current}, another file, is"
            raise FedsimError(
                f"{key} = {shown(flat[key])}; {actual} here, and the run in {directory} began with "
                f"{original}; continue in {origin}."
            )


def _file(config: RunConfig, key: str) -> Path | None:
    """The file that a key's relative path leads to from the current directory, or None."""
    name = str(config.to_run_config().get(key, ""))
    if not name or Path(name).is_absolute() or (key == "data.name" and kind_of(name) != "files"):
        return None
    folders = (".", config.data.dir) if key == "data.name" else (".",)
    paths = (Path(os.path.abspath(Path(folder) / name)) for folder in folders)
    return next((path for path in paths if path.exists()), None)
