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
from fedsim.config.release_keys import path_keys
from fedsim.errors import FedsimError
from fedsim.privacy import durable
from fedsim.runs.directory import NAMED_FILES

_log = logging.getLogger("fedsim")


def note_files(directory: Path, config: RunConfig) -> None:
    """Write to a run's directory where the files of its config's relative paths are."""
    if files := _files(config):
        noted = {"directory": os.getcwd(), "files": {key: str(path) for key, path in files.items()}}
        durable.replace(directory / NAMED_FILES, json.dumps(noted, indent=1).encode() + b"\n")


def refuse_other_files(
    directory: Path, config: RunConfig, keys: Collection[str] | None = None
) -> None:
    """Refuse to resume a run if its config's relative paths (of ``keys``) now lead to other files.

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
    flat, found = config.to_run_config(), _files(config)
    for key in sorted(files if keys is None else files.keys() & set(keys)):
        if Path(str(flat.get(key, ""))).is_absolute():
            continue
        original, current = files[key], found.get(key)
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


def _files(config: RunConfig) -> dict[str, Path]:
    """The files that relative paths of a config lead to from the current directory, by key."""
    flat, files = config.to_run_config(), {}
    for key, mark in path_keys(config, "always", "training").items():
        name = str(flat.get(key, ""))
        if not name or mark.is_name(name) or Path(name).is_absolute():
            continue
        folders = (".", config.data.dir) if key == "data.name" else (".",)
        paths = (Path(os.path.abspath(Path(folder) / name)) for folder in folders)
        if (path := next((path for path in paths if path.exists()), None)) is not None:
            files[key] = path
    return files
