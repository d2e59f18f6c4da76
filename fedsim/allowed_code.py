"""Which modules a config may name: one allow-list, consulted before anything is imported.

Importing a module runs its code, and a config calls what it names with arguments of its own. So a
module is imported for a config only if the owner of the process has allowed it: the user who
typed the command, or the owner of the server or node.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from fedsim import regular_files
from fedsim.errors import INSTALLED, FedsimError

VARIABLE = "FEDSIM_ALLOWED_CODE"
"""Environment variable by which a command passes its allow-list to its simulation's processes."""

_PROJECT = "pyproject.toml"


@dataclass(frozen=True)
class AllowedCode:
    """Allow-list of the modules that a config may name.

    The standard library and fedsim's own modules are never allowed: their functions were not
    written to be called with arguments from a config.

    Attributes
    ----------
    modules : tuple of str
        Names of modules and of packages; a package stands for all modules in it.
    includes_user_code : bool
        Whether three more are allowed: modules under the current directory, those that its
        ``pyproject.toml`` lists (``[tool.fedsim] code = [...]``), and installed plug-ins.
        Neither code nor a ``pyproject.toml`` in a run's directory counts: that directory may have
        come from somebody else.
    file : str
        File in which the owner of this process lists ``modules``, for messages.
    """

    modules: tuple[str, ...] = ()
    includes_user_code: bool = False
    file: str = ""

    def allows(self, module: str) -> bool:
        """Whether a config may name what is defined in this module."""
        if is_reserved(module):
            return False
        if _is_within(module, self.modules):
            return True
        return self.includes_user_code and (
            _is_under_current_directory(module) or _is_within(module, _listed())
        )

    def allows_plugin(self, module: str) -> bool:
        """Whether a config may name an entry point in this module by the entry point's name."""
        return self.includes_user_code or self.allows(module)

    def require(self, key: str, name: str, module: str) -> None:
        """Refuse a name whose module is not allowed, without importing the module.

        Parameters
        ----------
        key, name : str
            The config's key and its value, for messages.

        Raises
        ------
        FedsimError
            If it is not allowed; the message says which line would allow it, if any can.
        """
        if not self.allows(module):
            raise FedsimError(f"{key} is '{name}'; {self.refusal(module)}.")

    def require_home(self, key: str, name: str, value: Any) -> None:
        """Refuse an object that an allowed module only re-exports from one that is not allowed.

        Raises
        ------
        FedsimError
        """
        home = defining_module(value)
        if home is None:
            raise FedsimError(
                f"{key} is '{name}', a {type(value).__name__} whose module is unknown; it must be "
                "a function or class of your own."
            )
        if not self.allows(home):
            raise FedsimError(f"{key} is '{name}', which is {home}'s; {self.refusal(home)}.")

    def refusal(self, module: str) -> str:
        """Clause that says why this module is not allowed, and what would allow it."""
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
        if not self.includes_user_code:
            allowed = f"only {list(self.modules)}" if self.modules else "no code of its own"
            return (
                f"here a run may name {allowed}, and modules = "
                f"{_as_toml((*self.modules, module))} in {self.file} would allow it"
            )
        places = [place for spec in _specs(module) for place in _places(spec)]
        run = next(filter(None, map(_run_directory, places)), None)
        if run is not None:
            return (
                f"'{module}' is in a run's directory, {run}, which may have come from somebody "
                f"else: if you trust that code, give --allow-code {module} (allow_code= of "
                "RunConfig.load)"
            )
        return (
            f"'{module}' is not under {os.getcwd()}: if you trust that code, add code = "
            f"{_as_toml((*_listed(), module))} to [tool.fedsim] of {_PROJECT} there, or give "
            f"--allow-code {module} (allow_code= of RunConfig.load)"
        )


_current = AllowedCode(includes_user_code=True)


def current() -> AllowedCode:
    """The allow-list in force in this process."""
    return _current


def allow(modules: Iterable[str]) -> None:
    """Let configs name these modules too, from now on and in this process.

    Raises
    ------
    FedsimError
        If one is not the name of a module, or can never be allowed.
    """
    global _current
    added = tuple(modules)
    for module in added:
        if not isinstance(module, str):
            raise FedsimError(f"allow_code has {module!r:.100}; it must list names of modules.")
        if not all(part.isidentifier() for part in module.split(".")) or is_reserved(module):
            raise FedsimError(
                f"--allow-code is '{module}'; it must be the name of a module or package that is "
                "neither fedsim's nor the standard library's."
            )
    _current = replace(_current, modules=tuple(dict.fromkeys([*_current.modules, *added])))


@contextmanager
def use(allowed: AllowedCode) -> Iterator[None]:
    """Replace the allow-list within this context: an app acts for someone else than its process."""
    global _current
    previous, _current = _current, allowed
    try:
        yield
    finally:
        _current = previous


def inherited() -> AllowedCode | None:
    """The allow-list of the command that started this simulation process; None outside of one."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    return AllowedCode(tuple(filter(None, text.split(","))), includes_user_code=True)


def defining_module(value: Any) -> str | None:
    """The module in which a class, a function or an object's class is defined, if that is known."""
    while isinstance(value, functools.partial):
        value = value.func
    home = getattr(value, "__module__", None)
    return home if isinstance(home, str) else None


def _is_within(module: str, places: Iterable[str]) -> bool:
    """Whether a module is one of ``places`` or lies in one of these packages."""
    return any(module == place or module.startswith(f"{place}.") for place in places)


def is_reserved(module: str) -> bool:
    """Whether a module can never be allowed."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("fedsim", "__main__")


def _is_under_current_directory(module: str) -> bool:
    """Whether a module and its parent packages all lie under the current directory.

    Links are followed. An environment's site-packages under that directory does not count, nor does
    what is in a run's directory.
    """
    directory = Path(os.path.realpath(os.getcwd()))
    specs = [*_specs(module)]
    return bool(specs) and all(_lies_in(spec, directory) for spec in specs)


def _specs(module: str) -> Iterator[ModuleSpec]:
    """Import specs of a module's parent packages and of the module itself, without importing any.

    `importlib.util.find_spec` of a dotted name would import the parents, that is, run them.
    """
    name, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # the module has no spec, such as `__main__` of a script
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
    places = _places(spec)
    paths = [Path(os.path.realpath(place)) for place in places]
    return (
        bool(paths)
        and all(path.is_relative_to(directory) and not INSTALLED & {*path.parts} for path in paths)
        and not any(map(_run_directory, places))
    )


def _places(spec: ModuleSpec) -> list[str]:
    """The file of a module, or the folders of a namespace package."""
    places = [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or ())]
    return [place for place in places if place]


def _run_directory(place: str) -> Path | None:
    """The run's directory that contains a file or folder, by its own path or its link's target."""
    target = Path(os.path.realpath(place))
    return regular_files.run_directory_of(Path(place)) or regular_files.run_directory_of(target)


def _as_toml(modules: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{module}"' for module in modules) + "]"


def _listed() -> tuple[str, ...]:
    """Modules that ``pyproject.toml`` in the current directory lists; none without that file."""
    path = Path(_PROJECT).absolute()
    if _run_directory(_PROJECT) is not None:
        return ()
    try:
        state = path.stat()
    except OSError:
        return ()
    return _listed_in(path, state.st_mtime_ns, state.st_size)


@cache
def _listed_in(path: Path, _modified: int, _size: int) -> tuple[str, ...]:
    """Modules that this file lists; by its time and size, so that a changed file is read again."""
    try:
        table = regular_files.read_toml(path).get("tool", {})
        listed = table.get("fedsim", {}).get("code", [])
    except (OSError, ValueError, AttributeError) as error:
        raise FedsimError(f"{path} cannot be read: {error}.") from None
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise FedsimError(
            f"tool.fedsim.code of {path} is {listed!r:.200}; it must be a list of modules' names."
        )
    return tuple(listed)
