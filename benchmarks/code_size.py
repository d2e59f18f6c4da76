"""``python -m benchmarks.code_size`` counts the package's lines of code, files and comments.

A line of code is one that is no import, no ``__all__``, no docstring, no comment and not blank.
``--round`` runs a private MLP in one process and counts, in the third of four rounds, the functions
of fedsim that are called, the files they are in, and the depths of the deepest stack of them and of
the stack in which a client's row is added to the sum. Comprehensions count as functions, as Python
3.11 calls them.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
OTHERS = {"C": "*.c", "templates": "*.html", "JavaScript": "*.js", "CSS": "*.css"}
# The wings of DESIGN.md; all other packages, whatever their names have been, are its floors.
WINGS = {"config", "runs", "audit", "reports", "deploy", "apps", "cli", "."}


def code_lines(source: str) -> int:
    """Number of lines of code in ``source``."""
    tree = ast.parse(source)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and _is_no_code(node):
            lines -= _lines(node)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= _lines(first)
    return len(lines)


def _is_no_code(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return any(isinstance(name, ast.Name) and name.id == "__all__" for name in node.targets)
    return isinstance(node, ast.Import | ast.ImportFrom)


def _lines(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def comment_lines(source: str) -> int:
    """Number of lines with a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def report_sizes(root: Path) -> None:
    """Print lines of code, files and comments per package, and lines of other languages."""
    code, files, comments = Counter[str](), Counter[str](), Counter[str]()
    long_files = []
    for path in sorted((root / "fedsim").rglob("*.py")):
        parts = path.relative_to(root / "fedsim").parts
        package = parts[0] if len(parts) > 1 else "."
        source = path.read_text()
        code[package] += code_lines(source)
        comments[package] += comment_lines(source)
        files[package] += 1
        if (length := source.count("\n")) > 400:
            long_files.append(f"{path.relative_to(root)} ({length})")
    print(f"{'package':<20}{'code':>8}{'files':>8}{'comments':>10}")
    for package in sorted(code):
        print(f"{package:<20}{code[package]:>8}{files[package]:>8}{comments[package]:>10}")
    floors = sum(lines for package, lines in code.items() if package not in WINGS)
    print(f"{'whole':<20}{code.total():>8}{files.total():>8}{comments.total():>10}")
    print(f"{'up to federation/':<20}{floors:>8}")
    for language, pattern in OTHERS.items():
        paths = list((root / "fedsim").rglob(pattern))
        lines = sum(bool(line.strip()) for path in paths for line in path.read_text().splitlines())
        print(f"{language:<20}{lines:>8}{len(paths):>8}")
    print("over 400 lines:", ", ".join(long_files) or "none")


CONFIG = """
rounds = 4
[data]
name = "digits"
[partition]
clients = 40
[model]
name = "mlp"
widths = [256, 256]
[client]
lr = 0.1
[cohort]
name = "poisson"
rate = 0.5
[mechanism]
name = "normalization"
[noise]
multiplier = 1.0
"""

ROW_SUM = "GridSum.add_scaled_"
"""Function that adds a block's rows to the sum, on its grid."""


class Calls:
    """A profile function that records the package's called functions and their deepest stack."""

    def __init__(self, package: Path) -> None:
        self.package = str(package)
        self.functions: set[CodeType] = set()
        self.deepest: list[str] = []
        self.of_row: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self._is_ours(frame):
            return
        self.functions.add(frame.f_code)
        stack, caller = [frame.f_code.co_qualname], frame.f_back
        while caller is not None:
            if self._is_ours(caller):
                stack.append(caller.f_code.co_qualname)
            caller = caller.f_back
        if len(stack) > len(self.deepest):
            self.deepest = stack
        if stack[0] == ROW_SUM:
            self.of_row = stack

    def _is_ours(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self.package)


def report_round() -> None:
    """Print how many functions a private round of an MLP calls, and two of its stacks."""
    import fedsim

    calls = Calls(Path(fedsim.__file__).parent)

    class ThirdRound(fedsim.Callback):
        def on_round(self, status: fedsim.RunStatus) -> str | bool | None:
            sys.setprofile(calls if status.round == 2 else None)
            return None

    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "run.toml"
        config.write_text(CONFIG)
        out = str(Path(directory) / "run")
        fedsim.run(fedsim.RunConfig.load(config), out=out, callbacks=[ThirdRound()])
    sys.setprofile(None)
    files = {code.co_filename for code in calls.functions}
    print(f"a private round of an MLP: {len(calls.functions)} functions in {len(files)} files")
    deepest = " < ".join(calls.deepest[:4])
    print(f"deepest stack of fedsim's own frames: {len(calls.deepest)} ({deepest} < ...)")
    print(f"from the call to the sum of rows: {len(calls.of_row)}")
    print("\n".join(f"  {name}" for name in reversed(calls.of_row)))


def main() -> None:
    """Print the sizes and, if requested, the counts of a round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout to count")
    parser.add_argument("--round", action="store_true", help="count a round's functions as well")
    options = parser.parse_args()
    report_sizes(options.root)
    if options.round:
        report_round()


if __name__ == "__main__":
    main()
