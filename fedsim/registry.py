"""Registry: finds mechanisms, client algorithms, data sets and other kinds by name.

A thing of a kind (a mechanism, a client algorithm, a data set) is a frozen dataclass of its
settings, under a line ``@register("mechanism", "adaclip")``. It is found by that line in a file
of its kind's packages, and imported when it is used; one file may have several. A field
describes a setting completely, in one place::

    clip_norm: Annotated[float, Gt(0)] = 1.0
    "The largest L2 norm of a row."

Installed packages add theirs by entry points of the group ``fedsim.plugins``
(``mechanism.mine = "package.module:Class"``). A user's own is written ``module:name``, and
imported only if `fedsim.allowed_code` allows it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fedsim import allowed_code
from fedsim.errors import FedsimError
from fedsim.synonyms import closest


@dataclass(frozen=True)
class Kind:
    """One kind of things: their base class, and the packages where fedsim's own are.

    Attributes
    ----------
    packages : tuple of str
        Packages whose files register things of this kind.
    base : str
        Full name of the base class of this kind.
    like : tuple of tuples of str
        Sets of methods: a class that has all of one set need not derive from the base.
    """

    packages: tuple[str, ...]
    base: str
    like: tuple[tuple[str, ...], ...] = ()

    @property
    def base_class(self) -> type[Any]:
        """The base class, imported."""
        module, _, name = self.base.rpartition(".")
        base: type[Any] = getattr(importlib.import_module(module), name)
        return base


_CALL_METHOD = (("__call__",),)
_ROBUST_MEAN = ("center", "check")
_FLOWER_STRATEGY = ("configure_train", "aggregate_train")

KINDS: Mapping[str, Kind] = {
    "data": Kind(("fedsim.datasets",), "fedsim.datasets.Dataset", _CALL_METHOD),
    "partition": Kind(("fedsim.partitions",), "fedsim.partitions.Partition"),
    "model": Kind(("fedsim.models",), "torch.nn.Module", _CALL_METHOD),
    "adapter": Kind(("fedsim.adapters",), "fedsim.adapters.Adapter"),
    "loss": Kind(("fedsim.tasks",), "fedsim.tasks.ExampleLoss", _CALL_METHOD),
    "metric": Kind(("fedsim.tasks",), "fedsim.tasks.Metric", _CALL_METHOD),
    "client": Kind(("fedsim.clients",), "fedsim.clients.LocalAlgorithm"),
    "cohort": Kind(("fedsim.privacy.laws",), "fedsim.cohorts.Cohort"),
    "noise": Kind(("fedsim.privacy.noise",), "fedsim.privacy.noise.Noise"),
    "mechanism": Kind(
        ("fedsim.mechanisms", "fedsim.federation.aggregation"),
        "fedsim.mechanisms.Mechanism",
        (_ROBUST_MEAN,),
    ),
    "server": Kind(
        ("fedsim.server_optimizers",),
        "fedsim.server_optimizers.ServerOptimizer",
        (("step", "state", "restore"), _FLOWER_STRATEGY),
    ),
}

PLUGINS = "fedsim.plugins"
T = TypeVar("T", bound=Callable[..., Any])

_registered: dict[tuple[str, str], Callable[..., Any]] = {}


def register(kind: str, name: str) -> Callable[[T], T]:
    """Decorator: register a class or function of a kind under this name.

    Raises
    ------
    ValueError
        If another thing has the name.
    """

    def note(entry: T) -> T:
        first = _registered.setdefault((kind, name), entry)
        if (first.__module__, first.__qualname__) != (entry.__module__, entry.__qualname__):
            raise ValueError(f"two objects are called {kind} '{name}': {first} and {entry}.")
        _registered[kind, name] = entry
        return entry

    return note


def names(kind: str) -> tuple[str, ...]:
    """Names of all things of a kind, in alphabetical order; none is imported."""
    return tuple(sorted({*_built_in(kind), *plugins(kind)}))


def find(kind: str, name: str, key: str) -> Callable[..., Any]:
    """Import the thing of this name: one of `names`, or ``module:name``.

    Parameters
    ----------
    key : str
        The config's key, for messages.

    Raises
    ------
    FedsimError
        If there is none. Errors raised by a user's or plug-in's module are passed on unchanged.
    """
    if ":" in name:
        return _require_class_of_kind(kind, load(key, name), key, name)
    if name in plugins(kind):
        return _require_class_of_kind(kind, _from_plugin(kind, name, key), key, name)
    if name not in _built_in(kind):
        raise unknown_name_error(kind, name, key)
    importlib.import_module(_built_in(kind)[name])
    return _registered[kind, name]


def _built_in(kind: str) -> dict[str, str]:
    """Module of each of fedsim's own things of a kind, by name."""
    modules: dict[str, str] = {}
    for package in KINDS[kind].packages:
        folders = tuple(importlib.import_module(package).__path__)
        modules |= {name: f"{package}.{file}" for name, file in _in_folders(kind, folders)}
    return modules


@cache
def _in_folders(kind: str, folders: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Names registered in these folders, each with its file's stem.

    They are found in the files' text: listing the names must not import torch.
    """
    line = re.compile(rf'^@?register\("{kind}", "([a-z0-9-]+)"\)', re.MULTILINE)
    return tuple(
        (name, path.stem)
        for folder in folders
        for path in sorted(Path(folder).glob("*.py"))
        for name in line.findall(path.read_text(encoding="utf-8"))
    )


@cache
def _entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    return tuple(importlib.metadata.entry_points(group=PLUGINS))


def plugins(kind: str) -> Mapping[str, importlib.metadata.EntryPoint]:
    """Entry points that installed packages add to a kind, by name, if they are allowed here.

    Raises
    ------
    FedsimError
        If one has the name of one of fedsim's own, or two have the same name.
    """
    points: dict[str, importlib.metadata.EntryPoint] = {}
    for point in _entry_points():
        point_kind, _, name = point.name.partition(".")
        if point_kind != kind or not allowed_code.current().allows_plugin(point.module):
            continue
        owner = "fedsim's own" if name in _built_in(kind) else name in points and "another plugin's"
        if owner:
            raise FedsimError(
                f"the plugin {point.value} is called {kind} '{name}', which is {owner}; rename it "
                f"in the entry points ({PLUGINS}) of its package, or uninstall that."
            )
        points[name] = point
    return points


def unknown_name_error(kind: str, name: str, key: str) -> FedsimError:
    """The error for a key whose name is unknown (listing the known ones) or not allowed here."""
    allow_list = allowed_code.current()
    for point in _entry_points():
        if point.name == f"{kind}.{name}" and not allow_list.allows_plugin(point.module):
            reason = allow_list.refusal(point.module)
            return FedsimError(f"{key} is '{name}', the plugin {point.value}; {reason}.")
    known_names, text = names(kind), repr(name)
    text = text if len(text) <= 100 else f"{text[:97]}..."
    return FedsimError(
        f"{key} = {text};{closest(kind, name, known_names)} must be "
        f"{', '.join(repr(word) for word in known_names)} or 'module:name'."
    )


def _from_plugin(kind: str, name: str, key: str) -> Callable[..., Any]:
    point = plugins(kind)[name]
    try:
        entry = point.load()
    except (ImportError, AttributeError) as error:
        raise FedsimError(
            f"{key} is '{name}', the plugin {point.value}, which cannot be imported: {error}."
        ) from error
    if not callable(entry):
        raise FedsimError(f"{key} is '{name}', but the plugin {point.value} is not callable.")
    return entry  # type: ignore[no-any-return]


def _require_class_of_kind(
    kind: str, entry: Callable[..., Any], key: str, name: str
) -> Callable[..., Any]:
    """The thing itself; refused if it is a class whose objects would not be of this kind.

    The class is checked before an object is made: making one runs its code with a config's options.
    """
    if not isinstance(entry, type):
        return entry
    if missing := sorted(getattr(entry, "__abstractmethods__", ())):
        raise FedsimError(
            f"{key} is '{name}', an abstract class: it lacks {', '.join(missing)}; it must "
            "define all of them, or be a function that gives an object."
        )
    defined = {attribute for part in entry.__mro__[:-1] for attribute in vars(part)}
    if any(defined.issuperset(methods) for methods in KINDS[kind].like):
        return entry
    base = KINDS[kind].base_class
    if getattr(base, "_is_protocol", False) or not issubclass(entry, base):
        raise FedsimError(
            f"{key} is '{name}', a class that is not a {KINDS[kind].base}; it must be one, or a "
            "function that gives one."
        )
    return entry


def require_kind(kind: str, instance: Any, key: str, name: str) -> None:
    """Refuse an object that is not of this kind; a function may have returned anything.

    Raises
    ------
    FedsimError
    """
    for methods in KINDS[kind].like:
        if all(callable(getattr(instance, method, None)) for method in methods):
            return
    if not isinstance(instance, KINDS[kind].base_class):
        raise FedsimError(f"{key} is '{name}'; it must name a {KINDS[kind].base}.")


@contextmanager
def current_directory_importable() -> Iterator[None]:
    """Let this thread import from the current directory first, as ``python file.py`` does."""
    outside, _directory_finder.directory = _directory_finder.directory, os.getcwd()
    importlib.invalidate_caches()
    try:
        yield
    finally:
        _directory_finder.directory = outside


class _DirectoryFinder(threading.local, MetaPathFinder):
    """Import finder that searches one more directory before `sys.path`, for one thread.

    `sys.path` itself is not changed: removing an entry while another thread iterates over it would
    make that thread skip one.
    """

    directory: str | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # A ``path`` is a parent package's: submodules are found there, as always.
        if self.directory is None or path is not None:
            return None
        return PathFinder.find_spec(fullname, [self.directory, *sys.path], target)


_directory_finder = _DirectoryFinder()
sys.meta_path.insert(sys.meta_path.index(PathFinder), _directory_finder)


@current_directory_importable()
def load(key: str, name: str) -> Callable[..., Any]:
    """Import the callable ``module:name`` that the config's ``key`` names.

    ``module`` is a file in the current directory (``nets:Small`` is ``Small`` of ``./nets.py``)
    or anything importable.

    Raises
    ------
    FedsimError
        If it is not allowed (`fedsim.allowed_code`), which is checked before the module is
        imported, or there is no such module or callable. Errors raised by the user's own code are
        passed on unchanged.
    """
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise FedsimError(
            f"{key} is '{name}'; something of your own is written module:name, such as nets:Small "
            "for Small in nets.py."
        )
    allowed = allowed_code.current()
    # Only the top package is looked up: for a dotted name its parents would be imported, that
    # is, run, before it is known whether they are allowed.
    top = module_name.partition(".")[0]
    if (
        allowed.includes_user_code
        and top not in sys.modules
        and importlib.util.find_spec(top) is None
    ):
        raise _no_module(key, name, module_name)
    if module_name in sys.modules and not allowed_code.is_reserved(module_name):
        _refuse_namesake(key, name, sys.modules[module_name])
    allowed.require(key, name, module_name)
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and an import of its own failed
        raise _no_module(key, name, module_name) from error
    _refuse_namesake(key, name, value)
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        raise FedsimError(f"{key} is '{name}', but '{module_name}' has no callable '{attribute}'.")
    allowed.require_home(key, name, value)
    return value  # type: ignore[no-any-return]


def _no_module(key: str, name: str, module: str) -> FedsimError:
    return FedsimError(
        f"{key} is '{name}', but there is neither a file {module.replace('.', '/')}.py in "
        f"{os.getcwd()} nor an installed module '{module}'."
    )


def _refuse_namesake(key: str, name: str, module: ModuleType) -> None:
    """Refuse an imported module if the current directory has another file of its name."""
    here = Path(*module.__name__.split(".")).with_suffix(".py").absolute()
    imported = Path(getattr(module, "__file__", None) or here)
    if here.is_file() and imported.is_file() and not here.samefile(imported):
        raise FedsimError(
            f"{key} is '{name}', and this process has imported {imported}, not {here}; run it in a "
            "process of its own, or rename one of the two."
        )
