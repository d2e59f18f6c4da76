"""Kinds of things by name: what each is called, what settings it takes, where it lives.

A thing of a kind (a mechanism, a client algorithm, a data set) is a frozen dataclass of its
settings, under a line ``@register("mechanism", "adaclip")``. It is found by that line in some file
of its kind's packages, and imported when it is used; one file may have several. A field says all
that there is to say of a setting, once::

    clip_norm: Annotated[float, Gt(0), Doc("The largest L2 norm of a row.")] = 1.0

Packages that are installed name theirs by entry points of the group ``fedsim.plugins``
(``mechanism.mine = "package.module:Class"``); anybody's own is written ``module:name``, and only
imported where `fedsim.allowed_code` allows it.
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
    """What things of one kind are, and where fedsim's own stand.

    Attributes
    ----------
    packages : tuple of str
        Those whose files have them.
    base : str
        What a class of this kind derives from.
    like : tuple of tuples of str
        Methods of a class that may stand for one without deriving from that.
    """

    packages: tuple[str, ...]
    base: str
    like: tuple[tuple[str, ...], ...] = ()

    @property
    def base_class(self) -> type[Any]:
        """The base, imported."""
        module, _, name = self.base.rpartition(".")
        base: type[Any] = getattr(importlib.import_module(module), name)
        return base


_CALLED = (("__call__",),)
_ROBUST_MEAN = ("center", "check")
_FLOWER_STRATEGY = ("configure_train", "aggregate_train")

KINDS: Mapping[str, Kind] = {
    "data": Kind(("fedsim.datasets",), "fedsim.datasets.Dataset", _CALLED),
    "partition": Kind(("fedsim.partitions",), "fedsim.partitions.Partition"),
    "model": Kind(("fedsim.models",), "torch.nn.Module", _CALLED),
    "adapter": Kind(("fedsim.adapters",), "fedsim.adapters.Adapter"),
    "loss": Kind(("fedsim.tasks",), "fedsim.tasks.ExampleLoss", _CALLED),
    "metric": Kind(("fedsim.tasks",), "fedsim.tasks.Metric", _CALLED),
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
    """Call a thing by this name.

    Raises
    ------
    ValueError
        If another thing has the name.
    """

    def note(thing: T) -> T:
        before = _registered.setdefault((kind, name), thing)
        if (before.__module__, before.__qualname__) != (thing.__module__, thing.__qualname__):
            raise ValueError(f"two things are called {kind} '{name}': {before} and {thing}.")
        _registered[kind, name] = thing
        return thing

    return note


def names(kind: str) -> tuple[str, ...]:
    """What there is of a kind, in alphabetical order; nothing of it is imported."""
    return tuple(sorted({*_built_in(kind), *plugins(kind)}))


def find(kind: str, name: str, key: str) -> Callable[..., Any]:
    """The thing of this name: one of `names`, or ``module:name``.

    Parameters
    ----------
    key : str
        Of the config, for sentences.

    Raises
    ------
    FedsimError
        If there is none. Errors of code that is not fedsim's come through as they are.
    """
    if ":" in name:
        return _of_kind(kind, load(key, name), key, name)
    if name in plugins(kind):
        return _of_kind(kind, _from_plugin(kind, name, key), key, name)
    if name not in _built_in(kind):
        raise unknown_name(kind, name, key)
    importlib.import_module(_built_in(kind)[name])
    return _registered[kind, name]


def _built_in(kind: str) -> dict[str, str]:
    """The module of each thing of fedsim's own."""
    modules: dict[str, str] = {}
    for package in KINDS[kind].packages:
        folders = tuple(importlib.import_module(package).__path__)
        modules |= {name: f"{package}.{file}" for name, file in _in_folders(kind, folders)}
    return modules


@cache
def _in_folders(kind: str, folders: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Names that the files in these folders register, each with its file's, by their text."""
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
    """What installed packages add to a kind, by name, as far as it is allowed here.

    Raises
    ------
    FedsimError
        If one has the name of fedsim's own, or two have the same.
    """
    points: dict[str, importlib.metadata.EntryPoint] = {}
    for point in _entry_points():
        of, _, name = point.name.partition(".")
        if of != kind or not allowed_code.now().allows_plugin(point.module):
            continue
        owner = "fedsim's own" if name in _built_in(kind) else name in points and "another plugin's"
        if owner:
            raise FedsimError(
                f"the plugin {point.value} is called {kind} '{name}', which is {owner}; rename it "
                f"in the entry points ({PLUGINS}) of its package, or uninstall that."
            )
        points[name] = point
    return points


def unknown_name(kind: str, name: str, key: str) -> FedsimError:
    """That a key names nothing of a kind, and what there is of it, or a plugin not allowed here."""
    for point in _entry_points():
        if point.name == f"{kind}.{name}" and not allowed_code.now().allows_plugin(point.module):
            why = allowed_code.now().refusal(point.module)
            return FedsimError(f"{key} is '{name}', the plugin {point.value}; {why}.")
    known, text = names(kind), repr(name)
    text = text if len(text) <= 100 else f"{text[:97]}..."
    return FedsimError(
        f"{key} = {text};{closest(kind, name, known)} must be "
        f"{', '.join(repr(word) for word in known)} or 'module:name'."
    )


def _from_plugin(kind: str, name: str, key: str) -> Callable[..., Any]:
    point = plugins(kind)[name]
    try:
        thing = point.load()
    except (ImportError, AttributeError) as error:
        raise FedsimError(
            f"{key} is '{name}', the plugin {point.value}, which cannot be imported: {error}."
        ) from error
    if not callable(thing):
        raise FedsimError(f"{key} is '{name}', but the plugin {point.value} is not callable.")
    return thing  # type: ignore[no-any-return]


def _of_kind(kind: str, thing: Callable[..., Any], key: str, name: str) -> Callable[..., Any]:
    """The thing, unless it is a class of which there are no objects of this kind.

    That is found out here and not of the object: making one runs code with a config's options.
    """
    if not isinstance(thing, type):
        return thing
    if missing := sorted(getattr(thing, "__abstractmethods__", ())):
        raise FedsimError(
            f"{key} is '{name}', an abstract class: it lacks {', '.join(missing)}; it must "
            "define all of them, or be a function that gives an object."
        )
    defined = {attribute for part in thing.__mro__[:-1] for attribute in vars(part)}
    if any(defined.issuperset(methods) for methods in KINDS[kind].like):
        return thing
    wanted = KINDS[kind].base_class
    if getattr(wanted, "_is_protocol", False) or not issubclass(thing, wanted):
        raise FedsimError(
            f"{key} is '{name}', a class that is no {KINDS[kind].base}; it must be one, or a "
            "function that gives one."
        )
    return thing


def require_kind(kind: str, made: Any, key: str, name: str) -> None:
    """Refuse an object that is not of its kind, such as a function may have given.

    Raises
    ------
    FedsimError
    """
    for methods in KINDS[kind].like:
        if all(callable(getattr(made, method, None)) for method in methods):
            return
    if not isinstance(made, KINDS[kind].base_class):
        raise FedsimError(f"{key} is '{name}'; it must name a {KINDS[kind].base}.")


@contextmanager
def current_directory_importable() -> Iterator[None]:
    """Let this thread find the user's files first, as they are under ``python file.py``."""
    outside, _first.directory = _first.directory, os.getcwd()
    importlib.invalidate_caches()
    try:
        yield
    finally:
        _first.directory = outside


class _FoundFirst(threading.local, MetaPathFinder):
    """Finds modules in one more directory, before those of the path, for the thread that says so.

    The path itself stays as it is: who takes a directory from it while another thread goes through
    it makes that one miss the next.
    """

    directory: str | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.directory is None or path is not None:
            return None
        return PathFinder.find_spec(fullname, [self.directory, *sys.path], target)


_first = _FoundFirst()
sys.meta_path.insert(sys.meta_path.index(PathFinder), _first)


@current_directory_importable()
def load(key: str, name: str) -> Callable[..., Any]:
    """Import the callable ``module:name`` that the config's ``key`` says.

    ``module`` is a file in the current directory (``nets:Small`` is ``Small`` of ``./nets.py``)
    or anything importable.

    Raises
    ------
    FedsimError
        If it is not allowed (`fedsim.allowed_code`), which is known before the module is imported,
        or there is no such module or callable. Errors of the user's own code come through as
        they are.
    """
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise FedsimError(
            f"{key} is '{name}'; something of your own is written module:name, such as nets:Small "
            "for Small in nets.py."
        )
    allowed = allowed_code.now()
    top = module_name.partition(".")[0]
    if allowed.of_user and top not in sys.modules and importlib.util.find_spec(top) is None:
        raise _no_module(key, name, module_name)
    if module_name in sys.modules and not allowed_code.is_reserved(module_name):
        _refuse_namesake(key, name, sys.modules[module_name])
    allowed.require(key, name, module_name)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise _no_module(key, name, module_name) from error
    _refuse_namesake(key, name, found)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise FedsimError(f"{key} is '{name}', but '{module_name}' has no callable '{attribute}'.")
    allowed.require_home(key, name, found)
    return found  # type: ignore[no-any-return]


def _no_module(key: str, name: str, module: str) -> FedsimError:
    return FedsimError(
        f"{key} is '{name}', but there is neither a file {module.replace('.', '/')}.py in "
        f"{os.getcwd()} nor an installed module '{module}'."
    )


def _refuse_namesake(key: str, name: str, module: ModuleType) -> None:
    """Refuse a module that was imported in another directory, where this one has its own."""
    here = Path(*module.__name__.split(".")).with_suffix(".py").absolute()
    loaded = Path(getattr(module, "__file__", None) or here)
    if here.is_file() and loaded.is_file() and not here.samefile(loaded):
        raise FedsimError(
            f"{key} is '{name}', and this process has imported {loaded}, not {here}; run it in a "
            "process of its own, or call one of the two otherwise."
        )
