"""The house: one word, one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
VAGUE = {"own", "each", "found", "kind", "at", "part", "whole", "some", "its"}


@cache
def trees():
    return [
        (path.relative_to(ROOT).as_posix(), ast.parse(path.read_text()))
        for package in ("fedsim", "experiments")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def test_no_two_public_classes_have_one_name():
    places = defaultdict(list)
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_a_variable_says_what_it_is():
    names = [
        node.arg if isinstance(node, ast.arg) else node.id
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]
    assert sum(name in VAGUE for name in names) < 0.01 * len(names)


# What they read is no user's: fedsim's own files, and the system's.
OWN_FILES = {
    "fedsim/audit/target_audit.py",
    "fedsim/audit/federation.py",
    "fedsim/kernels/building.py",
    "fedsim/datasets/named.py",
    "fedsim/lazy.py",
    "fedsim/process.py",
    "fedsim/registry.py",
    "fedsim/reports/page.py",
}


def test_users_files_are_read_through_one_door():
    """A FIFO under a file's name would keep another reader than `fedsim.regular_files` for ever."""
    readers = [
        f"{path}:{node.lineno}"
        for path, tree in trees()
        if path != "fedsim/regular_files.py" and path not in OWN_FILES
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _reads(node)
    ]
    assert readers == []


def _reads(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    if function.endswith((".read_text", ".read_bytes")):
        return not function.startswith("regular_files.")
    if function in ("load_file", "np.load"):
        return not ast.unparse(call.args[0]).startswith(("regular_files.require(", "file"))
    modes = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    if function == "open" or function.endswith(".open"):
        opens = any(mode in ("rb", "r+b", "ab", "r", "a") for mode in modes)
        return opens and not any(keyword.arg == "opener" for keyword in call.keywords)
    return False
