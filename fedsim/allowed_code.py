"""Which modules a config may name: one allow-list, consulted before anything is imported.

Importing a module runs it, and what a config names is called with options of the config's. So a
module is imported for a config only where the owner of the process has allowed it: a user at a
command, the owner of a server, the owner of a node.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pkgutil
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from fedsim import regular_files
from fedsim.errors import FedsimError

VARIABLE = "FEDSIM_ALLOWED_CODE"
"""Environment variable: what a command has allowed, for the processes of its own simulation."""

_PROJECT = "pyproject.toml"
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class AllowedCode:
    """Modules that a config may name, with the modules of packages among them.

    The standard library and fedsim's own modules are never among them: what these do with a
    config's options was never meant for a config.

    Attributes
    ----------
    modules : tuple of str
        Modules and packages, by name.
    of_user : bool
        Whether modules under the current directory, those that its ``pyproject.toml`` lists
        (``[tool.fedsim] code = [...]``) and installed plug-ins are allowed as well.
    file : str
        Where the owner of this process lists ``modules``, for sentences.
    """

    modules: tuple[str, ...] = ()
    of_user: bool = False
    file: str = ""

    def allows(self, module: str) -> bool:
        """Whether a config may name what is defined in this module."""
        if is_reserved(module):
            return False
        if _is_within(module, self.modules):
            return True
        return self.of_user and (
            _is_under_current_directory(module) or _is_within(module, _listed())
        )

    def allows_plugin(self, module: str) -> bool:
        """Whether a config may name an entry point in this module by the entry point's name."""
        return self.of_user or self.allows(module)

    def require(self, key: str, name: str, module: str) -> None:
        """Refuse a name in a module that is not allowed; nothing is imported.

        Parameters
        ----------
        key, name : str
            Of the config, for sentences.

        Raises
        ------
        FedsimError
            With the line that allows it, where any does.
        """
        if not self.allows(module):
            raise FedsimError(f"{key} is '{name}'; {self.refusal(module)}.")

    def require_home(self, key: str, name: str, thing: Any) -> None:
        """Refuse what an allowed module has only imported from one that is not allowed.

        Raises
        ------
        FedsimError
        """
        home = home_of(thing)
        if home is None:
            raise FedsimError(
                f"{key} is '{name}', a {type(thing).__name__} of no known module; it must be a "
                "function or class of your own."
            )
        if not self.allows(home):
            raise FedsimError(f"{key} is '{name}', which is {home}'s; {self.refusal(home)}.")

    def refusal(self, module: str) -> str:
        """Why this module is not allowed, and what allows it."""
        if module == "__main__":
            return (
                "what a script or a notebook defines cannot be imported by name; put it into a "
                "file of its own, such as mine.py, and name it 'mine:...'"
            )
        if is_reserved(module):
            return (
                f"'{module}' is of the standard library or of fedsim, which a config may not name; "
                "it must be a module of your own"
            )
        if not self.of_user:
            allowed = f"only {list(self.modules)}" if self.modules else "no code of its own"
            return (
                f"here a run may name {allowed}, and modules = "
                f"{_written((*self.modules, module))} in {self.file} would allow it"
            )
        return (
            f"'{module}' is not under {os.getcwd()}: if you trust that code, add code = "
            f"{_written((*_listed(), module))} to [tool.fedsim] of {_PROJECT} there, or give "
            f"--allow-code {module} (allow_code= of RunConfig.load)"
        )


_now = AllowedCode(of_user=True)


def now() -> AllowedCode:
    """What holds in this process at present."""
    return _now


def allow(modules: Iterable[str]) -> None:
    """Let configs name these modules too, from now on and in this process.

    Raises
    ------
    FedsimError
        If one is no module's name, or never allowed.
    """
    global _now
    added = tuple(modules)
    for module in added:
        if not isinstance(module, str):
            raise FedsimError(f"allow_code has {module!r:.100}; it must have modules' names.")
        if not all(part.isidentifier() for part in module.split(".")) or is_reserved(module):
            raise FedsimError(
                f"--allow-code is '{module}'; it must be the name of a module or package that is "
                "neither fedsim's nor the standard library's."
            )
    _now = replace(_now, modules=tuple(dict.fromkeys([*_now.modules, *added])))


@contextmanager
def use(allowed: AllowedCode) -> Iterator[None]:
    """Have something else hold while this is entered: an app serves others than its process's."""
    global _now
    outside, _now = _now, allowed
    try:
        yield
    finally:
        _now = outside


def inherited() -> AllowedCode | None:
    """What the command has allowed whose simulation this process belongs to; None without one."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    return AllowedCode(tuple(filter(None, text.split(","))), of_user=True)


def home_of(thing: Any) -> str | None:
    """The module in which a class, a function or an object's class is defined, if that is known."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    home = getattr(thing, "__module__", None)
    return home if isinstance(home, str) else None


def _is_within(module: str, places: Iterable[str]) -> bool:
    """Whether this is one of these modules, or in one of these packages."""
    return any(module == place or module.startswith(f"{place}.") for place in places)


def is_reserved(module: str) -> bool:
    """Whether a module is one that nobody can allow."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("fedsim", "__main__")


def _is_under_current_directory(module: str) -> bool:
    """Whether all that is imported for a module lies under the current directory, links followed.

    What is installed there, in an environment's site-packages, does not count.
    """
    directory = Path(os.path.realpath(os.getcwd()))
    found = [*_specs(module)]
    return bool(found) and all(_lies_in(spec, directory) for spec in found)


def _specs(module: str) -> Iterator[ModuleSpec]:
    """Of the packages that a module is in, and of itself; none of them is imported."""
    name, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # of what has none, such as a program
        spec = None
    level = [] if spec is None else [spec]
    yield from level
    for part in parts:
        name = f"{name}.{part}"
        places = [place for spec in level for place in spec.submodule_search_locations or ()]
        finders = filter(None, map(pkgutil.get_importer, places))
        level = [spec for finder in finders if (spec := finder.find_spec(name)) is not None]
        yield from level


def _lies_in(spec: ModuleSpec, directory: Path) -> bool:
    places = [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or ())]
    paths = [Path(os.path.realpath(place)) for place in places if place]
    return bool(paths) and all(
        path.is_relative_to(directory) and not _INSTALLED & {*path.parts} for path in paths
    )


def _written(modules: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{module}"' for module in modules) + "]"


def _listed() -> tuple[str, ...]:
    """What ``pyproject.toml`` in the current directory lists."""
    path = Path(_PROJECT).absolute()
    try:
        state = path.stat()
    except OSError:
        return ()
    return _listed_in(path, state.st_mtime_ns, state.st_size)


@cache
def _listed_in(path: Path, _modified: int, _size: int) -> tuple[str, ...]:
    """What this file lists; read again where it has changed."""
    try:
        table = tomllib.loads(regular_files.read_text(path)).get("tool", {})
        listed = table.get("fedsim", {}).get("code", [])
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise FedsimError(f"{path} cannot be read: {error}.") from None
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise FedsimError(
            f"tool.fedsim.code of {path} is {listed!r:.200}; it must be a list of modules' names."
        )
    return tuple(listed)
