"""Every command and snippet of README and docs does what its page says: it runs.

A page is run from top to bottom in a directory of its own, which has ``run.toml`` (that of
docs/first_run.md) and what it left, ``runs/digits``. Blocks of ``sh`` are commands of fedsim, run
in this process; of ``python``, code that shares one namespace a page; of ``toml``, configs. A title
names the file that a block is. A comment before a block says that it fails, or why it is not run.
Blocks of ``text`` show parts of what the last command printed, or the one in their first line.
"""

from __future__ import annotations

import pkgutil
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedsim import RunConfig
from fedsim.cli import main
from fedsim.deploy.policy import Policy
from fedsim.deploy.services import Node
from fedsim.runs.preflight import check
from fedsim.runs.resolve import resolve

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))
SLOW = {"README.md"} | {
    f"docs/{name}.md"
    for name in (
        "adapters", "audit", "audit_your_own_code", "correlated_noise", "deployment", "engines",
        "first_run", "private_metrics", "resume", "sweeps",
    )
}  # fmt: skip
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>fails|not run: [^>]+|numbers vary: [^>]+) -->\n)?"
    r'```(?P<language>\w*)(?: title="(?P<file>[^"]+)")?\n'
    r"(?P<text>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    language: str
    file: str | None
    note: str | None
    text: str
    line: int


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        # A first line may say the file too.
        named = re.match(r"# (\S+(?:\.py|/node\.toml))\n", match["text"])
        file = match["file"] or (named[1] if named else None)
        yield Block(match["language"], file, match["note"], match["text"], line)


def commands(block: Block) -> list[list[str]]:
    words = (
        shlex.split(line, comments=True) for line in block.text.replace("\\\n", "").splitlines()
    )
    return [line for line in words if line]


def status_of(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


DEMO = "fedsim run experiments/demo.toml --out runs/demo"
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def assert_shown(block: Block, printed: str) -> None:
    """Every line of a block was printed, up to line breaks and to a few percent of its numbers."""
    printed = " ".join(printed.split())
    for line in (" ".join(line.split()) for line in block.text.splitlines()):
        if line.startswith("$ ") or line in ("", "..."):
            continue
        numbers = [float(number) for number in NUMBER.findall(line)]
        pattern = rf"({NUMBER.pattern})".join(re.escape(words) for words in NUMBER.split(line))
        matches = [[*map(float, match.groups())] for match in re.finditer(pattern, printed)]
        assert matches, (block.line, line, printed)
        if not block.note:  # else its numbers vary
            assert pytest.approx(numbers, rel=0.05) in matches, (block.line, line, matches)


def check_output(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    first_line = block.text.splitlines()[0]
    if first_line.startswith("$ "):
        command = first_line.removeprefix("$ ").replace("make demo", DEMO).split()
        assert status_of(command[1:]) == 0
    out, err = capsys.readouterr()
    assert_shown(block, err + out)


def run_block(block: Block, namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    if block.note and block.note.startswith("not run"):
        return
    if block.file:
        Path(block.file).parent.mkdir(parents=True, exist_ok=True)
        Path(block.file).write_text(block.text)
    if block.file and block.file.endswith("node.toml"):
        directory = Path(block.file).parent
        assert Node.load(directory).client == 0
        assert Policy.load(Path(block.file)).least_population == 50
    if block.language == "toml" and not block.file:
        config = RunConfig.parse(tomllib.loads(block.text))
        if config.stop.metric or config.checkpoint.best:
            check(resolve(config))
    elif block.language == "python" and not block.file:
        exec(compile(block.text, f"line {block.line}", "exec"), namespace)
    elif block.language == "text":
        check_output(block, capsys)
    elif block.language == "sh":
        for program, *arguments in commands(block):
            capsys.readouterr()
            assert program == "fedsim", f"line {block.line}: say why {program} is not run"
            assert (status_of(arguments) != 0) == (block.note == "fails"), (block.line, arguments)


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the first page's config and its run."""
    directory = tmp_path_factory.mktemp("first-run")
    config = next(block for block in blocks("docs/first_run.md") if block.file == "run.toml")
    (directory / "run.toml").write_text(config.text)
    assert (
        status_of(["run", str(directory / "run.toml"), "--out", str(directory / "runs/digits")])
        == 0
    )
    return directory


@pytest.fixture
def flower_app() -> dict[str, Any]:
    """What the snippets for Flower's users take as given: an app and its parameters."""
    import numpy as np
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    client_app = ClientApp()

    @client_app.train()
    def train(message: Message, context: Any) -> Message:
        del context
        arrays = [array + 0.1 for array in message.content["arrays"].to_numpy_ndarrays()]
        content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    @client_app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        del context
        metrics = MetricRecord({"num-examples": 1, "loss": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return {"client_app": client_app, "initial_arrays": ArrayRecord([np.zeros(3, np.float32)])}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in SLOW else ()) for page in PAGES]
)
def test_what_a_page_shows_runs(
    page: str,
    first_run: Path,
    flower_app: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(first_run, tmp_path, dirs_exist_ok=True)
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    if page in ("docs/index.md", "docs/first_run.md"):  # which make it
        shutil.rmtree(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    try:
        for block in blocks(page):
            run_block(block, flower_app, capsys)
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]


def made_by_the_site() -> set[str]:
    """Pages that docs/hooks.py and docs/generate.py make of what lies elsewhere."""
    makers = "".join((ROOT / f"docs/{name}.py").read_text() for name in ("hooks", "generate"))
    return set(re.findall(r'"([\w/]+\.md)"', makers))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_that_runs_a_config_shows_it_or_says_whose_it_is(page: str) -> None:
    text = (ROOT / page).read_text()
    run = set(re.findall(r"^fedsim \w+ ([\w-]+\.toml)", text, flags=re.MULTILINE))
    shown = set(re.findall(r'title="([^"]+)"', text))
    assert run - shown <= ({"run.toml"} if "first_run.md" in text else set())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_links_to_what_is_there(page: str) -> None:
    folder = (ROOT / page).parent
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text())
    local = {target for target in targets if "://" not in target} - made_by_the_site()
    assert [target for target in sorted(local) if not (folder / target).exists()] == []


NAMES = re.findall(r"`(fedsim\.[\w.]+)`", (ROOT / "docs" / "internals.md").read_text())


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_a_name_on_the_internals_page_is_in_the_code(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None


def test_the_demo_is_the_one_that_is_tested() -> None:
    assert f"{DEMO} " in (ROOT / "Makefile").read_text().replace("$(BIN)/", "")


def test_the_internals_page_names_the_code() -> None:
    assert len(NAMES) > 15
