"""The files that a run's config names relative to a directory: the same ones when the run goes on.

Where they are is noted in the run's directory, outside of what is hashed: config.toml stays the
same wherever a run is made. What is in them is not noted, since no digest of data is written.
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
"""Keys that may hold paths on the operator's machine."""

_log = logging.getLogger("fedsim")


def note_files(directory: Path, config: RunConfig) -> None:
    """Note in a run's directory where the files are that its config names relative to this one."""
    files = {key: str(path) for key in PATHS if (path := _file(config, key)) is not None}
    if files:
        noted = {"directory": os.getcwd(), "files": files}
        durable.replace(directory / NAMED_FILES, json.dumps(noted, indent=1).encode() + b"\n")


def refuse_other_files(directory: Path, config: RunConfig, keys: Collection[str] = PATHS) -> None:
    """Refuse to go on with a run where its config's relative paths lead to other files.

    Where the file that the run began with is gone, perhaps since all was moved, the other is taken
    with a warning.

    Raises
    ------
    FedsimError
        Naming the key; or if the note is damaged.
    """
    path = directory / NAMED_FILES
    try:
        noted = json.loads(regular_files.read_text(path))
        began, files = str(noted["directory"]), {k: Path(v) for k, v in noted["files"].items()}
    except FileNotFoundError:
        return  # none were named, or by an earlier version
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FedsimError(f"{path} is damaged ({error}); put back what the run wrote.") from None
    flat = config.to_run_config()
    for key in files.keys() & set(keys):
        if Path(str(flat.get(key, ""))).is_absolute():
            continue
        then, now = files[key], _file(config, key)
        if not then.exists():
            if now is not None:
                _log.warning(
                    "%s = %s is %s here; %s, with which the run in %s began, is gone.",
                    key, shown(flat[key]), now, then, directory,
                )  # fmt: skip
        elif now is None or not now.samefile(then):
            here = "no such file is" if now is None else f"{now}, another file, is"
            raise FedsimError(
                f"{key} = {shown(flat[key])}; {here} here, and the run in {directory} began with "
                f"{then}; go on in {began}."
            )


def _file(config: RunConfig, key: str) -> Path | None:
    """The file that a relative path leads to from here; None where there is none."""
    name = str(config.to_run_config().get(key, ""))
    if not name or Path(name).is_absolute() or (key == "data.name" and kind_of(name) != "files"):
        return None
    folders = (".", config.data.dir) if key == "data.name" else (".",)
    paths = (Path(os.path.abspath(Path(folder) / name)) for folder in folders)
    return next((path for path in paths if path.exists()), None)
