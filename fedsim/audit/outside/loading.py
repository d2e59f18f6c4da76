"""A target by its name: a callable of this process, or of another one with its own packages."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path

import numpy as np

from fedsim.audit.outside import remote
from fedsim.audit.outside.attacks import Target
from fedsim.audit.outside.federation import SyntheticFederation, TargetRelease
from fedsim.errors import FedsimError


def open_target(name: str, python: str = "") -> AbstractContextManager[Target]:
    """The target of this name.

    Parameters
    ----------
    name : str
        ``module:callable`` or ``path/to/file.py:callable``.
    python : str
        The interpreter of another environment, in which the target runs as a process of its own;
        it needs numpy there. Empty for this one.

    Raises
    ------
    FedsimError
        If there is no such target, or what it gives back is no release.
    """
    return _remote_target(name, python) if python else nullcontext(_local_target(name))


def _local_target(name: str) -> Target:
    try:
        call = remote.load(name)
    except (Exception, SystemExit) as error:
        raise FedsimError(f"--target is {name}, which cannot be loaded: {error}.") from error

    def target(federation: SyntheticFederation) -> TargetRelease:
        try:
            # What a target prints is no part of a verdict.
            with redirect_stdout(sys.stderr):
                return TargetRelease.of(call(federation), federation)
        except FedsimError:
            raise
        except (Exception, SystemExit) as error:
            raise FedsimError(
                f"--target {name} could not be run: {type(error).__name__}: {error}"
            ) from error

    return target


@contextmanager
def _remote_target(name: str, python: str) -> Iterator[Target]:
    command = [python, str(Path(remote.__file__)), name]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise FedsimError(
            f"--python is {python}, which cannot be run: {error.strerror}."
        ) from error
    assert process.stdin is not None
    assert process.stdout is not None
    sends, receives = process.stdin, process.stdout
    with tempfile.TemporaryDirectory() as directory:

        def target(federation: SyntheticFederation) -> TargetRelease:
            request = asdict(federation)
            for key in ("rows", "examples"):
                path = f"{directory}/{key}.npy"
                np.save(path, request[key])
                request[key] = path
            try:
                sends.write(json.dumps(request) + "\n")
                sends.flush()
                line = receives.readline()
            except BrokenPipeError:
                line = ""
            answer = json.loads(line) if line else {"error": "its process has ended"}
            if "error" in answer:
                raise FedsimError(f"--target {name} could not be run: {answer['error']}.")
            answer["models"] = np.load(answer["models"])
            return TargetRelease.of(answer, federation)

        try:
            yield target
        finally:
            sends.close()
            process.wait(timeout=30)
