"""The house: one word, one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
VAGUE = {"own", "each", "found", "kind", "at", "part", "whole", "some", "its"}


def trees():
    for package in ("fedsim", "experiments"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


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
