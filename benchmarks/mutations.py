"""Mutation tests of the code behind the guarantees: one-line bugs, each with a test to catch it.

    python -m benchmarks.mutations [--only WORD]

The bugs are planted one at a time in a copy of the package; for each, the one test file that
covers it is run, and a table is printed. A bug that survives shows a property that no test checks.
`make test-slow` runs the same.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutations.toml")
SECONDS = 600
PYTEST = ("-m", "pytest", "-x", "-m", "", "-p", "no:cacheprovider")  # slow tests too
# Errors of code that does not run at all: such a mutant tests nothing, as any use would show it.
NO_CODE = re.compile(
    r"^E +(Attribute|Import|Indentation|Name|Syntax|Type|UnboundLocal)Error\b", re.MULTILINE
)


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Attributes
    ----------
    name : str
        Short description of the bug.
    subject : str
        sampling, bound, noise, denominator, ledger, budget, accounting or compiled.
    file : str
        Path of the file.
    before, after : str
        Text of a line, which occurs once in the file, and its replacement.
    test : str
        The test file that covers it, and options to select a test in it.
    """

    name: str
    subject: str
    file: str
    before: str
    after: str
    test: str

    def planted(self, text: str) -> str:
        """The file's text with the bug.

        Raises
        ------
        ValueError
            If the text does not occur exactly once: the code has changed since the list was made.
        """
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} has {text.count(self.before)} times {self.before!r}")
        return text.replace(self.before, self.after)


def mutants() -> list[Mutant]:
    """All mutants of mutations.toml."""
    return [Mutant(**entry) for entry in tomllib.loads(LIST.read_text())["mutant"]]


@contextmanager
def copied() -> Iterator[Path]:
    """A temporary copy of the files that the tests need."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        ignore = shutil.ignore_patterns("__pycache__", "*.png")
        for folder in ("fedsim", "experiments", "tests", "benchmarks", "examples"):
            shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
        for file in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / file, tree / file)
        yield tree


def passes(tree: Path, test: str) -> bool:
    """Whether a test passes in this copy; a test that hangs or is killed does not.

    Raises
    ------
    RuntimeError
        If the test cannot run, or fails because the mutant is not valid code.
    """
    try:
        ran = subprocess.run(
            [sys.executable, *PYTEST, *test.split()],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    if ran.returncode < 0:
        return False
    if ran.returncode not in (0, 1):  # 0: all passed, 1: a test failed; anything else is no answer
        raise RuntimeError(f"{test} could not run: {ran.stdout.decode()[-2000:]}")
    if crash := NO_CODE.search(ran.stdout.decode()):
        raise RuntimeError(f"{test} fails by {crash[0]}: the bug is none that could pass unseen")
    return ran.returncode == 0


def killed(tree: Path, mutant: Mutant) -> bool:
    """Whether the mutant's test fails with the bug planted; the copy is restored afterwards."""
    path = tree / mutant.file
    text = path.read_text()
    path.write_text(mutant.planted(text))
    try:
        return not passes(tree, mutant.test)
    finally:
        path.write_text(text)


def main() -> None:
    """Test all mutants, or those whose subject and name contain a text; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    table = Table("bug", "in", "seen by", "killed")
    survivors = 0
    with copied() as tree:
        for mutant in mutants():
            if only not in f"{mutant.subject}: {mutant.name}":
                continue
            seen = killed(tree, mutant)
            survivors += not seen
            print(f"{mutant.name}: {'killed' if seen else 'SURVIVES'}", file=sys.stderr, flush=True)
            table.add_row(mutant.name, mutant.subject, mutant.test, "yes" if seen else "NO")
    Console().print(table)
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
